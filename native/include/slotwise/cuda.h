// The operators on an NVIDIA GPU: what each is given, and how it is launched. No CUDA header is
// needed to read this one.
//
// Letters as in params.h; R rows of the slot table. All pointers are to device memory unless said.
// Activations, weights, keys and values are of one type, `dtype`; the residual, norms, rotation
// tables and logits are float32. An operator only puts its kernels on the stream. A position of -1
// marks an idle row: it reads nothing and its outputs are zeros.
#pragma once

#include <cstdint>

#include "slotwise/params.h"

struct CUstream_st;

namespace slotwise {

// Devices that CUDA can use now; 0 in a build without CUDA, without a driver or without a device.
int cuda_device_count();

inline bool cuda_available() { return cuda_device_count() > 0; }

namespace cuda {

using Stream = CUstream_st*;

// Makes the device the calling thread's. `portable`: what this thread then puts on a stream takes
// the kernels of every device from compute capability 8.0 on. Throws std::runtime_error.
void use_device(int device, bool portable = false);

// Attention keeps one state for each tile of positions, at absolute multiples of the tile's size,
// and folds the states in the order of the positions: alike in prefill and decode.
constexpr int kAttentionTile = 128;

// The most rows of the matrix product that streams the weights; more go by tiles or to a library.
constexpr int kStreamedRows = 64;

// out[t] = weight[token_ids[t] - first_id], zeros for an id outside [0, N).
struct EmbedParams {
  const int32_t* token_ids;  // [T]
  int64_t num_rows;
  const void* weight;  // [N, H], contiguous
  DType dtype;
  int64_t n;
  int64_t first_id;
  int64_t hidden;
  float* out;  // [T, H], contiguous
};
void embed(const EmbedParams& params, Stream stream);

// residual += delta where delta is given; out = residual / sqrt(mean(residual^2) + eps) * weight.
struct NormParams {
  float* residual;      // [T, H], contiguous
  const void* delta;    // [T, H] or null, contiguous
  const float* weight;  // [H]
  float eps;
  int64_t num_rows;
  int64_t hidden;
  DType dtype;
  void* out;  // [T, H], contiguous
};
void rms_norm(const NormParams& params, Stream stream);

// out[t, i] = silu(gate_up[t, 2 i]) * gate_up[t, 2 i + 1]: gate and up rows of the weight
// alternate.
struct SiluParams {
  const void* gate_up;  // [T, 2 I], contiguous
  int64_t num_rows;
  int64_t inner;  // I
  DType dtype;
  void* out;  // [T, I], contiguous
};
void silu_mul(const SiluParams& params, Stream stream);

// x[t, n] += bias[n], rounded once.
struct BiasParams {
  void* x;            // [T, N], contiguous
  const float* bias;  // [N]
  int64_t num_rows;
  int64_t n;
  DType dtype;
};
void add_bias(const BiasParams& params, Stream stream);

// out[t, n] = sum over k of x[t, k] * weight[n, k], added up along k in steps of 16 in order, in
// float32, and rounded once; the same bits as a library's product without split-K. 16-bit types.
struct LinearParams {
  const void* x;  // [T, K], x[t * x_stride + k]
  int64_t x_stride;
  int64_t num_rows;    // T
  const void* weight;  // [N, K], weight[n * weight_stride + k]
  int64_t weight_stride;
  int64_t n;
  int64_t k;
  DType dtype;
  void* out;  // [T, N], out[t * out_stride + n]; [T, N / 2] when gated
  int64_t out_stride;
  bool float32_out;  // out is float32 and not rounded (logits)
  // out[t, i] = silu(y[2 i]) * y[2 i + 1] of the product's rounded outputs y, as silu_mul gives it.
  bool gated;
};
// Whether `linear` takes this size on this device: compute capability 9.x (Hopper), 16-bit types,
// N a multiple of 8, K of 64. More than kStreamedRows: N of 16, 16-bit outputs.
bool linear_supported(int64_t num_rows, int64_t n, int64_t k, DType dtype);
// Whether the tiles of so many rows, more than kStreamedRows, keep nearly all of the device busy.
bool linear_fills(int64_t num_rows, int64_t n);
void linear(const LinearParams& params, Stream stream);

// What both phases of attention are given. Q is the first H_q D columns of qkv, then K, then V.
struct AttentionInput {
  void* qkv;  // [T, (H_q + 2 H_kv) D], contiguous
  int64_t num_rows;
  int64_t num_q_heads;
  const float* q_norm;  // [D] or null
  const float* k_norm;  // [D] or null
  float eps;
  const float* cos;  // [P, D / 2], contiguous
  const float* sin;
  float scale;
  CacheParams cache;  // dtype as qkv
  void* out;          // [T, H_q D], contiguous
};

// Row t is position positions[t] (-1: idle) of the cache's slot slots[t]; no two rows that are not
// idle have the same slot. Normalises and rotates q and k, appends k and v to the cache, then
// attends [0, positions[t]]. qkv is not changed. Positions, slots and earlier rows of the cache are
// read before the kernels ahead on the stream have ended: `embed` must come between what wrote them
// and this (launch.cuh).
struct DecodeAttentionParams {
  AttentionInput input;
  const int32_t* positions;  // [T]
  const int32_t* slots;      // [T]; of an idle row too it must be a slot
  float* states;             // decode_attention_workspace(...) bytes
  int32_t* counters;         // [T * H_kv], zero before and after
};
int64_t decode_attention_workspace(int64_t num_rows, int64_t num_positions, int64_t num_q_heads,
                                   int64_t head_dim);
void decode_attention(const DecodeAttentionParams& params, Stream stream);

// A chunk of one slot: row t is position start + t. Normalises and rotates q in place and appends
// k and v (rope_append), then attends [0, start + t] (prefill_attention).
//
// With `place`, slot, start and the number of rows, T at most, are read from there by the device,
// so that a launch recorded once serves many chunks; rows past them are left as they are.
struct ChunkPlace {
  int32_t slot;
  int32_t start;
  int32_t num_rows;
};
struct ChunkParams {
  AttentionInput input;
  int64_t slot;
  int64_t start;
  const ChunkPlace* place;  // on the device, or null
};
void rope_append(const ChunkParams& params, Stream stream);
void prefill_attention(const ChunkParams& params, Stream stream);

// The first bytes of every head of slot `source` become those of slot `target`; the two differ.
struct CopyPrefixParams {
  void* cache;  // [num_tensors, num_slots, num_heads, head_bytes], contiguous
  int64_t num_tensors;
  int64_t num_slots;
  int64_t num_heads;
  int64_t head_bytes;    // a multiple of 16
  int64_t prefix_bytes;  // at most head_bytes, a multiple of 16
  int64_t source;
  int64_t target;
};
void copy_prefix(const CopyPrefixParams& params, Stream stream);

// What of a slot decodes: whether its row has part in the steps to come.
enum Scheduled : int32_t {
  kNotScheduled,
  kOnce,  // in the next step alone; `sample` then makes it kNotScheduled
  kAlways,
};

// The slots that may decode, on the device: what a step reads and changes without the host. Each
// has a row of its own, R in all; the cache may have more slots. [R] each.
struct SlotTable {
  int32_t num_rows;
  int32_t vocab;
  int32_t* last_token;
  int32_t* length;        // tokens in the cache
  int32_t* active;        // 1 while it may decode
  int32_t* scheduled;     // Scheduled, by the present command
  int32_t* row_token;     // last_token of rows that decode in the next step, else -1
  int32_t* row_position;  // length of these, else -1
  int32_t* max_len;
  uint32_t* end_ids;  // [R, ceil(V / 32)], bit id % 32 of word id / 32
  float* temperature;
  int32_t* top_k;
  float* top_p;
  float* min_p;
  int64_t* seed;
  // Results: row (counter % ring_rows) of ring [ring_rows, R], in host memory: a token id, -1 for a
  // corrupted row, -2 for one that did not take part. stamps [ring_rows, 2]: the device's clock
  // in ns at the start (embed of the slot table) and at the end of the step.
  int32_t* ring;
  uint64_t* stamps;
  int32_t ring_rows;
  uint32_t* counter;  // one
};

// row_token and row_position from scheduled, active, last_token and length.
void begin_command(const SlotTable& table, Stream stream);

// embed of row_token; also stamps the start of the step.
void embed_slots(const SlotTable& table, const EmbedParams& params, Stream stream);

// Draws a token for each row of logits [B, V] and puts it into the slot table and the ring: the
// slot stops at an end id, at max_len, or where its logits are corrupted. Ends with begin_command's
// work for the next step, and counter + 1.
struct SampleParams {
  const float* logits;  // [B, V], logits[b * stride + v]
  int64_t logits_stride;
  int64_t num_rows;
  // [B] or null: the table's rows. Null: decode, all of them in order; those with row_position -1
  // take no part, and the lengths of the others grow by one. Else the last rows of prompts; lengths
  // stay as they are.
  const int32_t* rows;
  void* workspace;  // sample_workspace bytes, zero before the first use
};
int64_t sample_workspace(int64_t num_rows, int64_t vocab);
void sample(const SlotTable& table, const SampleParams& params, Stream stream);

// What is done to the logits that a row of the table is sampled from; nothing but what its flags
// say is read. Arrays [R, V] have rows one after another.
enum AdjustFlags : int32_t {
  kRepetition = 1,  // of tokens seen
  kFrequency = 2,   // of tokens generated; presence too
  kBiased = 4,
  kMinLength = 8,
  kMasked = 16,
};
struct AdjustTable {
  int32_t num_rows;
  int32_t vocab;
  int32_t* flags;            // [R]
  int32_t* min_len;          // [R]
  float* frequency_penalty;  // [R], and so on
  float* presence_penalty;
  float* repetition_penalty;
  // [R, V]: how often the token was generated, and kSeenInPrompt.
  int32_t* counts;
  float* bias;     // [R, V]; 0 changes nothing
  uint32_t* mask;  // [R, ceil(V / 32)], bit id % 32 of word id / 32: may be sampled
};
constexpr int32_t kSeenInPrompt = 1 << 30;

// out[b] = logits[b] as the table's row wants them: for a token seen in the prompt or generated
// logit > 0 ? logit / repetition : logit * repetition; for one generated logit - frequency * count
// - presence; then + bias; -inf for ends of a sequence shorter than min_len, and for masked ones.
// Every operation is rounded by itself. Put before `sample`, once for a step: counts the token that
// a row decodes from. Rows without part are not written.
struct AdjustParams {
  const float* logits;  // [B, V], logits[b * stride + v]
  int64_t logits_stride;
  int64_t num_rows;
  const int32_t* rows;  // [B] or null, as `sample` is given it
  float* out;           // [B, V], out[b * stride + v]
  int64_t out_stride;
};
void adjust_logits(const SlotTable& table, const AdjustTable& adjust, const AdjustParams& params,
                   Stream stream);

// Logprobs of the tokens that the step drew, of rows that want them. Put behind `sample`, before
// any other step, with the same rows, and with the logits before adjust_logits. Stamps the end of
// the step anew.
struct LogprobsParams {
  const float* logits;  // [B, V], logits[b * stride + v]
  int64_t logits_stride;
  int64_t num_rows;
  const int32_t* rows;    // [B] or null, as `sample` was given it
  const int32_t* counts;  // [R], best tokens wanted, up to kMaxLogprobs; -1: no logprobs at all
  // In host memory: out[step % out_rows, row], where step is the number that the step's row of the
  // table's ring has too. Without meaning where no token was drawn.
  TokenLogprobs* out;  // [out_rows, R]
  int32_t out_rows;
};
void logprobs(const SlotTable& table, const LogprobsParams& params, Stream stream);

// Logprobs of a token for each row of logits, whoever gave it.
struct TokenLogprobsParams {
  const float* logits;  // [B, V], logits[b * stride + v]
  int64_t logits_stride;
  int64_t num_rows;
  int32_t vocab;
  const int32_t* token_ids;  // [B], in [0, V)
  int32_t count;             // best tokens wanted, up to kMaxLogprobs
  TokenLogprobs* out;        // [B], in host memory
};
void token_logprobs(const TokenLogprobsParams& params, Stream stream);

}  // namespace cuda
}  // namespace slotwise
