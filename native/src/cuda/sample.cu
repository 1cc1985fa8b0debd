#include <stdexcept>

#include "slotwise/cuda.h"

namespace slotwise::cuda {

int64_t sample_workspace(int64_t, int64_t) { throw std::runtime_error("sample: not built yet"); }
void sample(const SlotTable&, const SampleParams&, Stream) {
  throw std::runtime_error("sample: not built yet");
}

}  // namespace slotwise::cuda
