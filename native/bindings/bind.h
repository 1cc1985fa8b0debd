#pragma once

#include <nanobind/nanobind.h>

#include "slotwise/cpu_ops.h"

namespace slotwise::bindings {

void bind_packed_weight(nanobind::module_& module);
void bind_linear(nanobind::class_<CpuOps>& ops);
void bind_elementwise(nanobind::class_<CpuOps>& ops);
void bind_attention(nanobind::class_<CpuOps>& ops);
void bind_sample(nanobind::class_<CpuOps>& ops);

// Only in a build with CUDA.
void bind_cuda(nanobind::module_& module);
void bind_cuda_peers(nanobind::module_& module);

}  // namespace slotwise::bindings
