// RMSNorm over a head and rotary embedding, one warp for a head: the same bits in every kernel.
//
// A lane holds pairs of neighbours, i = 2 (lane + 32 j) and i + 1, of the first half of the head
// and the same of the second half; these are what the rotation brings together.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace slotwise::cuda {

__device__ __forceinline__ float2 load_two(const float* p) {
  return *reinterpret_cast<const float2*>(p);
}
__device__ __forceinline__ float2 load_two(const __nv_bfloat16* p) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p));
}
__device__ __forceinline__ float2 load_two(const __half* p) {
  return __half22float2(*reinterpret_cast<const __half2*>(p));
}

__device__ __forceinline__ void store_two(float* p, float2 x) { *reinterpret_cast<float2*>(p) = x; }
__device__ __forceinline__ void store_two(__nv_bfloat16* p, float2 x) {
  *reinterpret_cast<__nv_bfloat162*>(p) = __float22bfloat162_rn(x);
}
__device__ __forceinline__ void store_two(__half* p, float2 x) {
  *reinterpret_cast<__half2*>(p) = __float22half2_rn(x);
}

template <int D>
struct Head {
  static constexpr int kPairs = (D / 2 + 63) / 64;
  float2 first[kPairs];
  float2 second[kPairs];
};

// use(i, pair) for each pair (i, i + 1) of the head that this lane holds.
template <int D, typename Use>
__device__ __forceinline__ void for_pairs(Head<D>& head, int lane, const Use& use) {
#pragma unroll
  for (int j = 0; j < Head<D>::kPairs; ++j) {
    const int i = 2 * (lane + 32 * j);
    if (i < D / 2) {
      use(i, head.first[j]);
      use(i + D / 2, head.second[j]);
    }
  }
}

template <int D, typename T>
__device__ __forceinline__ Head<D> load_head(const T* x, int lane) {
  Head<D> head;
#pragma unroll
  for (int j = 0; j < Head<D>::kPairs; ++j) head.first[j] = head.second[j] = make_float2(0, 0);
  for_pairs(head, lane, [&](int i, float2& pair) { pair = load_two(x + i); });
  return head;
}

template <int D, typename T>
__device__ __forceinline__ void store_head(Head<D>& head, T* out, int lane) {
  for_pairs(head, lane, [&](int i, const float2& pair) { store_two(out + i, pair); });
}

// 1 / sqrt(mean(x^2) + eps): a lane adds its squares in the order of its pairs, first half and
// second half in turn; then the lanes are added by halves of the warp.
template <int D>
__device__ __forceinline__ float inverse_rms(const Head<D>& head, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < Head<D>::kPairs; ++j) {
    sum = __fmaf_rn(head.first[j].x, head.first[j].x, sum);
    sum = __fmaf_rn(head.first[j].y, head.first[j].y, sum);
    sum = __fmaf_rn(head.second[j].x, head.second[j].x, sum);
    sum = __fmaf_rn(head.second[j].y, head.second[j].y, sum);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
  }
  const float mean = __fdiv_rn(sum, static_cast<float>(D));
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

__device__ __forceinline__ float scaled(float x, float inverse, float weight) {
  return __fmul_rn(__fmul_rn(x, inverse), weight);
}

__device__ __forceinline__ void rotate(float& a, float& b, float cos, float sin) {
  const float first = __fmaf_rn(a, cos, -__fmul_rn(b, sin));
  b = __fmaf_rn(b, cos, __fmul_rn(a, sin));
  a = first;
}

// The cosines of a head's first half, and the sines, at a position: cos and sin [D / 2].
template <int D>
__device__ __forceinline__ Head<D> load_angles(const float* cos, const float* sin, int lane) {
  Head<D> angles;
#pragma unroll
  for (int j = 0; j < Head<D>::kPairs; ++j) {
    const int i = min(2 * (lane + 32 * j), D / 2 - 2);
    angles.first[j] = load_two(cos + i);
    angles.second[j] = load_two(sin + i);
  }
  return angles;
}

// Norm where norm [D] is not null, then rotation.
template <int D>
__device__ __forceinline__ void norm_and_rotate(Head<D>& head, const float* norm, float eps,
                                                const Head<D>& angles, int lane) {
  if (norm != nullptr) {
    const Head<D> weight = load_head<D>(norm, lane);
    const float inverse = inverse_rms(head, eps);
#pragma unroll
    for (int j = 0; j < Head<D>::kPairs; ++j) {
      head.first[j].x = scaled(head.first[j].x, inverse, weight.first[j].x);
      head.first[j].y = scaled(head.first[j].y, inverse, weight.first[j].y);
      head.second[j].x = scaled(head.second[j].x, inverse, weight.second[j].x);
      head.second[j].y = scaled(head.second[j].y, inverse, weight.second[j].y);
    }
  }
#pragma unroll
  for (int j = 0; j < Head<D>::kPairs; ++j) {
    rotate(head.first[j].x, head.second[j].x, angles.first[j].x, angles.second[j].x);
    rotate(head.first[j].y, head.second[j].y, angles.first[j].y, angles.second[j].y);
  }
}

}  // namespace slotwise::cuda
