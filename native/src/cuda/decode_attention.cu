#include <stdexcept>

#include "attention_float32.cuh"
#include "slotwise/cuda.h"

namespace slotwise::cuda {

int64_t decode_attention_workspace(int64_t num_slots, int64_t num_positions, int64_t num_q_heads,
                                   int64_t head_dim) {
  const int64_t tiles = (num_positions + kAttentionTile - 1) / kAttentionTile;
  return num_slots * num_q_heads * tiles * (head_dim + 2) * static_cast<int64_t>(sizeof(float));
}

void decode_attention(const DecodeAttentionParams&, Stream) {
  throw std::runtime_error("decode_attention: not built yet");
}

void prefill_attention_float32(const ChunkParams&, Stream) {
  throw std::runtime_error("prefill_attention_float32: not built yet");
}

}  // namespace slotwise::cuda
