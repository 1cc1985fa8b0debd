// What the products of few and of many rows share: how matrices are cut along K and found by
// copies.
#pragma once

#include "tensor_map.cuh"

namespace slotwise::cuda {

constexpr int kSlab = 64;       // K of a slab; its rows are as wide as the swizzle, 128 bytes
constexpr int kRowBytes = 128;  // of a slab

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// [rows, K] as [K / 64, rows, 64] in boxes of [slabs, box_rows, 64]; zeros outside.
inline CUtensorMap map_matrix(const void* data, int64_t rows, int64_t k, int64_t stride,
                              DType dtype, int box_rows, int slabs,
                              CUtensorMapL2promotion promotion) {
  const cuuint64_t sizes[] = {kSlab, static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(k / kSlab)};
  // A row alone may have any stride; maps take multiples of 16 bytes.
  const cuuint64_t strides[] = {static_cast<cuuint64_t>((rows > 1 ? stride : k) * 2), kRowBytes};
  const cuuint32_t box[] = {kSlab, static_cast<cuuint32_t>(box_rows),
                            static_cast<cuuint32_t>(slabs)};
  return map_tensor("linear", data, dtype, sizes, strides, box, promotion);
}

// `linear` of any number of rows, by tiles; 16-bit outputs.
void prefill_linear(const LinearParams& params, Stream stream);

}  // namespace slotwise::cuda
