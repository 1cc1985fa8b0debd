// Decode attention with Hopper's copies of tiles.
#pragma once

#include "slotwise/cuda.h"

namespace slotwise::cuda {

// Compute capability 9.x, 16-bit types, head dimensions 64 and 128.
bool decode_attention_tma_supported(const CacheParams& cache);
void decode_attention_tma(const DecodeAttentionParams& params, Stream stream);

}  // namespace slotwise::cuda
