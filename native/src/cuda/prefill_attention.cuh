// What the two kernels of prefill attention share. Both keep scores and totals in the registers of
// an mma's accumulator (16 rows to a warp): a lane holds, of two rows 8 apart, columns 2 q and
// 2 q + 1 of every 8, q its place in the quad; element 4 n + 2 r + i is row r, column 8 n + 2 q +
// i.
//
// The rows of a block are packed: row r of a KV head is row r / G of the chunk and query head r % G
// of the head's G, so that a few rows of a chunk share the reads of K and V.
#pragma once

#include "attention_math.cuh"
#include "launch.cuh"

namespace slotwise::cuda {

constexpr int kTileScores = kAttentionTile / 2;  // of a lane
constexpr float kLog2E = 1.44269504088896340736f;

struct PrefillArgs {
  const void* q;  // [T, H_q, D], q[t * q_stride + h * D + d]
  int64_t q_stride;
  const void* k;  // of the slot
  const void* v;
  int64_t k_position_stride, k_head_stride;
  int64_t v_position_stride, v_head_stride;
  void* out;  // [T, H_q, D]
  int64_t out_stride;
  int num_rows;  // packed, T * G
  int group;     // G
  int start;
  float c;
};

// D = 128 or 64, 16-bit types, compute capability 9.0.
bool prefill_attention_wgmma_supported(const ChunkParams& params);
void prefill_attention_wgmma(const ChunkParams& params, const PrefillArgs& args, Stream stream);

// The lane's two rows.
struct LaneRows {
  int position[2];

  __device__ LaneRows(const PrefillArgs& args, int first) {
    for (int r = 0; r < 2; ++r) position[r] = position_of(args, first + 8 * r);
  }

  // Rows past the last stand for it; they are not stored.
  static __device__ int position_of(const PrefillArgs& args, int row) {
    return args.start + min(row, args.num_rows - 1) / args.group;
  }
};

// Sets the scores of positions after the rows' to -inf.
__device__ __forceinline__ void mask_scores(float (&s)[kTileScores], const LaneRows& rows,
                                            int tile_start, int quad_lane) {
#pragma unroll
  for (int i = 0; i < kTileScores; ++i) {
    const int position = tile_start + 8 * (i / 4) + 2 * quad_lane + i % 2;
    if (position > rows.position[i / 2 % 2]) s[i] = -INFINITY;
  }
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

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

// The running state of the lane's two rows, without O.
struct RowTotals {
  float max[2] = {0, 0};
  float sum[2] = {-0.0f, -0.0f};
};

// What a tile does to the totals: O' = fma(O, a, o * b).
struct TileFactors {
  float a[2];
  float b[2];
};

// From the scores of a tile: its weights, in pairs as the next mma's operand, and its share of the
// totals. The first tile is taken as it is: -0 * 1 + x * 1 is x. A row that sees nothing of the
// tile has weights and o of 0 and keeps its total: x * 1 + 0 * -0 is x.
template <typename T>
__device__ __forceinline__ TileFactors take_tile(float (&s)[kTileScores], uint32_t (&p)[32],
                                                 RowTotals& totals, const LaneRows& rows,
                                                 int tile_start, float c) {
  TileFactors factors;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool seen = rows.position[r] >= tile_start;
    float max = s[2 * r];
#pragma unroll
    for (int i = 0; i < kTileScores; i += 4) {
      max = fmaxf(max, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
    }
    max = quad_max(max);
    const float max_c = seen ? __fmul_rn(max, c) : 0;
    float sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < kTileScores / 4; ++n) {
      const float first = weight_of(s[4 * n + 2 * r], c, max_c);
      const float second = weight_of(s[4 * n + 2 * r + 1], c, max_c);
      sums[n / 4] = __fadd_rn(__fadd_rn(sums[n / 4], first), second);
      p[2 * n + r] = pack<T>(first, second);
    }
    const float sum = quad_sum(__fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3])));
    FoldFactors f = {max, 1, 1};
    if (tile_start > 0) f = fold_factors(totals.max[r], max, c);
    if (!seen) f = {totals.max[r], 1, -0.0f};
    totals.max[r] = f.max;
    totals.sum[r] = fold(totals.sum[r], sum, f);
    factors.a[r] = f.a;
    factors.b[r] = f.b;
  }
  return factors;
}

// Folds N columns' worth of a tile's o into the totals.
template <int N>
__device__ __forceinline__ void fold_columns(float* totals, const float (&o)[N],
                                             const TileFactors& f) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int r = i / 2 % 2;
    totals[i] = fold(totals[i], o[i], {0, f.a[r], f.b[r]});
  }
}

template <typename T, int kDim>
__device__ __forceinline__ void store_rows(const PrefillArgs& args, int kv_head, int first,
                                           const float (&o)[kDim / 2], const RowTotals& totals,
                                           int quad_lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + 8 * r;
    if (row >= args.num_rows) continue;
    const int head = kv_head * args.group + row % args.group;
    T* out = static_cast<T*>(args.out) + row / args.group * args.out_stride +
             static_cast<int64_t>(head) * kDim + 2 * quad_lane;
    const float scale = inverse(totals.sum[r]);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<uint32_t*>(out + 8 * n) =
          pack<T>(finish(o[4 * n + 2 * r], scale), finish(o[4 * n + 2 * r + 1], scale));
    }
  }
}

}  // namespace slotwise::cuda
