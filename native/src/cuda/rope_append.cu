#include <stdexcept>

#include "slotwise/cuda.h"

namespace slotwise::cuda {

void rope_append(const ChunkParams&, Stream) {
  throw std::runtime_error("rope_append: not built yet");
}

}  // namespace slotwise::cuda
