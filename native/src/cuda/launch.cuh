// How kernels are launched: on Hopper and newer with programmatic dependent launch, so that a
// kernel may start while its predecessor ends.
//
// The rule: every thread of every kernel calls wait_for_predecessor() before it reads or writes
// anything a kernel may have written or may still read. Only weights and other constants may be
// read before. start_successor() may come at any time; the successor waits for the whole
// predecessor all the same.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "slotwise/cuda.h"

namespace slotwise::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

__device__ __forceinline__ void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void start_successor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct DeviceInfo {
  int major;
  int minor;
  int num_sms;
};

// Of the current device.
const DeviceInfo& device_info();

struct Grid {
  dim3 blocks;
  int threads;
  size_t shared_bytes = 0;
};

template <typename... Params, typename... Args>
void launch(const char* what, void (*kernel)(Params...), const Grid& grid, Stream stream,
            Args&&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = device_info().major >= 9 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, Params(std::forward<Args>(args))...), what);
}

// Raises a kernel's limit of dynamic shared memory; once per kernel and device is enough.
template <typename Kernel>
void allow_shared(const char* what, Kernel* kernel, size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        what);
}

}  // namespace slotwise::cuda
