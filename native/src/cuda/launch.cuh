// How kernels are launched: on Hopper and newer with programmatic dependent launch, so that a
// kernel may start while its predecessor ends.
//
// The rule: every thread of every kernel calls wait_for_predecessor() before it reads or writes
// anything a kernel may have written or may still read. Only weights and other constants may be
// read before. start_successor() may come at any time; the successor waits for the whole
// predecessor all the same. When it comes decides whose loads the memory serves first: products
// start theirs at once, norms and attention after their own wait, so that no more than the next
// product loads ahead of what is waited for.
//
// The exception: decode attention reads the positions and the cache's earlier rows before it waits.
// Only kernels of earlier steps write these, and they are complete by then: a kernel starts when
// all blocks of each one ahead of it have let their successors start or have ended, and
// embed_kernel, the first of every step, lets its successors start after its own wait. So
// embed_kernel must not start them earlier, and a step must not begin with another kernel.
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

// After wait_for_predecessor().
__device__ __forceinline__ ChunkPlace place_of(const ChunkParams& params) {
  if (params.place) return *params.place;
  return {static_cast<int>(params.slot), static_cast<int>(params.start),
          static_cast<int>(params.input.num_rows)};
}

struct DeviceInfo {
  int major;
  int minor;
  int num_sms;
  size_t block_shared_bytes;  // at most, with allow_shared
};

// Of the current device; where the thread uses portable kernels, of one of compute capability 8.
DeviceInfo device_info();

struct Grid {
  dim3 blocks;
  int threads;
  size_t shared_bytes = 0;
  unsigned cluster = 1;  // blocks along x
};

template <typename... Params, typename... Args>
void launch(const char* what, void (*kernel)(Params...), const Grid& grid, Stream stream,
            Args&&... args) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned num_attributes = 0;
  if (device_info().major >= 9) {
    cudaLaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {grid.cluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
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
