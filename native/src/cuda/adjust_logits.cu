// Penalties, biases, ends held back and masks, between the logits and the sampler: a few blocks for
// a row, in one pass over it.
#include "launch.cuh"
#include "slot_table.cuh"

namespace slotwise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTurns = 4;                         // of four logits, a thread's loads in flight
constexpr int kBlockIds = 4 * kThreads * kTurns;  // tokens of a block
constexpr float kMinusInfinity = -INFINITY;

// What a row asks for.
struct Adjustment {
  int32_t flags;
  float frequency, presence, repetition;
  bool too_short;   // ends are held back
  int32_t counted;  // the token that is one more generated, or -1
};

__device__ Adjustment adjustment_of(const SlotTable& table, const AdjustTable& adjust, int row,
                                    bool decodes, int position) {
  // Of the sequence before the token that is drawn.
  const int length = decodes ? position + 1 : position;
  Adjustment a{};
  a.flags = adjust.flags[row];
  a.frequency = adjust.frequency_penalty[row];
  a.presence = adjust.presence_penalty[row];
  a.repetition = adjust.repetition_penalty[row];
  a.too_short = (a.flags & kMinLength) != 0 && length < adjust.min_len[row];
  a.counted = decodes ? table.row_token[row] : -1;
  return a;
}

// A row's arrays, by token.
struct RowArrays {
  int32_t* counts;       // [V]
  const float* bias;     // [V]
  const uint32_t* ends;  // [ceil(V / 32)]
  const uint32_t* mask;  // alike
};

__device__ RowArrays arrays_of(const SlotTable& table, const AdjustTable& adjust, int64_t row) {
  const int64_t words = (table.vocab + 31) / 32;
  return {adjust.counts + row * table.vocab, adjust.bias + row * table.vocab,
          table.end_ids + row * words, adjust.mask + row * words};
}

// The operations of worker/sampler.py in their order: the same bits.
__device__ float penalized(float x, int32_t seen, const Adjustment& a) {
  if (seen == 0) return x;
  if ((a.flags & kRepetition) != 0) {
    x = x > 0.0f ? __fdiv_rn(x, a.repetition) : __fmul_rn(x, a.repetition);
  }
  const int32_t count = seen & ~kSeenInPrompt;
  if ((a.flags & kFrequency) != 0 && count != 0) {
    x = __fsub_rn(__fsub_rn(x, __fmul_rn(a.frequency, static_cast<float>(count))), a.presence);
  }
  return x;
}

// Four neighbours as one access where kAligned; tokens past the vocabulary are zeros.
template <bool kAligned, typename T>
__device__ __forceinline__ void load_four(const T* from, int id, int vocab, T (&to)[4]) {
  if constexpr (kAligned) {
    if (id < vocab) *reinterpret_cast<int4*>(to) = *reinterpret_cast<const int4*>(from + id);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (id + i < vocab) to[i] = from[id + i];
    }
  }
}

template <bool kAligned>
__device__ __forceinline__ void store_four(float* to, int id, int vocab, const float (&from)[4]) {
  if constexpr (kAligned) {
    if (id < vocab) *reinterpret_cast<float4*>(to + id) = *reinterpret_cast<const float4*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (id + i < vocab) to[id + i] = from[i];
    }
  }
}

// What is read of four tokens.
struct alignas(16) Four {
  float logit[4] = {};
  int32_t seen[4] = {};
  float bias[4] = {};
  uint32_t ends = 0;  // a bit each
  uint32_t allowed = 15;
};

// The bits of four tokens; the first one's id is a multiple of 4.
__device__ __forceinline__ uint32_t bits_of(const uint32_t* words, int id) {
  return words[id / 32] >> (id % 32) & 15;
}

template <bool kAligned>
__device__ void load(Four& four, const float* logits, const RowArrays& arrays, int id, int vocab,
                     const Adjustment& a) {
  if (id >= vocab) return;
  load_four<kAligned>(logits, id, vocab, four.logit);
  if ((a.flags & (kRepetition | kFrequency)) != 0) {
    load_four<kAligned>(arrays.counts, id, vocab, four.seen);
  }
  if ((a.flags & kBiased) != 0) load_four<kAligned>(arrays.bias, id, vocab, four.bias);
  if (a.too_short) four.ends = bits_of(arrays.ends, id);
  if ((a.flags & kMasked) != 0) four.allowed = bits_of(arrays.mask, id);
}

__device__ void adjust_four(Four& four, const RowArrays& arrays, int id, const Adjustment& a) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // This thread alone has the token's count.
    if (id + i == a.counted && (a.flags & (kRepetition | kFrequency)) != 0) {
      arrays.counts[id + i] = ++four.seen[i];
    }
    float x = penalized(four.logit[i], four.seen[i], a);
    if (four.bias[i] != 0.0f) x = __fadd_rn(x, four.bias[i]);
    if ((four.ends >> i & 1) != 0 || (four.allowed >> i & 1) == 0) x = kMinusInfinity;
    four.logit[i] = x;
  }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    adjust_kernel(SlotTable table, AdjustTable adjust, AdjustParams params) {
  start_successor();
  wait_for_predecessor();
  const int64_t part = blockIdx.y;
  const int row = table_row(params.rows, static_cast<int>(part));
  const bool decodes = params.rows == nullptr;
  const int position = decodes ? table.row_position[row] : table.length[row];
  if (position < 0) return;
  const Adjustment a = adjustment_of(table, adjust, row, decodes, position);
  const RowArrays arrays = arrays_of(table, adjust, row);
  const int first = static_cast<int>(blockIdx.x) * kBlockIds + 4 * static_cast<int>(threadIdx.x);
  Four fours[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    load<kAligned>(fours[turn], params.logits + part * params.logits_stride, arrays,
                   first + 4 * kThreads * turn, table.vocab, a);
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int id = first + 4 * kThreads * turn;
    adjust_four(fours[turn], arrays, id, a);
    store_four<kAligned>(params.out + part * params.out_stride, id, table.vocab, fours[turn].logit);
  }
}

template <typename T>
bool on_16_bytes(const T* array, int64_t stride) {
  return reinterpret_cast<uintptr_t>(array) % 16 == 0 && stride % 4 == 0;
}

}  // namespace

void adjust_logits(const SlotTable& table, const AdjustTable& adjust, const AdjustParams& params,
                   Stream stream) {
  if (params.num_rows == 0) return;
  const int64_t vocab = table.vocab;
  const bool aligned = vocab % 4 == 0 && on_16_bytes(params.logits, params.logits_stride) &&
                       on_16_bytes(params.out, params.out_stride) &&
                       on_16_bytes(adjust.counts, vocab) && on_16_bytes(adjust.bias, vocab);
  const dim3 blocks(static_cast<unsigned>((vocab + kBlockIds - 1) / kBlockIds),
                    static_cast<unsigned>(params.num_rows));
  launch("adjust_logits", aligned ? adjust_kernel<true> : adjust_kernel<false>, {blocks, kThreads},
         stream, table, adjust, params);
}

}  // namespace slotwise::cuda
