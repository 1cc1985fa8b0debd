// Arrays as arguments. An operator takes an Array, any array on any device, and turns it into a
// Tensor of fixed element type and rank: the only way to its elements, and one that checks.
//
// Types that offer the C exchange table of DLPack (torch.Tensor does) are read through it, which
// takes some 50 ns; nb::ndarray goes through the Python method __dlpack__, some 2 us for a torch
// tensor, and a decode step passes about a thousand. Every other array (NumPy) goes through
// nb::ndarray.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace slotwise::bindings {

namespace nb = nanobind;

// What was passed; lives as long as the call.
struct Array {
  nb::dlpack::dltensor view;
  bool writable = true;
  nb::ndarray<nb::ro> owner;  // null where the view is borrowed
};

// Fills array from a Python object; false where it is not an array.
bool read_array(nb::handle object, uint32_t flags, nb::detail::cleanup_list* cleanup, Array& array);

// T const where the operator only reads; void for float32 or bfloat16. The last dimension is
// contiguous, and the elements of an array that is written lie apart.
template <typename T, int Rank>
class Tensor {
 public:
  // TypeError for the wrong kind of array, ValueError for a layout that cannot be used.
  Tensor(const char* op, const char* name, const Array& array);

  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(view_.data) + view_.byte_offset);
  }
  size_t ndim() const { return Rank; }
  int64_t shape(size_t axis) const { return view_.shape[axis]; }
  int64_t stride(size_t axis) const { return view_.strides[axis]; }
  int64_t itemsize() const { return view_.dtype.bits / 8; }
  bool is_bfloat16() const { return view_.dtype.bits == 16; }
  int64_t size() const {
    int64_t size = 1;
    for (size_t axis = 0; axis < ndim(); ++axis) size *= shape(axis);
    return size;
  }

 private:
  nb::dlpack::dltensor view_;
};

// What the constructor asks of an array.
struct Wanted {
  nb::dlpack::dtype dtype;
  bool any_float;  // float32 or bfloat16 (on a GPU float16 too) instead of dtype
  bool writable;
  int rank;
  bool on_gpu = false;
};
void check_kind(const char* op, const char* name, const Array& array, const Wanted& wanted);
void check_layout(const char* op, const char* name, const Array& array, bool written);

template <typename T, int Rank>
Tensor<T, Rank>::Tensor(const char* op, const char* name, const Array& array) : view_(array.view) {
  using Scalar = std::conditional_t<std::is_void_v<T>, float, std::remove_const_t<T>>;
  const bool writable = !std::is_const_v<T>;
  check_kind(op, name, array, {nb::dtype<Scalar>(), std::is_void_v<T>, writable, Rank});
  check_layout(op, name, array, writable);
}

}  // namespace slotwise::bindings

namespace nanobind::detail {

template <>
struct type_caster<slotwise::bindings::Array> {
  NB_TYPE_CASTER(slotwise::bindings::Array, const_name("array"))

  bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
    return slotwise::bindings::read_array(source, flags, cleanup, value);
  }
};

}  // namespace nanobind::detail
