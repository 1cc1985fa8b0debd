#pragma once

#include <nanobind/nanobind.h>

#include "slotwise/cuda.h"

namespace slotwise::bindings {

// The operators on one GPU, put on one stream.
struct CudaOps {
  int device;
  cuda::Stream stream;
  bool portable = false;  // its kernels are those of every GPU

  // Makes the device the calling thread's.
  void enter() const { cuda::use_device(device, portable); }
};

// The slot table and the sampler.
void bind_cuda_slots(nanobind::module_& module, nanobind::class_<CudaOps>& ops);

}  // namespace slotwise::bindings
