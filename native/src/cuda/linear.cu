#include "launch.cuh"

namespace slotwise::cuda {

bool linear_supported(int64_t num_rows, int64_t n, int64_t k, DType dtype) {
  return dtype != DType::kFloat32 && num_rows <= kMaxLinearRows && n % 8 == 0 && k % 64 == 0 &&
         device_info().major >= 9;
}

void linear(const LinearParams&, Stream) { throw std::runtime_error("linear: not built yet"); }

}  // namespace slotwise::cuda
