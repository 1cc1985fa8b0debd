// Arrays on the GPU as arguments: checked like those on the CPU, then handed on as plain pointers.
#pragma once

#include "checks.h"

namespace slotwise::bindings {

// As Tensor, on the GPU; void for float32, bfloat16 or float16. Whether values lie in range is for
// the caller: reading them would wait for the device.
template <typename T, int Rank>
class DeviceTensor {
 public:
  DeviceTensor(const char* op, const char* name, const Array& array) : view_(array.view) {
    using Scalar = std::conditional_t<std::is_void_v<T>, float, std::remove_const_t<T>>;
    check_kind(op, name, array,
               {nb::dtype<Scalar>(), std::is_void_v<std::remove_const_t<T>>, !std::is_const_v<T>,
                Rank, true});
    check_layout(op, name, array, !std::is_const_v<T>);
  }

  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(view_.data) + view_.byte_offset);
  }
  size_t ndim() const { return Rank; }
  int64_t shape(size_t axis) const { return view_.shape[axis]; }
  int64_t stride(size_t axis) const { return view_.strides[axis]; }
  DType dtype() const {
    if (view_.dtype.bits == 32) return DType::kFloat32;
    return view_.dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat)
               ? DType::kBFloat16
               : DType::kFloat16;
  }

 private:
  nb::dlpack::dltensor view_;
};

// The kernels read vectors of 16 bytes: every row must begin at a multiple of them.
template <typename View>
void check_vectors(const char* op, const char* name, const View& array) {
  const int64_t width = array.dtype() == DType::kFloat32 ? 4 : 8;
  bool aligned = reinterpret_cast<uintptr_t>(array.data()) % 16 == 0;
  for (size_t axis = 0; axis + 1 < array.ndim(); ++axis) {
    aligned = aligned && (array.shape(axis) <= 1 || array.stride(axis) % width == 0);
  }
  if (!aligned) fail(op, std::string(name) + " with rows at multiples of 16 bytes", "others");
}

template <typename A, typename B>
DType common_dtype(const char* op, const char* name_a, const A& a, const char* name_b, const B& b) {
  if (a.dtype() != b.dtype()) {
    fail(op, std::string(name_a) + " and " + name_b + " of one type", "two types");
  }
  return a.dtype();
}

}  // namespace slotwise::bindings
