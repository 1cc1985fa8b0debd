#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "bind.h"
#include "slotwise/cuda.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr int kMaxThreads = 1024;

void make_cpu_ops(slotwise::CpuOps* self, int num_threads, const std::string& isa) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw std::invalid_argument("[CpuOps] expected num_threads in [1, " +
                                std::to_string(kMaxThreads) + "], got " +
                                std::to_string(num_threads));
  }
  new (self) slotwise::CpuOps(num_threads, isa);
}

}  // namespace

NB_MODULE(_native, m) {
  // What lives until the interpreter ends, as a server's weights do, is no leak.
  nb::set_leak_warnings(false);
  m.doc() = "Operators of a decoder over a slot cache; see _native.pyi.";
  m.attr("BUILD") = SLOTWISE_BUILD;
#ifdef SLOTWISE_WITH_CUDA
  m.attr("BUILT_WITH_CUDA") = true;
#else
  m.attr("BUILT_WITH_CUDA") = false;
#endif
  m.def("cuda_available", &slotwise::cuda_available);
  m.def("cuda_device_count", &slotwise::cuda_device_count);
  slotwise::bindings::bind_packed_weight(m);
  nb::class_<slotwise::CpuOps> ops(m, "CpuOps");
  ops.def("__init__", &make_cpu_ops, "num_threads"_a, "isa"_a = "auto");
  ops.def_prop_ro("num_threads", &slotwise::CpuOps::num_threads);
  ops.def_prop_ro("isa", &slotwise::CpuOps::isa);
  slotwise::bindings::bind_linear(ops);
  slotwise::bindings::bind_elementwise(ops);
  slotwise::bindings::bind_attention(ops);
  slotwise::bindings::bind_sample(ops);
#ifdef SLOTWISE_WITH_CUDA
  slotwise::bindings::bind_cuda(m);
  slotwise::bindings::bind_cuda_peers(m);
#endif
}
