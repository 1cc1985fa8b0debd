// Attention over the slot cache: one arithmetic for prefill and decode.
//
// For each row and query head, tile by tile of 32 positions at absolute multiples: a score is one
// chain of fused multiply-adds along d; the largest score so far moves up; sums and accumulators
// are rescaled if it did; the tile's weights are added to 16 x 2 lanes and each acc[d] is one chain
// along positions. Splits of 256 positions start afresh and are folded in index order. Nothing past
// a row's own position is ever read into its sums.
#pragma once

#include "kernels/block.h"
#include "kernels/math.h"
#include "kernels/transpose.h"

namespace slotwise {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

// What a block of rows holds while a split is read; a pair is one row and one query head.
struct SplitScratch {
  float* queries;  // [pairs, D]
  float* acc;      // [pairs, D]
  float* keys;     // [D, 32], one tile of K, transposed
  float* weights;  // [pairs, 32], scores, then exp(score - max)
  float* sums;     // [pairs, 32], sums of weights, lane by lane
  float* max;      // [pairs]
};

inline int64_t num_pairs(const AttentionParams& p, int64_t num_rows) {
  return num_rows * (p.num_q_heads / p.cache.num_kv_heads);
}

int64_t attention_scratch(const AttentionParams& p, int64_t num_rows) {
  const int64_t dim = p.cache.head_dim, pairs = num_pairs(p, num_rows);
  return pairs * (2 * dim + 2 * kTile + 1) + kTile * dim;
}

inline SplitScratch carve(float* scratch, int64_t pairs, int64_t dim) {
  SplitScratch s{};
  s.queries = scratch;
  s.acc = s.queries + pairs * dim;
  s.keys = s.acc + pairs * dim;
  s.weights = s.keys + kTile * dim;
  s.sums = s.weights + pairs * kTile;
  s.max = s.sums + pairs * kTile;
  return s;
}

// weights[m, j] = scale * sum over d of queries[m, d] * keys[d, j]
template <int Rows>
inline void score(const float* queries, const float* keys, int64_t dim, float scale,
                  float* weights) {
  constexpr int kGroups = kGroupsFor<Rows>;
  const NativeF factor = native_set1(scale);
  for (int group = 0; group < kParts; group += kGroups) {
    Sums<Rows, kGroups> sums{};
    multiply<Plain>(queries, dim, dim, keys, kTile, group, sums);
    for (int m = 0; m < Rows; ++m) {
      for (int g = 0; g < kGroups; ++g) {
        float* out = weights + m * kTile + (group + g) * kNative;
        native_store(out, sums.low[m][g] * factor);
        native_store(out + 16, sums.high[m][g] * factor);
      }
    }
  }
}

// Turns the scores of `count` positions into weights; moves the pair's maximum and rescales its
// sums.
inline void soften(float* weights, int64_t count, int64_t dim, float* sums, float* acc,
                   float* max) {
  for (int64_t j = count; j < kTile; ++j) weights[j] = kMinusInfinity;
  const F low = load(weights), high = load(weights + kLanes);
  const float tile_max = max_lanes(vmax(low, high));
  if (tile_max > *max) {
    if (*max != kMinusInfinity) {
      float factor[kLanes];
      store(factor, vexp(set1(*max - tile_max)));
      for (int64_t i = 0; i < kTile; ++i) sums[i] *= factor[0];
      for (int64_t d = 0; d < dim; ++d) acc[d] *= factor[0];
    }
    *max = tile_max;
  }
  const F shift = set1(*max);
  const F weights_low = vexp(low - shift), weights_high = vexp(high - shift);
  store(weights, weights_low);
  store(weights + kLanes, weights_high);
  store(sums, load(sums) + weights_low);
  store(sums + kLanes, load(sums + kLanes) + weights_high);
}

// acc[m, d] += sum over j < count of weights[m, j] * v[j, d]
template <int Rows, typename Cache>
inline void accumulate(const float* weights, const Cache* v, int64_t stride, int64_t count,
                       int64_t dim, float* acc) {
  constexpr int kGroups = kGroupsFor<Rows>;
  int64_t d = 0;
  for (; d + kTile <= dim; d += kTile) {
    for (int group = 0; group < kParts; group += kGroups) {
      Sums<Rows, kGroups> sums;
      for (int m = 0; m < Rows; ++m) {
        for (int g = 0; g < kGroups; ++g) {
          const Pair pair = Plain::load(acc + m * dim + d, group + g);
          sums.low[m][g] = pair.low;
          sums.high[m][g] = pair.high;
        }
      }
      multiply<Plain>(weights, kTile, count, v + d, stride, group, sums);
      for (int m = 0; m < Rows; ++m) {
        for (int g = 0; g < kGroups; ++g) {
          float* out = acc + m * dim + d + (group + g) * kNative;
          native_store(out, sums.low[m][g]);
          native_store(out + 16, sums.high[m][g]);
        }
      }
    }
  }
  for (; d < dim; d += kLanes) {  // columns past the last 32
    const int64_t width = min64(kLanes, dim - d);
    for (int m = 0; m < Rows; ++m) {
      F sum = load_part(acc + m * dim + d, width);
      for (int64_t j = 0; j < count; ++j) {
        sum = fma(set1(weights[m * kTile + j]), load_part(v + j * stride + d, width), sum);
      }
      store_part(acc + m * dim + d, sum, width);
    }
  }
}

// Brings positions [begin, min(begin + 32, end)) of one head into the second-level cache. Heads of
// one position are adjacent, so a head's rows are pieces with gaps, which the processor does not
// foresee; fetched into the first level they would hold up the loads of the tile at hand (measured
// on Zen 4). Inlined by force: GCC drops calls of a function that does nothing but fetch ahead.
template <typename Cache>
__attribute__((always_inline)) inline void prefetch_tile(const Cache* rows, int64_t stride,
                                                         int64_t dim, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Cache));
  for (int64_t j = begin; j < min64(begin + kTile, end); ++j) {
    for (int64_t d = 0; d < dim; d += kLine) __builtin_prefetch(rows + j * stride + d, 0, 2);
  }
}

// One tile, for all pairs that see a position of it.
template <typename Cache>
inline void attend_tile(const AttentionParams& p, const RowBlock& block, const SplitScratch& s,
                        const Cache* k, const Cache* v, int64_t tile) {
  const CacheParams& cache = p.cache;
  const int64_t dim = cache.head_dim, group = p.num_q_heads / cache.num_kv_heads;
  const int64_t last = block.first_position + block.num_rows;
  const auto seen = [&](int64_t pair) {
    return min64(kTile, block.first_position + pair / group + 1 - tile);
  };
  const int64_t hidden_rows = tile > block.first_position ? tile - block.first_position : 0;
  const int64_t first_pair = hidden_rows * group;
  const int64_t pairs = num_pairs(p, block.num_rows) - first_pair;
  const Cache* tile_k = k + tile * cache.k_position_stride;
  const Cache* tile_v = v + tile * cache.v_position_stride;
  const int64_t num_positions = min64(kTile, last - tile);
  transpose_keys(tile_k, cache.k_position_stride, num_positions, dim, s.keys);
  for_row_blocks(pairs, [&](int64_t offset, auto rows) {
    const int64_t pair = first_pair + offset;
    score<decltype(rows)::value>(s.queries + pair * dim, s.keys, dim, p.scale,
                                 s.weights + pair * kTile);
  });
  for (int64_t pair = first_pair; pair < first_pair + pairs; ++pair) {
    soften(s.weights + pair * kTile, seen(pair), dim, s.sums + pair * kTile, s.acc + pair * dim,
           s.max + pair);
  }
  for_row_blocks(pairs, [&](int64_t offset, auto rows) {
    constexpr int kRows = decltype(rows)::value;
    const int64_t pair = first_pair + offset;
    // Together up to what the first pair sees, then each for itself: a row must not touch what lies
    // past it, not even with weight 0.
    const int64_t common = seen(pair);
    accumulate<kRows>(s.weights + pair * kTile, tile_v, cache.v_position_stride, common, dim,
                      s.acc + pair * dim);
    for (int64_t other = pair + 1; other < pair + kRows; ++other) {
      if (seen(other) == common) continue;
      accumulate<1>(s.weights + other * kTile + common, tile_v + common * cache.v_position_stride,
                    cache.v_position_stride, seen(other) - common, dim, s.acc + other * dim);
    }
  });
}

template <typename Cache>
void attention_split_as(const AttentionParams& p, const RowBlock& block, int64_t kv_head,
                        int64_t split, float* states, float* scratch) {
  const CacheParams& cache = p.cache;
  const int64_t dim = cache.head_dim, group = p.num_q_heads / cache.num_kv_heads;
  const int64_t pairs = num_pairs(p, block.num_rows);
  const SplitScratch s = carve(scratch, pairs, dim);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const float* q = p.q + (block.first_row + pair / group) * p.q_stride +
                     (kv_head * group + pair % group) * dim;
    std::memcpy(s.queries + pair * dim, q, static_cast<size_t>(dim) * sizeof(float));
    s.max[pair] = kMinusInfinity;
  }
  std::memset(s.acc, 0, static_cast<size_t>(pairs * dim) * sizeof(float));
  std::memset(s.sums, 0, static_cast<size_t>(pairs * kTile) * sizeof(float));
  const Cache* k = static_cast<const Cache*>(cache.k) + block.slot * cache.k_slot_stride +
                   kv_head * cache.k_head_stride;
  const Cache* v = static_cast<const Cache*>(cache.v) + block.slot * cache.v_slot_stride +
                   kv_head * cache.v_head_stride;
  // The next tile is fetched ahead even where it belongs to the next split.
  const int64_t last = block.first_position + block.num_rows;
  const int64_t begin = split * kSplitPositions, end = min64(begin + kSplitPositions, last);
  prefetch_tile(k, cache.k_position_stride, dim, begin, end);
  for (int64_t tile = begin; tile < end; tile += kTile) {
    prefetch_tile(v, cache.v_position_stride, dim, tile + kTile, last);
    prefetch_tile(k, cache.k_position_stride, dim, tile + kTile, last);
    attend_tile(p, block, s, k, v, tile);
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t head = pair / group * p.num_q_heads + kv_head * group + pair % group;
    float* state = states + head * attention_state_size(dim);
    const float* sums = s.sums + pair * kTile;
    state[0] = s.max[pair];
    state[1] = sum_lanes(load(sums) + load(sums + kLanes));
    std::memcpy(state + 2, s.acc + pair * dim, static_cast<size_t>(dim) * sizeof(float));
  }
}

void attention_split(const AttentionParams& p, const RowBlock& block, int64_t kv_head,
                     int64_t split, float* states, float* scratch) {
  if (p.cache.dtype == DType::kFloat32) {
    attention_split_as<float>(p, block, kv_head, split, states, scratch);
  } else {
    attention_split_as<uint16_t>(p, block, kv_head, split, states, scratch);
  }
}

// A state over no positions has the sum 0 and leaves the other as it is.
void attention_fold(float* total, const float* part, int64_t head_dim) {
  const int64_t size = attention_state_size(head_dim);
  if (part[1] == 0.0f) return;
  if (total[1] == 0.0f) {
    std::memcpy(total, part, static_cast<size_t>(size) * sizeof(float));
    return;
  }
  const float new_max = part[0] > total[0] ? part[0] : total[0];
  float old_factor[kLanes], part_factor[kLanes];
  store(old_factor, vexp(set1(total[0] - new_max)));
  store(part_factor, vexp(set1(part[0] - new_max)));
  total[0] = new_max;
  for (int64_t i = 1; i < head_dim + 2; ++i) {
    total[i] = total[i] * old_factor[0] + part[i] * part_factor[0];
  }
}

void attention_finish(const float* total, float* out, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; ++d) out[d] = total[2 + d] / total[1];
}

}  // namespace
}  // namespace slotwise
