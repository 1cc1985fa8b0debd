// From a DType and a head dimension to template arguments, and what kernels ask of a cache.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "slotwise/params.h"

namespace slotwise::cuda {

template <typename T>
struct Type {
  using type = T;
};

// Calls with a Type of float, __nv_bfloat16 or __half.
template <typename Call>
void for_dtype(DType dtype, const Call& call) {
  if (dtype == DType::kFloat32) {
    call(Type<float>{});
  } else if (dtype == DType::kBFloat16) {
    call(Type<__nv_bfloat16>{});
  } else {
    call(Type<__half>{});
  }
}

// Calls with an integral_constant of the dimension.
template <typename Call>
void for_head_dim(const char* what, int64_t head_dim, const Call& call) {
  switch (head_dim) {
    case 64:
      return call(std::integral_constant<int, 64>{});
    case 96:
      return call(std::integral_constant<int, 96>{});
    case 128:
      return call(std::integral_constant<int, 128>{});
    case 256:
      return call(std::integral_constant<int, 256>{});
    default:
      throw std::invalid_argument(std::string(what) + ": a head dimension of " +
                                  std::to_string(head_dim));
  }
}

// Kernels move 8 elements at a time.
inline void check_cache(const char* what, const CacheParams& cache) {
  const int64_t strides = cache.k_slot_stride | cache.k_position_stride | cache.k_head_stride |
                          cache.v_slot_stride | cache.v_position_stride | cache.v_head_stride;
  const auto addresses =
      reinterpret_cast<uintptr_t>(cache.k) | reinterpret_cast<uintptr_t>(cache.v);
  if (strides % 8 != 0 || addresses % 16 != 0) {
    throw std::invalid_argument(std::string(what) +
                                ": a cache whose rows are not at multiples of 16 bytes");
  }
}

}  // namespace slotwise::cuda
