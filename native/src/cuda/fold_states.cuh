// The fold of a row's tiles in decode, over the states that blocks left in memory.
#pragma once

#include "attention_math.cuh"
#include "rope.cuh"

namespace slotwise::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// The states of one row and head.
struct States {
  const float* outs;       // [D] of each tile
  const float2* max_sums;  // of each tile
  int64_t heads;           // from a tile's state to the next one's
  int tiles;
};

// Of this lane's tile, one of 32, given the maximum of the tiles before these; and that of the next
// ones. The first tile is taken as it is: -0 * 1 + x * 1 is x; and what is past the last one
// changes nothing: x * 1 + 0 * -0 is x.
__device__ __forceinline__ FoldFactors factors_of_tile(float tile_max, int tile, int tiles, float c,
                                                       int lane, float& max) {
  float so_far = tile_max;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float before = __shfl_up_sync(kAllLanes, so_far, step);
    if (lane >= step) so_far = fmaxf(so_far, before);
  }
  so_far = fmaxf(so_far, max);
  const float before = __shfl_up_sync(kAllLanes, so_far, 1);
  FoldFactors factors = fold_factors(lane == 0 ? max : before, tile_max, c);
  if (tile == 0) factors.a = factors.b = 1.0f;
  if (tile >= tiles) factors = {so_far, 1.0f, -0.0f};
  max = __shfl_sync(kAllLanes, so_far, 31);
  return factors;
}

// Folds the states in the order of the tiles, one warp for a head.
template <int D, typename T>
__device__ __forceinline__ void fold_states(const States& states, float c, T* out, int lane) {
  constexpr int kPairs = (D + 63) / 64;  // of columns, of a lane
  constexpr int kBatch = 32 / kPairs;    // loads under way
  const auto column = [&](int j) { return 2 * (lane + 32 * j); };
  float max = -INFINITY, sum = -0.0f;
  float2 total[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) total[j] = make_float2(-0.0f, -0.0f);
  const float* next = states.outs + column(0);  // what this lane loads of the next tile
  const int64_t step = states.heads * D;
  float2 max_sum;  // of tile lane of each 32
  FoldFactors factors;
  for (int first = 0; first < states.tiles; first += kBatch) {
    const int tile = first + lane;
    if (first % 32 == 0) {
      max_sum = make_float2(-INFINITY, 0.0f);
      if (tile < states.tiles) max_sum = __ldcg(states.max_sums + tile * states.heads);
    }
    float2 parts[kBatch][kPairs];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        parts[i][j] = make_float2(0.0f, 0.0f);
        if (first + i < states.tiles && column(j) < D) {
          parts[i][j] = __ldcg(reinterpret_cast<const float2*>(next + 64 * j));
        }
      }
      next += step;
      asm("" : "+l"(next));  // one addition a tile; the compiler would multiply anew for each
    }
    if (first % 32 == 0) factors = factors_of_tile(max_sum.x, tile, states.tiles, c, lane, max);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int from = (first + i) % 32;
      const FoldFactors f = {0.0f, __shfl_sync(kAllLanes, factors.a, from),
                             __shfl_sync(kAllLanes, factors.b, from)};
      sum = fold(sum, __shfl_sync(kAllLanes, max_sum.y, from), f);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        total[j].x = fold(total[j].x, parts[i][j].x, f);
        total[j].y = fold(total[j].y, parts[i][j].y, f);
      }
    }
  }
  const float scale = inverse(sum);
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const float2 pair = make_float2(finish(total[j].x, scale), finish(total[j].y, scale));
    if (column(j) < D) store_two(out + column(j), pair);
  }
}

}  // namespace slotwise::cuda
