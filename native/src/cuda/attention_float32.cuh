// Attention over float32 caches by CUDA cores: exact float32, for tests and small models.
#pragma once

#include "slotwise/cuda.h"

namespace slotwise::cuda {

// decode_attention and prefill_attention for DType::kFloat32.
void decode_attention_float32(const DecodeAttentionParams& params, Stream stream);
void prefill_attention_float32(const ChunkParams& params, Stream stream);

}  // namespace slotwise::cuda
