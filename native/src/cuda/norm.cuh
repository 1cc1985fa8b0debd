// The norm of a row, the same to the bit in every kernel that gives one.
//
// One block of norm_threads(hidden) for a row. Thread t owns the elements [8 v, 8 v + 8) for v = t,
// t + blockDim.x, ... and adds their squares in this order from 0, by fma; block_sum adds the
// threads.
#pragma once

#include <algorithm>

#include "launch.cuh"
#include "vectors.cuh"

namespace slotwise::cuda {

constexpr int kMaxNormThreads = 1024;

// A thread for each vector of a row, in whole warps.
inline int norm_threads(int64_t hidden) {
  const int64_t warps = (hidden + 32 * kVector - 1) / (32 * kVector);
  return 32 * static_cast<int>(std::clamp<int64_t>(warps, 1, kMaxNormThreads / 32));
}

// A thread's sum of squares goes on with its next vector.
__device__ __forceinline__ float add_squares(float sum, const float (&x)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum = __fmaf_rn(x[i], x[i], sum);
  return sum;
}

// The sum over the block, the same in every thread: lanes by halves, then warps in order from 0.
// Once in a kernel.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float warp_sums[kMaxNormThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = __fadd_rn(x, __shfl_xor_sync(0xffffffff, x, distance));
  }
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
  const int num_warps = blockDim.x / 32;
  for (int warp = 0; warp < num_warps; ++warp) sum = __fadd_rn(sum, warp_sums[warp]);
  return sum;
}

__device__ __forceinline__ float norm_scale(float sum_of_squares, int64_t hidden, float eps) {
  const float mean = __fdiv_rn(sum_of_squares, static_cast<float>(hidden));
  return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
}

// In float32; the caller rounds it once.
__device__ __forceinline__ float norm_value(float x, float scale, float weight) {
  return __fmul_rn(__fmul_rn(x, scale), weight);
}

}  // namespace slotwise::cuda
