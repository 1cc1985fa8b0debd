#include "tensor.h"

#include "checks.h"

namespace slotwise::bindings {
namespace {

// Not yet in nanobind: the layout is fixed by dlpack.h, major version 1.
struct ExchangeTable {
  uint32_t major_version;
  uint32_t minor_version;
  void* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*dltensor_from_py_object)(void* object, nb::dlpack::dltensor* out);
  void* current_work_stream;
};

constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kCapsule = "dlpack_exchange_api";
constexpr uint32_t kMajorVersion = 1;

const ExchangeTable* find_table(PyTypeObject* type) {
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), kAttribute);
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  void* pointer = PyCapsule_GetPointer(capsule, kCapsule);
  Py_DECREF(capsule);
  if (pointer == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* table = static_cast<const ExchangeTable*>(pointer);
  const bool usable =
      table->major_version == kMajorVersion && table->dltensor_from_py_object != nullptr;
  return usable ? table : nullptr;
}

// The table of an object's type, or null.
const ExchangeTable* exchange_table(nb::handle object) {
  // Arrays of one program have one type: the last answer is kept (the GIL is held), and with it the
  // type, so that another can never take its address.
  static PyTypeObject* last_type = nullptr;
  static const ExchangeTable* last_table = nullptr;
  PyTypeObject* type = Py_TYPE(object.ptr());
  if (type != last_type) {
    last_table = find_table(type);
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    Py_XDECREF(reinterpret_cast<PyObject*>(last_type));
    last_type = type;
  }
  return last_table;
}

// False (and no Python error) where the table cannot describe the object.
bool read_view(const ExchangeTable& table, nb::handle object, nb::dlpack::dltensor& view) {
  if (table.dltensor_from_py_object(object.ptr(), &view) != 0) {
    PyErr_Clear();
    return false;
  }
  return view.strides != nullptr || view.ndim == 0;
}

template <typename Ndarray>
bool read_ndarray(nb::handle object, uint32_t flags, nb::detail::cleanup_list* cleanup,
                  Array& array) {
  nb::detail::make_caster<Ndarray> caster;
  if (!caster.from_python(object, flags, cleanup)) return false;
  array.owner = nb::ndarray<nb::ro>(caster.value.handle());
  const nb::ndarray<nb::ro>& owner = array.owner;
  array.view = {const_cast<void*>(static_cast<const void*>(owner.data())),
                {owner.device_type(), owner.device_id()},
                static_cast<int32_t>(owner.ndim()),
                owner.dtype(),
                const_cast<int64_t*>(owner.shape_ptr()),
                const_cast<int64_t*>(owner.stride_ptr()),
                0};
  return true;
}

std::string dtype_text(nb::dlpack::dtype dtype) {
  const auto is = [&](nb::dlpack::dtype_code code) {
    return dtype.code == static_cast<uint8_t>(code);
  };
  using Code = nb::dlpack::dtype_code;
  const char* name = is(Code::Float)     ? "float"
                     : is(Code::Bfloat)  ? "bfloat"
                     : is(Code::Int)     ? "int"
                     : is(Code::UInt)    ? "uint"
                     : is(Code::Bool)    ? "bool"
                     : is(Code::Complex) ? "complex"
                                         : "a type of bits ";
  return name + std::to_string(dtype.bits);
}

bool is_bfloat16(nb::dlpack::dtype dtype) {
  return dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && dtype.bits == 16 &&
         dtype.lanes == 1;
}

bool is_float16(nb::dlpack::dtype dtype) {
  return dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && dtype.bits == 16 &&
         dtype.lanes == 1;
}

std::string shape_text(const nb::dlpack::dltensor& view) {
  std::string text = "[";
  for (int axis = 0; axis < view.ndim; ++axis) {
    text += (axis ? ", " : "") + std::to_string(view.shape[axis]);
  }
  return text + "]";
}

[[noreturn]] void fail_kind(const char* op, const std::string& expected, const std::string& got) {
  const std::string message = "[" + std::string(op) + "] expected " + expected + ", got " + got;
  throw nb::type_error(message.c_str());
}

}  // namespace

bool read_array(nb::handle object, uint32_t flags, nb::detail::cleanup_list* cleanup,
                Array& array) {
  if (object.is_none()) return false;
  if (const ExchangeTable* table = exchange_table(object)) {
    return read_view(*table, object, array.view);
  }
  array.writable = read_ndarray<nb::ndarray<>>(object, flags, cleanup, array);
  return array.writable || read_ndarray<nb::ndarray<nb::ro>>(object, flags, cleanup, array);
}

void check_kind(const char* op, const char* name, const Array& array, const Wanted& wanted) {
  const nb::dlpack::dltensor& view = array.view;
  const std::string which(name);
  const int device = wanted.on_gpu ? nb::device::cuda::value : nb::device::cpu::value;
  if (view.device.device_type != device) {
    fail_kind(op, which + (wanted.on_gpu ? " on the GPU" : " on the CPU"),
              "DLPack device type " + std::to_string(view.device.device_type));
  }
  if (wanted.any_float) {
    const bool half = wanted.on_gpu && is_float16(view.dtype);
    if (view.dtype != wanted.dtype && !is_bfloat16(view.dtype) && !half) {
      fail_kind(op, which + " of float32 or bfloat16", dtype_text(view.dtype));
    }
  } else if (view.dtype != wanted.dtype) {
    fail_kind(op, which + " of " + dtype_text(wanted.dtype), dtype_text(view.dtype));
  }
  if (view.ndim != wanted.rank) {
    fail_kind(op, which + " of " + std::to_string(wanted.rank) + " dimensions",
              "shape " + shape_text(view));
  }
  if (wanted.writable && !array.writable) {
    fail_kind(op, which + " that can be written", "a read-only array");
  }
}

void check_layout(const char* op, const char* name, const Array& array, bool written) {
  const nb::dlpack::dltensor& view = array.view;
  const std::string which(name);
  for (int axis = 0; axis < view.ndim; ++axis) {
    if (view.shape[axis] == 0) return;
  }
  const int last = view.ndim - 1;
  if (view.shape[last] > 1 && view.strides[last] != 1) {
    fail(op, which + " contiguous in its last dimension",
         "stride " + std::to_string(view.strides[last]));
  }
  if (!written) return;
  // Each dimension must step over all that lies in those of smaller strides.
  for (int axis = 0; axis < view.ndim; ++axis) {
    int64_t inner = 1;
    for (int other = 0; other < view.ndim; ++other) {
      const bool below = view.strides[other] < view.strides[axis] ||
                         (view.strides[other] == view.strides[axis] && other > axis);
      if (below) inner += (view.shape[other] - 1) * view.strides[other];
    }
    if (view.shape[axis] > 1 && view.strides[axis] < inner) {
      fail(op,
           which + " with a stride of at least " + std::to_string(inner) + " in dimension " +
               std::to_string(axis),
           std::to_string(view.strides[axis]));
    }
  }
}

}  // namespace slotwise::bindings
