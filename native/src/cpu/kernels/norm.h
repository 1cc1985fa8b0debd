// RMSNorm, rotary embedding with the write to the slot cache, and SiLU.
#pragma once

#include "kernels/math.h"

namespace slotwise {
namespace {

// Sum of squares: 16 running sums, added in a fixed order.
inline float inverse_rms(const float* x, int64_t size, float eps) {
  F sum = set1(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const F v = load(x + i);
    sum = fma(v, v, sum);
  }
  if (i < size) {
    const F v = load_part(x + i, size - i);
    sum = fma(v, v, sum);
  }
  return 1.0f / __builtin_sqrtf(sum_lanes(sum) / static_cast<float>(size) + eps);
}

inline void normalise(const float* x, const float* weight, int64_t size, float eps, float* out) {
  const F scale = set1(inverse_rms(x, size, eps));
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  if (i < size) {
    const int64_t rest = size - i;
    store_part(out + i, load_part(x + i, rest) * scale * load_part(weight + i, rest), rest);
  }
}

void rms_norm(const NormParams& p, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = p.x + row * p.x_stride;
    if (p.delta != nullptr) {
      float* residual = p.residual + row * p.x_stride;
      const float* delta = p.delta + row * p.delta_stride;
      for (int64_t i = 0; i < p.hidden; ++i) residual[i] += delta[i];
    }
    normalise(x, p.weight, p.hidden, p.eps, p.out + row * p.out_stride);
  }
}

// out = x rotated by the angles of its position, halves as in Hugging Face's Llama; x may be out.
template <typename Out>
inline void rotate(const float* x, const float* cos, const float* sin, int64_t head_dim, Out* out) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = min64(kLanes, half - i);
    const F c = load_part(cos + i, count), s = load_part(sin + i, count);
    const F a = load_part(x + i, count), b = load_part(x + half + i, count);
    store_part(out + i, a * c - b * s, count);
    store_part(out + half + i, b * c + a * s, count);
  }
}

template <typename Cache>
void rope_append_rows(const RopeParams& p, int64_t row_begin, int64_t row_end) {
  const CacheParams& cache = p.cache;
  const int64_t dim = cache.head_dim;
  float normed[kMaxHeadDim];
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t slot = p.slots[row], position = p.positions[row];
    const float* cos = p.cos + position * p.cos_stride;
    const float* sin = p.sin + position * p.sin_stride;
    float* head = p.qkv + row * p.qkv_stride;
    for (int64_t h = 0; h < p.num_q_heads; ++h, head += dim) {
      if (p.q_norm != nullptr) normalise(head, p.q_norm, dim, p.eps, head);
      rotate(head, cos, sin, dim, head);
    }
    Cache* k = static_cast<Cache*>(cache.k) + slot * cache.k_slot_stride +
               position * cache.k_position_stride;
    for (int64_t h = 0; h < cache.num_kv_heads; ++h, head += dim, k += cache.k_head_stride) {
      const float* source = head;
      if (p.k_norm != nullptr) {
        normalise(head, p.k_norm, dim, p.eps, normed);
        source = normed;
      }
      rotate(source, cos, sin, dim, k);
    }
    Cache* v = static_cast<Cache*>(cache.v) + slot * cache.v_slot_stride +
               position * cache.v_position_stride;
    for (int64_t h = 0; h < cache.num_kv_heads; ++h, head += dim, v += cache.v_head_stride) {
      for (int64_t i = 0; i < dim; i += kLanes) {
        const int64_t count = min64(kLanes, dim - i);
        store_part(v + i, load_part(head + i, count), count);
      }
    }
  }
}

void rope_append(const RopeParams& p, int64_t row_begin, int64_t row_end) {
  if (p.cache.dtype == DType::kFloat32) {
    rope_append_rows<float>(p, row_begin, row_end);
  } else {
    rope_append_rows<uint16_t>(p, row_begin, row_end);
  }
}

inline F silu_times(F gate, F up) {
  const F one = set1(1.0f);
  return gate / (one + vexp(set1(0.0f) - gate)) * up;
}

void silu_mul(const SiluParams& p, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* gate = p.gate_up + row * p.gate_up_stride;
    const float* up = gate + p.inner;
    float* out = p.out + row * p.out_stride;
    int64_t i = 0;
    for (; i + kLanes <= p.inner; i += kLanes) {
      store(out + i, silu_times(load(gate + i), load(up + i)));
    }
    if (i < p.inner) {
      const int64_t rest = p.inner - i;
      store_part(out + i, silu_times(load_part(gate + i, rest), load_part(up + i, rest)), rest);
    }
  }
}

}  // namespace
}  // namespace slotwise
