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

// K or V of a cache: boxes of `box_rows` positions and 64 columns, at (column, position, head,
// slot).
inline CUtensorMap map_cache(const char* what, const CacheParams& cache, const void* base,
                             int64_t slot_stride, int64_t position_stride, int64_t head_stride,
                             cuuint32_t box_rows) {
  const cuuint64_t sizes[] = {
      static_cast<cuuint64_t>(cache.head_dim), static_cast<cuuint64_t>(cache.num_positions),
      static_cast<cuuint64_t>(cache.num_kv_heads), static_cast<cuuint64_t>(cache.num_slots)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(2 * position_stride),
                                static_cast<cuuint64_t>(2 * head_stride),
                                static_cast<cuuint64_t>(2 * slot_stride)};
  const cuuint32_t box[] = {64, box_rows, 1, 1};
  return map_tensor(what, base, cache.dtype, sizes, strides, box,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

struct CacheMaps {
  CUtensorMap k, v;

  CacheMaps(const char* what, const CacheParams& cache, cuuint32_t box_rows)
      : k(map_cache(what, cache, cache.k, cache.k_slot_stride, cache.k_position_stride,
                    cache.k_head_stride, box_rows)),
        v(map_cache(what, cache, cache.v, cache.v_slot_stride, cache.v_position_stride,
                    cache.v_head_stride, box_rows)) {}
};

}  // namespace slotwise::cuda
