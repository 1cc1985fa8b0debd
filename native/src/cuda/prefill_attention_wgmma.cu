// Attention of a chunk's rows over the slot cache by Hopper's matrix instructions.
#include <stdexcept>

#include "prefill_attention.cuh"

namespace slotwise::cuda {

bool prefill_attention_wgmma_supported(const ChunkParams&) { return false; }

void prefill_attention_wgmma(const ChunkParams&, const PrefillArgs&, Stream) {
  throw std::runtime_error("not built yet");
}

}  // namespace slotwise::cuda
