#include <nanobind/nanobind.h>

NB_MODULE(_native, m) {
  m.def("cuda_available", [] { return false; });
}
