#include <cuda_runtime_api.h>

#include "slotwise/cuda.h"

namespace slotwise {

int cuda_device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace slotwise
