// What each operator is given: raw pointers, sizes, and strides counted in elements.
//
// Letters: S slots, P positions of a slot, T rows, H hidden size, H_q / H_kv query and KV heads,
// D head dimension, N / K outputs and inputs of a matrix product, V vocabulary.
#pragma once

#include <cstdint>

namespace slotwise {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// Outputs of a matrix product that lie side by side in a packed weight.
constexpr int64_t kPanelWidth = 32;

// Attention reads positions in tiles and keeps one partial result per split; both lie at absolute
// multiples of their size, so a row's arithmetic depends on its position alone.
constexpr int64_t kTilePositions = 32;
constexpr int64_t kSplitPositions = 256;

constexpr int64_t kMaxHeadDim = 256;

// out[t, n] = sum over k ascending of x[t, k] * w[n, k], then + bias[n].
struct LinearParams {
  const float* x;  // [T, K], x[t * x_stride + k]
  int64_t x_stride;
  int64_t num_rows;    // T
  const void* panels;  // [ceil(N / 32), K, 32], see PackedWeight
  DType dtype;
  const float* bias;  // [ceil(N / 32) * 32]
  int64_t n;
  int64_t k;
  float* out;  // [T, N], out[t * out_stride + n]
  int64_t out_stride;
};

// residual += delta where delta is given; out = residual / sqrt(mean(residual^2) + eps) * weight.
struct NormParams {
  const float* x;  // [T, H]; equals residual where delta is given
  int64_t x_stride;
  float* residual;     // [T, H] or null
  const float* delta;  // [T, H] or null
  int64_t delta_stride;
  const float* weight;  // [H]
  float eps;
  int64_t hidden;
  float* out;  // [T, H]
  int64_t out_stride;
};

// The slot cache: element (s, p, h, d) of K is k[s * slot_stride + p * position_stride +
// h * head_stride + d], and alike for V.
struct CacheParams {
  void* k;  // [S, P, H_kv, D]
  void* v;
  DType dtype;
  int64_t num_slots;
  int64_t num_positions;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t k_slot_stride, k_position_stride, k_head_stride;
  int64_t v_slot_stride, v_position_stride, v_head_stride;
};

struct RopeParams {
  float* qkv;  // [T, (H_q + 2 H_kv) D]
  int64_t qkv_stride;
  int64_t num_q_heads;
  const float* q_norm;  // [D] or null
  const float* k_norm;  // [D] or null
  float eps;
  const float* cos;  // [P, D / 2], cos[p * cos_stride + i]
  int64_t cos_stride;
  const float* sin;
  int64_t sin_stride;
  const int32_t* slots;      // [T]
  const int32_t* positions;  // [T]
  CacheParams cache;
};

// Rows [first_row, first_row + num_rows) of one slot, at consecutive positions from first_position.
struct RowBlock {
  int64_t first_row;
  int64_t num_rows;
  int64_t slot;
  int64_t first_position;
};

struct AttentionParams {
  const float* q;  // [T, H_q, D], q[t * q_stride + h * D + d]
  int64_t q_stride;
  int64_t num_q_heads;
  float scale;
  CacheParams cache;
  float* out;  // [T, H_q, D], out[t * out_stride + h * D + d]
  int64_t out_stride;
};

// The state of one (row, query head) over a range of positions: the largest score, the sum of
// exp(score - max), and D sums of exp(score - max) * v, stored as max, sum, acc[D], padded to 16.
inline int64_t attention_state_size(int64_t head_dim) { return (head_dim + 2 + 15) / 16 * 16; }

struct SiluParams {
  const float* gate_up;  // [T, 2 I]
  int64_t gate_up_stride;
  int64_t inner;  // I
  float* out;     // [T, I]
  int64_t out_stride;
};

struct SampleParams {
  const float* logits;  // [B, V]
  int64_t logits_stride;
  int64_t vocab;
  const float* temperature;  // [B]
  const int32_t* top_k;      // [B]
  const float* top_p;        // [B]
  const float* min_p;        // [B]
  const int64_t* seeds;      // [B]
  const int32_t* positions;  // [B]
  int32_t* out;              // [B]
};

// The most alternatives to a drawn token that can be asked for.
constexpr int kMaxLogprobs = 20;

// Logprobs of one row: log-softmax of its logits as they are, before temperature and filters. Only
// as many of the best tokens are written as were asked for and as there are.
struct TokenLogprobs {
  float logprob;                   // of the drawn token
  int32_t rank;                    // its place among all tokens in the order of `best_ids`, from 1
  int32_t best_ids[kMaxLogprobs];  // logit descending, then id ascending
  float best_logprobs[kMaxLogprobs];
};

struct LogprobsParams {
  const float* logits;  // [B, V]
  int64_t logits_stride;
  int64_t vocab;
  const int32_t* token_ids;  // [B], the drawn tokens
  const int32_t* counts;     // [B], best tokens wanted, up to kMaxLogprobs
  TokenLogprobs* out;        // [B]
};

}  // namespace slotwise
