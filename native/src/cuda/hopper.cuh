// Hopper's own instructions: copies of tiles (TMA) with their barriers, the products of a warpgroup
// (wgmma), and what goes with them. Used by `linear` and by attention.
//
// Tiles lie in shared memory in panels of 64 columns, 128 bytes a row, the 16-byte chunks of a row
// permuted as CU_TENSOR_MAP_SWIZZLE_128B does.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "mma.cuh"

namespace slotwise::cuda {

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- Barriers -----------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the copies.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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

// A place in a ring of stages and the parity of its barriers' phase.
template <int kStages>
struct Place {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Barriers among threads: 0 is __syncthreads.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- Copies -------------------------------------------------------------------------------------

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

// The box at (column, row, head).
__device__ __forceinline__ void copy_panel(uint32_t to, const CUtensorMap& map, int column, int row,
                                           int head, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(barrier)
      : "memory");
}

// The box at (column, row, head, slot).
__device__ __forceinline__ void copy_panel(uint32_t to, const CUtensorMap& map, int column, int row,
                                           int head, int slot, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(slot), "r"(barrier)
      : "memory");
}

// The same, for L2 to keep as `policy` says.
__device__ __forceinline__ void copy_panel(uint32_t to, const CUtensorMap& map, int column, int row,
                                           int head, int slot, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(slot), "r"(barrier), "l"(policy)
      : "memory");
}

// The box at (row, slab) to the same place in every block of the cluster that is in `blocks`, a
// bit each, where it counts for the barrier at the same place.
__device__ __forceinline__ void copy_box_to_cluster(uint32_t target, const CUtensorMap& map,
                                                    int row, int slab, uint32_t barrier,
                                                    uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
      "l"(&map), "r"(0), "r"(row), "r"(slab), "r"(barrier), "h"(blocks)
      : "memory");
}

// ---- Shared memory, also of the other blocks of a cluster ---------------------------------------

__device__ __forceinline__ int panel_offset(int row, int chunk) {
  return row * kPanelRowBytes + (chunk ^ (row & 7)) * 16;
}

__device__ __forceinline__ void store_shared(uint32_t to, const uint4& x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x.x), "f"(x.y) : "memory");
}

// The same place in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ uint32_t in_cluster(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ float4 load_cluster4(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ float2 load_cluster2(uint32_t address) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(address)
               : "memory");
  return x;
}

// At the barrier in the same place of the cluster's block `rank`. Orders no ordinary stores for
// that block: a release to the cluster waits for all memory of the device.
__device__ __forceinline__ void barrier_arrive_in_cluster(uint32_t barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_cluster(barrier, rank))
               : "memory");
}

// For barriers that were initialised and fenced; orders no other stores.
__device__ __forceinline__ void arrive_cluster_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ __forceinline__ void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

__device__ __forceinline__ void wait_cluster() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Makes ordinary stores to shared memory visible to the matrix instructions.
__device__ __forceinline__ void fence_stores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Products -----------------------------------------------------------------------------------

// An operand in panels, from `address` on. Where rows are along K, 16 of K are 32 bytes further;
// where they are along M or N, 16 of K are 16 rows further.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kGroupBytes = 8 * kPanelRowBytes;
  return ((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 | (kGroupBytes >> 4) << 32 |
         uint64_t{1} << 62;
}

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

// Keeps the compiler from moving uses of registers over a wait.
template <int N>
__device__ __forceinline__ void pin(float (&r)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (float& x : r[n]) asm volatile("" : "+f"(x)::"memory");
  }
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&r)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (uint32_t& x : r[n]) asm volatile("" : "+r"(x)::"memory");
  }
}

// The instruction for elements of type T.
#define SLOTWISE_BY_TYPE(WGMMA)              \
  if constexpr (std::is_same_v<T, __half>) { \
    WGMMA("f16");                            \
  } else {                                   \
    WGMMA("bf16");                           \
  }

// Registers as operands, c[n] and what follows, and their names.
#define SLOTWISE_C4(n) "+f"(c[n]), "+f"(c[n + 1]), "+f"(c[n + 2]), "+f"(c[n + 3])
#define SLOTWISE_C8(n) SLOTWISE_C4(n), SLOTWISE_C4(n + 4)
#define SLOTWISE_C16(n) SLOTWISE_C8(n), SLOTWISE_C8(n + 8)
#define SLOTWISE_C32(n) SLOTWISE_C16(n), SLOTWISE_C16(n + 16)
#define SLOTWISE_NAMES_4 "%0, %1, %2, %3"
#define SLOTWISE_NAMES_8 SLOTWISE_NAMES_4 ", %4, %5, %6, %7"
#define SLOTWISE_NAMES_16 SLOTWISE_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SLOTWISE_NAMES_0                       \
  SLOTWISE_NAMES_16                            \
  ", %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"

// c += a * b: 64 rows of a, 8, 16, 32 or 64 of b, 16 of K.
#define SLOTWISE_ADD(ROWS, TYPE, C, A, B)                                                 \
  "{\n"                                                                                   \
  ".reg .pred add;\n"                                                                     \
  "setp.eq.u32 add, 0, 0;\n"                                                              \
  "wgmma.mma_async.sync.aligned.m64n" ROWS "k16.f32." TYPE "." TYPE " {" C "}, " A ", " B \
  ", add, 1, 1, 0, 0;\n"                                                                  \
  "}\n"
#define SLOTWISE_WGMMA_8(TYPE)                                       \
  asm volatile(SLOTWISE_ADD("8", TYPE, SLOTWISE_NAMES_4, "%4", "%5") \
               : SLOTWISE_C4(0)                                      \
               : "l"(a), "l"(b))
#define SLOTWISE_WGMMA_16(TYPE)                                       \
  asm volatile(SLOTWISE_ADD("16", TYPE, SLOTWISE_NAMES_8, "%8", "%9") \
               : SLOTWISE_C8(0)                                       \
               : "l"(a), "l"(b))
#define SLOTWISE_WGMMA_32(TYPE)                                          \
  asm volatile(SLOTWISE_ADD("32", TYPE, SLOTWISE_NAMES_16, "%16", "%17") \
               : SLOTWISE_C16(0)                                         \
               : "l"(a), "l"(b))
#define SLOTWISE_WGMMA_64(TYPE)                                         \
  asm volatile(SLOTWISE_ADD("64", TYPE, SLOTWISE_NAMES_0, "%32", "%33") \
               : SLOTWISE_C32(0)                                        \
               : "l"(a), "l"(b))

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], uint64_t a, uint64_t b) {
  SLOTWISE_BY_TYPE(SLOTWISE_WGMMA_8);
}

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[8], uint64_t a, uint64_t b) {
  SLOTWISE_BY_TYPE(SLOTWISE_WGMMA_16);
}

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[16], uint64_t a, uint64_t b) {
  SLOTWISE_BY_TYPE(SLOTWISE_WGMMA_32);
}

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[32], uint64_t a, uint64_t b) {
  SLOTWISE_BY_TYPE(SLOTWISE_WGMMA_64);
}

// Registers as operands, d[n] and what follows.
#define SLOTWISE_R4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define SLOTWISE_R16(n) SLOTWISE_R4(n), SLOTWISE_R4(n + 1), SLOTWISE_R4(n + 2), SLOTWISE_R4(n + 3)
#define SLOTWISE_R32(n) SLOTWISE_R16(n), SLOTWISE_R16(n + 4)
#define SLOTWISE_NAMES_32                      \
  ", %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, "   \
  "%48, %49, %50, %51, %52, %53, %54, %55, "   \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define SLOTWISE_NAMES_64                      \
  ", %64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79, "   \
  "%80, %81, %82, %83, %84, %85, %86, %87, "   \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define SLOTWISE_NAMES_96                            \
  ", %96, %97, %98, %99, %100, %101, %102, %103, "   \
  "%104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"

// d[64 x N] = a[64 x 16] b[N x 16]^T, + d where `add`; rows of both along K.
#define SLOTWISE_WGMMA_128(TYPE)                                               \
  asm volatile(                                                                \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                             \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE             \
      " {" SLOTWISE_NAMES_0 SLOTWISE_NAMES_32 "}, %64, %65, p, 1, 1, 0, 0;\n}" \
      : SLOTWISE_R32(0), SLOTWISE_R32(8)                                       \
      : "l"(a), "l"(b), "r"(add))
#define SLOTWISE_WGMMA_192(TYPE)                                                                 \
  asm volatile(                                                                                  \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"                                               \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE                               \
      " {" SLOTWISE_NAMES_0 SLOTWISE_NAMES_32 SLOTWISE_NAMES_64 "}, %96, %97, p, 1, 1, 0, 0;\n}" \
      : SLOTWISE_R32(0), SLOTWISE_R32(8), SLOTWISE_R32(16)                                       \
      : "l"(a), "l"(b), "r"(add))
#define SLOTWISE_WGMMA_256(TYPE)                                                  \
  asm volatile(                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                               \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE                \
      " {" SLOTWISE_NAMES_0 SLOTWISE_NAMES_32 SLOTWISE_NAMES_64 SLOTWISE_NAMES_96 \
      "}, %128, %129, p, 1, 1, 0, 0;\n}"                                          \
      : SLOTWISE_R32(0), SLOTWISE_R32(8), SLOTWISE_R32(16), SLOTWISE_R32(24)      \
      : "l"(a), "l"(b), "r"(add))

template <typename T>
__device__ __forceinline__ void multiply_rows(float (&d)[16][4], uint64_t a, uint64_t b, int add) {
  SLOTWISE_BY_TYPE(SLOTWISE_WGMMA_128);
}

template <typename T>
__device__ __forceinline__ void multiply_rows(float (&d)[24][4], uint64_t a, uint64_t b, int add) {
  SLOTWISE_BY_TYPE(SLOTWISE_WGMMA_192);
}

template <typename T>
__device__ __forceinline__ void multiply_rows(float (&d)[32][4], uint64_t a, uint64_t b, int add) {
  SLOTWISE_BY_TYPE(SLOTWISE_WGMMA_256);
}

// d[64 x 64] = a[64 x 16] b[16 x 64], + d where `add`; a in registers, rows of b along N.
#define SLOTWISE_WGMMA_R64(TYPE)                                                        \
  asm volatile(                                                                         \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                      \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" SLOTWISE_NAMES_0 \
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"                                    \
      : SLOTWISE_R32(0)                                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

template <typename T>
__device__ __forceinline__ void multiply_64(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b,
                                            int add) {
  SLOTWISE_BY_TYPE(SLOTWISE_WGMMA_R64);
}

#undef SLOTWISE_BY_TYPE
#undef SLOTWISE_ADD
#undef SLOTWISE_C4
#undef SLOTWISE_C8
#undef SLOTWISE_C16
#undef SLOTWISE_C32
#undef SLOTWISE_NAMES_4
#undef SLOTWISE_NAMES_8
#undef SLOTWISE_NAMES_16
#undef SLOTWISE_WGMMA_8
#undef SLOTWISE_WGMMA_16
#undef SLOTWISE_WGMMA_32
#undef SLOTWISE_WGMMA_64
#undef SLOTWISE_WGMMA_R64
#undef SLOTWISE_WGMMA_128
#undef SLOTWISE_WGMMA_192
#undef SLOTWISE_WGMMA_256
#undef SLOTWISE_NAMES_0
#undef SLOTWISE_NAMES_32
#undef SLOTWISE_NAMES_64
#undef SLOTWISE_NAMES_96
#undef SLOTWISE_R4
#undef SLOTWISE_R16
#undef SLOTWISE_R32

template <int kCount>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

#endif  // sm_90a

}  // namespace slotwise::cuda
