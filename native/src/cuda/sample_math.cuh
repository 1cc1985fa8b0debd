// exp, log and noise operation by operation as on the CPU (cpu/kernels/math.h and sample.h), so
// that both draw the same ids.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace slotwise::cuda {

// e^x for x <= 0, 0 below -104.
__device__ __forceinline__ float exp_of(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  x = fmaxf(-104.0f, x);
  const float shifted = __fmaf_rn(x, 1.44269504f, magic);
  const float n = shifted - magic;
  float r = __fmaf_rn(n, -0.693145752f, x);
  r = __fmaf_rn(n, -1.42860677e-6f, r);
  float p = 0.00138145f;
  p = __fmaf_rn(p, r, 0.00836875f);
  p = __fmaf_rn(p, r, 0.04166839f);
  p = __fmaf_rn(p, r, 0.1666652f);
  p = __fmaf_rn(p, r, 0.49999993f);
  p = __fmaf_rn(p, r * r, r) + 1.0f;
  // 2^n in two factors, so that subnormal results come out right.
  const int exponent = __float_as_int(shifted) - __float_as_int(magic);
  const int half = exponent >> 1;
  return p * __int_as_float((half + 127) << 23) * __int_as_float((exponent - half + 127) << 23);
}

// The natural logarithm of a positive normal number.
__device__ __forceinline__ float log_of(float x) {
  const int sqrt_half = 0x3f3504f3;
  const int exponent = (__float_as_int(x) - sqrt_half) >> 23;
  const float f = __int_as_float(__float_as_int(x) - exponent * (1 << 23)) - 1.0f;
  const float e = static_cast<float>(exponent);
  float p = 0.06746533f;
  p = __fmaf_rn(p, f, -0.11675623f);
  p = __fmaf_rn(p, f, 0.11888197f);
  p = __fmaf_rn(p, f, -0.12405596f);
  p = __fmaf_rn(p, f, 0.14219548f);
  p = __fmaf_rn(p, f, -0.16667995f);
  p = __fmaf_rn(p, f, 0.20002119f);
  p = __fmaf_rn(p, f, -0.2500001f);
  p = __fmaf_rn(p, f, 0.33333313f);
  const float square = f * f;
  p = __fmaf_rn(p, f * square, e * -2.12194440e-4f);
  p = __fmaf_rn(square, -0.5f, p);
  return __fmaf_rn(e, 0.693359375f, f + p);
}

struct Words {
  uint32_t word[4];
};

__device__ __forceinline__ uint32_t word_at(const Words& words, int index) {
  const uint32_t low = index % 2 == 0 ? words.word[0] : words.word[1];
  const uint32_t high = index % 2 == 0 ? words.word[2] : words.word[3];
  return index < 2 ? low : high;
}

// Philox4x32-10 of the counter (block, position, 0, 0).
__device__ __forceinline__ Words philox(uint32_t block, uint32_t position, uint64_t seed) {
  uint32_t a = block, b = position, c = 0, d = 0;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = static_cast<uint64_t>(a) * 0xD2511F53u;
    const uint64_t second = static_cast<uint64_t>(c) * 0xCD9E8D57u;
    a = static_cast<uint32_t>(second >> 32) ^ b ^ key0;
    c = static_cast<uint32_t>(first >> 32) ^ d ^ key1;
    b = static_cast<uint32_t>(second);
    d = static_cast<uint32_t>(first);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

// -log(-log(1 - v)) for v = (word + 1/2) / 2^32, held below 1.
__device__ __forceinline__ float gumbel(uint32_t word) {
  const float high = static_cast<float>(word >> 16), low = static_cast<float>(word & 0xffff);
  float v = __fmaf_rn(high, 65536.0f, low + 0.5f) * 2.3283064365386963e-10f;
  v = fminf(v, 0.99999994f);
  const float u = 1.0f - v;
  const float rounding = (1.0f - u) - v;
  const float exponential = 0.0f - (log_of(u) + __fdiv_rn(rounding, u));
  return 0.0f - log_of(exponential);
}

// No noise is larger: the smallest v is 2^-33, whose noise is 22.9.
constexpr float kMaxGumbel = 23.5f;

// Whether z + gumbel(word) may be `best` or more; cheap, and yes for a few that are less. The noise
// is at most -log(v).
__device__ __forceinline__ bool may_reach(float best, float z, uint32_t word) {
  float bound;  // slightly above e^(z - best)
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(bound) : "f"((z - best) * 1.44269504f + 1e-3f));
  return __uint2float_rz(word) * 2.3283064365386963e-10f <= bound;
}

// Unsigned integers in the order of floats, NaN left out.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// Larger for a larger value, of equal ones for a lower id.
__device__ __forceinline__ uint64_t candidate(float value, int id) {
  return static_cast<uint64_t>(ordered(value + 0.0f)) << 32 | ~static_cast<uint32_t>(id);
}

__device__ __forceinline__ int id_of(uint64_t candidate) {
  return static_cast<int>(~static_cast<uint32_t>(candidate));
}

__device__ __forceinline__ float value_of(uint64_t candidate) {
  return from_ordered(static_cast<uint32_t>(candidate >> 32));
}

}  // namespace slotwise::cuda
