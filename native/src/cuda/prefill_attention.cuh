// What the kernels of prefill attention share. They keep scores and totals in the registers of an
// mma's accumulator, 16 rows to a warp: x[n][2 r + i] of a lane is its row r of two, 8 apart, and
// column 8 n + 2 q + i, q the lane's place in its quad.
//
// The rows of a block are packed: row r of a KV head is row r / G of the chunk and query head r % G
// of the head's G, so that a few rows of a chunk share the reads of K and V.
#pragma once

#include "attention_math.cuh"
#include "launch.cuh"
#include "vectors.cuh"

namespace slotwise::cuda {

constexpr int kEights = kAttentionTile / 8;     // columns of scores
constexpr int kSixteens = kAttentionTile / 16;  // steps of the product with V

struct PrefillArgs {
  const void* q;  // [T, H_q, D], q[t * q_stride + h * D + d]
  int64_t q_stride;
  const void* k;  // of the cache
  const void* v;
  int64_t k_slot_stride, k_position_stride, k_head_stride;
  int64_t v_slot_stride, v_position_stride, v_head_stride;
  void* out;  // [T, H_q, D]
  int64_t out_stride;
  int num_rows;  // packed, T * G
  int group;     // G
  int slot;
  int start;
  float c;
  const ChunkPlace* place;  // or null
};

// With the chunk's place, if that is on the device. After wait_for_predecessor().
__device__ __forceinline__ PrefillArgs placed(PrefillArgs args) {
  if (args.place) {
    args.slot = args.place->slot;
    args.start = args.place->start;
    args.num_rows = args.place->num_rows * args.group;
  }
  return args;
}

// False, with nothing launched, but for D = 128 or 64 on compute capability 9.0 and 16-bit types;
// and, with a place on the device, where a ring of links cannot be had.
bool prefill_attention_wgmma(const PrefillArgs& args, const CacheParams& cache, Stream stream);

// Where q of a packed row lies.
template <typename T, int kDim>
__device__ __forceinline__ const T* query_row(const PrefillArgs& args, int row, int kv_head) {
  const int head = kv_head * args.group + row % args.group;
  return static_cast<const T*>(args.q) + row / args.group * args.q_stride +
         static_cast<int64_t>(head) * kDim;
}

template <typename T, int kDim>
__device__ __forceinline__ T* out_row(const PrefillArgs& args, int row, int kv_head) {
  const int head = kv_head * args.group + row % args.group;
  return static_cast<T*>(args.out) + row / args.group * args.out_stride +
         static_cast<int64_t>(head) * kDim;
}

// The positions of the lane's two rows.
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
__device__ __forceinline__ void mask_scores(float (&s)[kEights][4], const LaneRows& rows,
                                            int tile_start) {
  const int first = tile_start + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + 8 * n + i % 2 > rows.position[i / 2]) s[n][i] = -INFINITY;
    }
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

// A tile's largest score and sum of weights, of the lane's two rows; and their running totals.
struct RowStates {
  float max[2];
  float sum[2];
};

// What a tile does to O: O' = fma(O, a, o * b).
struct TileFactors {
  float a[2];
  float b[2];
};

// Before the first tile: -0 * 1 + x * 1 is x.
constexpr float kNothing = -0.0f;

// Of a row and its next tile. The first is taken as it is, and a row that sees nothing of a tile,
// whose weights are 0, keeps its total: x * 1 + 0 * -0 is x.
__device__ __forceinline__ FoldFactors next_factors(float total_max, float tile_max, float c,
                                                    bool first, bool seen) {
  if (first) return {tile_max, 1, 1};
  if (!seen) return {total_max, 1, -0.0f};
  return fold_factors(total_max, tile_max, c);
}

// From the scores of a tile to its weights, as the operand of the product with V.
template <typename T>
__device__ __forceinline__ RowStates weigh_tile(float (&s)[kEights][4], uint32_t (&p)[kSixteens][4],
                                                const LaneRows& rows, int tile_start, float c) {
  RowStates state;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float max = s[0][2 * r];
#pragma unroll
    for (int n = 0; n < kEights; ++n) max = fmaxf(max, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    max = quad_max(max);
    const float max_c = rows.position[r] >= tile_start ? __fmul_rn(max, c) : 0;
    float sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const float even = weight_of(s[n][2 * r], c, max_c);
      const float odd = weight_of(s[n][2 * r + 1], c, max_c);
      sums[n / 4] = __fadd_rn(__fadd_rn(sums[n / 4], even), odd);
      p[n / 2][n % 2 * 2 + r] = pack<T>(even, odd);
    }
    state.max[r] = max;
    state.sum[r] = quad_sum(__fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3])));
  }
  return state;
}

__device__ __forceinline__ TileFactors fold_rows(RowStates& totals, const RowStates& tile,
                                                 const LaneRows& rows, int tile_start, float c) {
  TileFactors factors;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const FoldFactors f = next_factors(totals.max[r], tile.max[r], c, tile_start == 0,
                                       rows.position[r] >= tile_start);
    totals.max[r] = f.max;
    totals.sum[r] = fold(totals.sum[r], tile.sum[r], f);
    factors.a[r] = f.a;
    factors.b[r] = f.b;
  }
  return factors;
}

// Folds 8 N columns of a tile's o into the totals.
template <int N>
__device__ __forceinline__ void fold_columns(float (*totals)[4], const float (&o)[N][4],
                                             const TileFactors& f) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      totals[n][i] = fold(totals[n][i], o[n][i], {0, f.a[i / 2], f.b[i / 2]});
    }
  }
}

// `first`: the lane's first packed row.
template <typename T, int kDim>
__device__ __forceinline__ void store_rows(const PrefillArgs& args, int kv_head, int first,
                                           const float (&o)[kDim / 8][4], const RowStates& totals) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first + 8 * r;
    if (row >= args.num_rows) continue;
    T* out = out_row<T, kDim>(args, row, kv_head) + 2 * (threadIdx.x % 4);
    const float scale = inverse(totals.sum[r]);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<uint32_t*>(out + 8 * n) =
          pack<T>(finish(o[n][2 * r], scale), finish(o[n][2 * r + 1], scale));
    }
  }
}

}  // namespace slotwise::cuda
