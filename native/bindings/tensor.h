// Arrays as arguments: a borrowed view with rank, element type and device fixed by its C++ type.
//
// Types that offer the C exchange table of DLPack (torch.Tensor does) are read through it, which
// takes some 50 ns; nb::ndarray goes through the Python method __dlpack__, some 2 us for a torch
// tensor, and a decode step passes about a thousand. Every other array (NumPy) goes through
// nb::ndarray.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <type_traits>

namespace slotwise::bindings {

namespace nb = nanobind;

// Not yet in nanobind: the layout is fixed by dlpack.h, major version 1.
struct DlpackExchangeTable {
  uint32_t major_version;
  uint32_t minor_version;
  void* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*dltensor_from_py_object)(void* object, nb::dlpack::dltensor* out);
  void* current_work_stream;
};

// The table of an object's type, or null.
const DlpackExchangeTable* exchange_table(nb::handle object);

// Reads the view of an object through its table; false (and no Python error) where that fails.
bool read_view(const DlpackExchangeTable& table, nb::handle object, nb::dlpack::dltensor& view);

// T const where the operator only reads; void for any element type. Lives as long as the call.
template <typename T, int Rank>
class Tensor {
 public:
  using Element = T;
  static constexpr int kRank = Rank;

  Tensor() = default;
  explicit Tensor(const nb::dlpack::dltensor& view) : view_(view) {}
  Tensor(const nb::dlpack::dltensor& view, nb::ndarray<nb::ro> owner)
      : view_(view), owner_(std::move(owner)) {}

  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(view_.data) + view_.byte_offset);
  }
  size_t ndim() const { return Rank; }
  int64_t shape(size_t axis) const { return view_.shape[axis]; }
  int64_t stride(size_t axis) const { return view_.strides[axis]; }
  nb::dlpack::dtype dtype() const { return view_.dtype; }
  int64_t itemsize() const { return view_.dtype.bits / 8; }
  int64_t size() const {
    int64_t size = 1;
    for (size_t axis = 0; axis < ndim(); ++axis) size *= shape(axis);
    return size;
  }

 private:
  nb::dlpack::dltensor view_;
  nb::ndarray<nb::ro> owner_;
};

}  // namespace slotwise::bindings

namespace nanobind::detail {

template <typename T>
constexpr auto element_text() {
  if constexpr (std::is_void_v<T>) {
    return const_name("");
  } else {
    return const_name(", ") + dtype_name<std::remove_const_t<T>>::name;
  }
}

template <typename T, int Rank>
struct type_caster<slotwise::bindings::Tensor<T, Rank>> {
  using Target = slotwise::bindings::Tensor<T, Rank>;
  using Scalar = std::remove_const_t<T>;

  NB_TYPE_CASTER(Target, const_name("array[rank=") + const_name<Rank>() + element_text<T>() +
                             const_name(", device=cpu]"))

  bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
    using slotwise::bindings::exchange_table;
    dlpack::dltensor view;
    if (const auto* table = exchange_table(source)) {
      if (!slotwise::bindings::read_view(*table, source, view) || !accepts(view)) return false;
      value = Target(view);
      return true;
    }
    using Any = std::conditional_t<std::is_const_v<T>, ndarray<ro>, ndarray<>>;
    make_caster<Any> caster;
    if (!caster.from_python(source, flags, cleanup)) return false;
    const Any array = caster.operator cast_t<Any>();
    view = {array.data_handle(),
            {array.device_type(), array.device_id()},
            static_cast<int32_t>(array.ndim()),
            array.dtype(),
            const_cast<int64_t*>(array.shape_ptr()),
            const_cast<int64_t*>(array.stride_ptr()),
            0};
    if (!accepts(view)) return false;
    value = Target(view, ndarray<ro>(array.handle()));
    return true;
  }

 private:
  static bool accepts(const dlpack::dltensor& view) {
    if (view.device.device_type != device::cpu::value || view.ndim != Rank) return false;
    if constexpr (std::is_void_v<Scalar>) {
      return true;
    } else {
      return view.dtype == dtype<Scalar>();
    }
  }
};

}  // namespace nanobind::detail
