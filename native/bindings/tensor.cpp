#include "tensor.h"

namespace slotwise::bindings {
namespace {

constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kCapsule = "dlpack_exchange_api";
constexpr uint32_t kMajorVersion = 1;

const DlpackExchangeTable* find_table(PyTypeObject* type) {
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
  const auto* table = static_cast<const DlpackExchangeTable*>(pointer);
  const bool usable =
      table->major_version == kMajorVersion && table->dltensor_from_py_object != nullptr;
  return usable ? table : nullptr;
}

}  // namespace

const DlpackExchangeTable* exchange_table(nb::handle object) {
  // Arrays of one program have one type: the last answer is kept (the GIL is held), and with it the
  // type, so that another can never take its address.
  static PyTypeObject* last_type = nullptr;
  static const DlpackExchangeTable* last_table = nullptr;
  PyTypeObject* type = Py_TYPE(object.ptr());
  if (type != last_type) {
    last_table = find_table(type);
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    Py_XDECREF(reinterpret_cast<PyObject*>(last_type));
    last_type = type;
  }
  return last_table;
}

bool read_view(const DlpackExchangeTable& table, nb::handle object, nb::dlpack::dltensor& view) {
  if (table.dltensor_from_py_object(object.ptr(), &view) != 0) {
    PyErr_Clear();
    return false;
  }
  return view.strides != nullptr || view.ndim == 0;
}

}  // namespace slotwise::bindings
