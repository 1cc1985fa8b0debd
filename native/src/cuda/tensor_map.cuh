// Tensor maps, which tell Hopper's copies where tiles lie.
#pragma once

#include <cuda.h>

#include <algorithm>
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

// 16-bit elements, the innermost dimension first and contiguous; the strides of the others in
// bytes. Boxes are swizzled as hopper.cuh says, and are zeros outside of the tensor.
template <unsigned kDims>
CUtensorMap map_tensor(const char* what, const void* data, DType dtype,
                       const cuuint64_t (&sizes)[kDims], const cuuint64_t (&strides)[kDims - 1],
                       const cuuint32_t (&box)[kDims], CUtensorMapL2promotion promotion) {
  const auto type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  cuuint32_t steps[kDims];
  std::fill_n(steps, kDims, 1u);
  CUtensorMap map{};
  const CUresult result =
      encode_tiled()(&map, type, kDims, const_cast<void*>(data), sizes, strides, box, steps,
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
