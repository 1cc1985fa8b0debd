// Stands in for src/cuda in a build without CUDA.
#include "slotwise/cuda.h"

namespace slotwise {

int cuda_device_count() { return 0; }

}  // namespace slotwise
