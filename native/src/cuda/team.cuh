// The blocks that share a row: a cluster on Hopper and newer, else one block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "launch.cuh"

namespace slotwise::cuda {

constexpr int kMaxTeam = 8;  // blocks

template <int kBlocks>
struct Team {
  static __device__ __forceinline__ uint32_t rank() { return blockIdx.x % kBlocks; }

  // Between these two calls every block of the team has started.
  static __device__ __forceinline__ void arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
  }
  static __device__ __forceinline__ void wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
  }

  // Every thread of the team, and what they wrote to each other's shared memory.
  static __device__ __forceinline__ void sync() {
    if constexpr (kBlocks == 1) {
      __syncthreads();
    } else {
      arrive();
      wait();
    }
  }

  // The same object in the shared memory of another block.
  template <typename T>
  static __device__ __forceinline__ T* in_block(T* object, uint32_t block) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (kBlocks > 1) {
      uint64_t address;
      asm("mapa.u64 %0, %1, %2;"
          : "=l"(address)
          : "l"(reinterpret_cast<uint64_t>(object)), "r"(block));
      return reinterpret_cast<T*>(address);
    }
#endif
    return object;
  }
};

// Calls with the blocks of a team on this device, an integral_constant.
template <typename Call>
void for_team(const Call& call) {
  if (device_info().major >= 9) {
    call(std::integral_constant<int, kMaxTeam>{});
  } else {
    call(std::integral_constant<int, 1>{});
  }
}

}  // namespace slotwise::cuda
