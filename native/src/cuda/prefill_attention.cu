// Attention of a chunk's rows over the slot cache, for every GPU from compute capability 8.0.
#include <stdexcept>

#include "launch.cuh"

namespace slotwise::cuda {

void prefill_attention(const ChunkParams&, Stream) { throw std::runtime_error("not built yet"); }

}  // namespace slotwise::cuda
