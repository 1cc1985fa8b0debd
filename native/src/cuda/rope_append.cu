// Norm and rotation of a chunk's queries and keys, and its keys and values into the slot cache.
#include "dispatch.cuh"
#include "launch.cuh"
#include "rope.cuh"

namespace slotwise::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kWarpHeads = 4;  // loaded together, so that one wait serves all

// Where a head of a row goes; in place for queries. Heads in the order q, k, v.
template <typename T>
__device__ __forceinline__ T* target(const AttentionInput& in, T* source, int64_t slot,
                                     int64_t position, int head) {
  const CacheParams& cache = in.cache;
  const int k = head - static_cast<int>(in.num_q_heads);
  const int v = k - static_cast<int>(cache.num_kv_heads);
  if (k < 0) return source;
  if (v < 0) {
    return static_cast<T*>(cache.k) + slot * cache.k_slot_stride +
           position * cache.k_position_stride + k * cache.k_head_stride;
  }
  return static_cast<T*>(cache.v) + slot * cache.v_slot_stride +
         position * cache.v_position_stride + v * cache.v_head_stride;
}

// One warp for kWarpHeads heads of a row.
template <typename T, int D>
__global__ void __launch_bounds__(kWarps * 32) rope_append_kernel(ChunkParams params) {
  // No early start of the successor: decode attention reads the cache before its own wait.
  wait_for_predecessor();
  const AttentionInput& in = params.input;
  const ChunkPlace place = place_of(params);
  const int q_heads = static_cast<int>(in.num_q_heads);
  const int rotated_heads = q_heads + static_cast<int>(in.cache.num_kv_heads);
  const int heads = rotated_heads + static_cast<int>(in.cache.num_kv_heads);
  const int row_warps = (heads + kWarpHeads - 1) / kWarpHeads;
  const int index = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int row = index / row_warps, first = index % row_warps * kWarpHeads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= place.num_rows) return;
  const int64_t position = int64_t{place.start} + row;
  T* const source = static_cast<T*>(in.qkv) + (static_cast<int64_t>(row) * heads + first) * D;
  Head<D> held[kWarpHeads];
#pragma unroll
  for (int i = 0; i < kWarpHeads; ++i) {
    if (first + i < heads) held[i] = load_head<D>(source + i * D, lane);
  }
  const Head<D> angles =
      load_angles<D>(in.cos + position * (D / 2), in.sin + position * (D / 2), lane);
#pragma unroll
  for (int i = 0; i < kWarpHeads; ++i) {
    const float* const norm = first + i < q_heads ? in.q_norm : in.k_norm;
    if (first + i < rotated_heads) norm_and_rotate(held[i], norm, in.eps, angles, lane);
  }
#pragma unroll
  for (int i = 0; i < kWarpHeads; ++i) {
    if (first + i >= heads) break;
    store_head(held[i], target(in, source + i * D, place.slot, position, first + i), lane);
  }
}

}  // namespace

void rope_append(const ChunkParams& params, Stream stream) {
  const CacheParams& cache = params.input.cache;
  const int64_t heads = params.input.num_q_heads + 2 * cache.num_kv_heads;
  const int64_t warps = params.input.num_rows * ((heads + kWarpHeads - 1) / kWarpHeads);
  const int64_t blocks = (warps + kWarps - 1) / kWarps;
  if (blocks == 0) return;
  check_cache("rope_append", cache);
  for_dtype(cache.dtype, [&](auto type) {
    for_head_dim("rope_append", cache.head_dim, [&](auto dim) {
      using T = typename decltype(type)::type;
      launch("rope_append", rope_append_kernel<T, decltype(dim)::value>,
             {dim3(static_cast<unsigned>(blocks)), kWarps * 32}, stream, params);
    });
  });
}

}  // namespace slotwise::cuda
