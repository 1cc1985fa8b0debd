// Hopper's own instructions, as far as `linear` uses them: the bulk copy of tensors, its barriers,
// and the products of a warpgroup with 8 or 16 columns.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace slotwise::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and has the barrier wait for so many bytes of copies.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_last() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box at (row, slab) of `map`, [slabs, rows, 64], to `target`.
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap& map, int row, int slab,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
      "l"(&map), "r"(0), "r"(row), "r"(slab), "r"(barrier), "l"(policy)
      : "memory");
}

// An operand in shared memory: rows of 64 elements along K, 128 bytes, swizzled, in groups of 8
// rows that follow each other.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kGroupBytes = 8 * 128;
  return ((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 | (kGroupBytes >> 4) << 32 |
         uint64_t{1} << 62;
}

// c += a * b: 64 rows of a, 8 or 16 of b, 16 of K.
#define SLOTWISE_WGMMA_8(TYPE)                                   \
  asm volatile(                                                  \
      "{\n"                                                      \
      ".reg .pred add;\n"                                        \
      "setp.eq.u32 add, 0, 0;\n"                                 \
      "wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE \
      " {%0, %1, %2, %3}, %4, %5, add, 1, 1, 0, 0;\n"            \
      "}\n"                                                      \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])           \
      : "l"(a), "l"(b))
#define SLOTWISE_WGMMA_16(TYPE)                                                             \
  asm volatile(                                                                             \
      "{\n"                                                                                 \
      ".reg .pred add;\n"                                                                   \
      "setp.eq.u32 add, 0, 0;\n"                                                            \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE                           \
      " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, add, 1, 1, 0, 0;\n"                       \
      "}\n"                                                                                 \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), \
        "+f"(c[7])                                                                          \
      : "l"(a), "l"(b))

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    SLOTWISE_WGMMA_8("f16");
  } else {
    SLOTWISE_WGMMA_8("bf16");
  }
}

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[8], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    SLOTWISE_WGMMA_16("f16");
  } else {
    SLOTWISE_WGMMA_16("bf16");
  }
}

#undef SLOTWISE_WGMMA_8
#undef SLOTWISE_WGMMA_16

__device__ __forceinline__ void begin_multiplying() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void end_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until no more than kPending groups are left.
template <int kPending>
__device__ __forceinline__ void wait_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#endif  // sm_90a

}  // namespace slotwise::cuda
