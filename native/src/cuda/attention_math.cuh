// The arithmetic of attention, the same in every kernel: prefill and decode agree to the bit.
//
// For one row (a query position and head) and one tile of kAttentionTile = 128 positions:
//   s[j]  = q . k[j], products added along D in steps of 16 in order by the tensor cores, from 0;
//           -inf for positions after the row's
//   m     = max over j of s[j]
//   p[j]  = exp2(s[j] * c - m * c), c = scale * log2(e)                        (weight_of)
//   l     = ((g0 + g1) + (g2 + g3)), g_i the sum over the 32 positions [32 i, 32 i + 32) of the
//           tile: lane q of a quad adds p[8 n + 2 q], then p[8 n + 2 q + 1], for n = 4 i .. 4 i + 3
//           in order from 0; the tile's l of the lane is ((g0 + g1) + (g2 + g3)); and the quad's
//           lanes are added last: x += shfl_xor(x, 1); x += shfl_xor(x, 2)
//   o[d]  = sum of p[j], rounded to the cache's type, times v[j, d], added along j in steps of 16
//           in order by the tensor cores, from 0
// The tiles' states (m, l, o) are folded in order, from the first:                  (fold_*)
//   M' = max(M, m); a = exp2(M * c - M' * c); b = exp2(m * c - M' * c)
//   L' = fma(L, a, l * b); O'[d] = fma(O[d], a, o[d] * b)
// and at the end out[d] = O[d] * (1 / L), rounded to the output's type.
//
// Rows of k and v after the last position that any row of the block may see are zeros in shared
// memory, whatever the cache holds there: a stale NaN times a weight of 0 would be NaN.
#pragma once

#include <cuda_runtime.h>

namespace slotwise::cuda {

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// max_c = m * c, rounded: __fmul_rn(m, c).
__device__ __forceinline__ float weight_of(float s, float c, float max_c) {
  return exp2_fast(__fmaf_rn(s, c, -max_c));
}

// c, of the softmax scale; one product in float32 on the host.
inline float exponent_scale(float scale) { return scale * 1.4426950408889634f; }

struct FoldFactors {
  float max;  // M'
  float a;    // of the total so far
  float b;    // of the tile
};

__device__ __forceinline__ FoldFactors fold_factors(float total_max, float tile_max, float c) {
  const float max = fmaxf(total_max, tile_max);
  const float max_c = __fmul_rn(max, c);
  return {max, weight_of(total_max, c, max_c), weight_of(tile_max, c, max_c)};
}

__device__ __forceinline__ float fold(float total, float tile, const FoldFactors& f) {
  return __fmaf_rn(total, f.a, __fmul_rn(tile, f.b));
}

__device__ __forceinline__ float finish(float total, float inverse_sum) {
  return __fmul_rn(total, inverse_sum);
}

__device__ __forceinline__ float inverse(float sum) { return __frcp_rn(sum); }

}  // namespace slotwise::cuda
