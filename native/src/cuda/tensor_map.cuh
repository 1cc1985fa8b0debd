// Tensor maps, which tell Hopper's copies where tiles lie.
#pragma once

#include <cuda.h>

#include <stdexcept>
#include <string>

#include "launch.cuh"

namespace slotwise::cuda {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// From the driver that is there, so that nothing links to it.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                           cudaEnableDefault, &result),
          "finding cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<EncodeTiled>(function);
  }();
  return found;
}

// Three dimensions of 16-bit elements, the innermost first and contiguous; the strides of the other
// two in bytes. Boxes are swizzled as hopper.cuh says, and are zeros outside of the tensor.
inline CUtensorMap map_tensor(const char* what, const void* data, DType dtype,
                              const cuuint64_t (&sizes)[3], const cuuint64_t (&strides)[2],
                              const cuuint32_t (&box)[3], CUtensorMapL2promotion promotion) {
  const auto type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map{};
  const CUresult result =
      encode_tiled()(&map, type, 3, const_cast<void*>(data), sizes, strides, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(what) +
                             ": no tensor map for these addresses and strides: error " +
                             std::to_string(result));
  }
  return map;
}

}  // namespace slotwise::cuda
