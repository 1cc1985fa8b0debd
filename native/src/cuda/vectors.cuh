// Eight neighbouring values at a time, as float32: 16-byte accesses where every row begins on such
// a border, else one by one with an end that may be ragged. The arithmetic is the same.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace slotwise::cuda {

constexpr int kVector = 8;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T round_to(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Two values, rounded, as they lie in memory.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The values [0, count) of `from`, zeros after them.
template <bool kAligned, typename T>
__device__ __forceinline__ void load8(const T* from, int64_t count, float (&to)[kVector]) {
  constexpr int kPart = 16 / sizeof(T);
#pragma unroll
  for (int first = 0; first < kVector; first += kPart) {
    alignas(16) T part[kPart];
    if constexpr (kAligned) {
      *reinterpret_cast<int4*>(part) = *reinterpret_cast<const int4*>(from + first);
    } else {
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        part[i] = first + i < count ? from[first + i] : round_to<T>(0.0f);
      }
    }
#pragma unroll
    for (int i = 0; i < kPart; ++i) to[first + i] = to_float(part[i]);
  }
}

template <bool kAligned, typename T>
__device__ __forceinline__ void store8(T* to, int64_t count, const float (&from)[kVector]) {
  constexpr int kPart = 16 / sizeof(T);
#pragma unroll
  for (int first = 0; first < kVector; first += kPart) {
    alignas(16) T part[kPart];
#pragma unroll
    for (int i = 0; i < kPart; ++i) part[i] = round_to<T>(from[first + i]);
    if constexpr (kAligned) {
      *reinterpret_cast<int4*>(to + first) = *reinterpret_cast<const int4*>(part);
    } else {
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        if (first + i < count) to[first + i] = part[i];
      }
    }
  }
}

}  // namespace slotwise::cuda
