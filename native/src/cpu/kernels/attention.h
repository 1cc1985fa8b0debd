// Attention over the slot cache: one arithmetic for prefill and decode.
//
// For each row and query head, tile by tile of 32 positions at absolute multiples: a score is one
// chain of fused multiply-adds along d; the largest score so far moves up; sums and accumulators
// are rescaled if it did; the tile's weights are added to 16 x 2 lanes and each acc[d] is one chain
// along positions. Splits of 256 positions start afresh and are folded in index order. Nothing past
// a row's own position is ever read into its sums.
#pragma once

#include "kernels/math.h"

namespace slotwise {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr int kTile = static_cast<int>(kTilePositions);

// What the rows of a block hold while a split is read.
struct SplitScratch {
  float* keys;     // [D, 32], one tile of K, transposed
  float* weights;  // [pairs, 32], scores, then exp(score - max)
  float* sums;     // [pairs, 32]
};

inline int64_t num_pairs(const AttentionParams& p, int64_t num_rows) {
  return num_rows * (p.num_q_heads / p.cache.num_kv_heads);
}

int64_t attention_scratch(const AttentionParams& p, int64_t num_rows) {
  return kTilePositions * (p.cache.head_dim + 2 * num_pairs(p, num_rows));
}

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) { return bits<float>(static_cast<uint32_t>(x) << 16); }

template <typename Cache>
inline void transpose_keys(const Cache* k, int64_t stride, int64_t count, int64_t dim,
                           float* keys) {
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t d = 0; d < dim; ++d) keys[d * kTile + j] = to_float(k[j * stride + d]);
  }
  for (int64_t j = count; j < kTile; ++j) {
    for (int64_t d = 0; d < dim; ++d) keys[d * kTile + j] = 0.0f;
  }
}

inline void score(const float* q, const float* keys, int64_t dim, float scale, int64_t count,
                  float* scores) {
  F low = set1(0.0f), high = set1(0.0f);
  for (int64_t d = 0; d < dim; ++d) {
    const F value = set1(q[d]);
    low = fma(value, load(keys + d * kTile), low);
    high = fma(value, load(keys + d * kTile + kLanes), high);
  }
  store(scores, low * set1(scale));
  store(scores + kLanes, high * set1(scale));
  for (int64_t j = count; j < kTile; ++j) scores[j] = kMinusInfinity;
}

// Scores to weights; moves the state's maximum and rescales its sums.
inline void soften(float* scores, float* sums, float* state, int64_t dim) {
  const F low = load(scores), high = load(scores + kLanes);
  const float old_max = state[0];
  const float tile_max = max_lanes(vmax(low, high));
  const float new_max = tile_max > old_max ? tile_max : old_max;
  if (new_max > old_max && old_max != kMinusInfinity) {
    const F factor = vexp(set1(old_max - new_max));
    store(sums, load(sums) * factor);
    store(sums + kLanes, load(sums + kLanes) * factor);
    float* acc = state + 2;
    float lanes[kLanes];
    store(lanes, factor);
    for (int64_t d = 0; d < dim; ++d) acc[d] *= lanes[0];
  }
  state[0] = new_max;
  const F shift = set1(new_max);
  const F weights_low = vexp(low - shift), weights_high = vexp(high - shift);
  store(scores, weights_low);
  store(scores + kLanes, weights_high);
  store(sums, load(sums) + weights_low);
  store(sums + kLanes, load(sums + kLanes) + weights_high);
}

template <typename Cache>
inline void accumulate(const float* weights, const Cache* v, int64_t stride, int64_t count,
                       int64_t dim, float* acc) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    const int64_t width = min64(kLanes, dim - d);
    F sum = load_part(acc + d, width);
    for (int64_t j = 0; j < count; ++j) {
      sum = fma(set1(weights[j]), load_part(v + j * stride + d, width), sum);
    }
    store_part(acc + d, sum, width);
  }
}

template <typename Cache>
void attention_split_as(const AttentionParams& p, const RowBlock& block, int64_t kv_head,
                        int64_t split, float* states, float* scratch) {
  const CacheParams& cache = p.cache;
  const int64_t dim = cache.head_dim;
  const int64_t group = p.num_q_heads / cache.num_kv_heads;
  const int64_t pairs = num_pairs(p, block.num_rows);
  const SplitScratch s{scratch, scratch + kTile * dim, scratch + kTile * (dim + pairs)};
  const auto state = [&](int64_t pair) {
    const int64_t head = pair / group * p.num_q_heads + kv_head * group + pair % group;
    return states + head * attention_state_size(dim);
  };
  for (int64_t pair = 0; pair < pairs; ++pair) {
    float* init = state(pair);
    init[0] = kMinusInfinity;
    for (int64_t i = 1; i < dim + 2; ++i) init[i] = 0.0f;
    for (int i = 0; i < kTile; ++i) s.sums[pair * kTile + i] = 0.0f;
  }
  const Cache* k = static_cast<const Cache*>(cache.k) + block.slot * cache.k_slot_stride +
                   kv_head * cache.k_head_stride;
  const Cache* v = static_cast<const Cache*>(cache.v) + block.slot * cache.v_slot_stride +
                   kv_head * cache.v_head_stride;
  const int64_t last = block.first_position + block.num_rows;
  const int64_t end = min64((split + 1) * kSplitPositions, last);
  for (int64_t tile = split * kSplitPositions; tile < end; tile += kTile) {
    const Cache* tile_v = v + tile * cache.v_position_stride;
    transpose_keys(k + tile * cache.k_position_stride, cache.k_position_stride,
                   min64(kTile, last - tile), dim, s.keys);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t row = pair / group;
      const int64_t count = min64(kTile, block.first_position + row + 1 - tile);
      if (count <= 0) continue;
      const float* q =
          p.q + (block.first_row + row) * p.q_stride + (kv_head * group + pair % group) * dim;
      float* weights = s.weights + pair * kTile;
      score(q, s.keys, dim, p.scale, count, weights);
      soften(weights, s.sums + pair * kTile, state(pair), dim);
      accumulate(weights, tile_v, cache.v_position_stride, count, dim, state(pair) + 2);
    }
  }
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const float* sums = s.sums + pair * kTile;
    state(pair)[1] = sum_lanes(load(sums) + load(sums + kLanes));
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
