// Norm and rotation of a chunk's queries and keys, and its keys and values into the slot cache.
#include "dispatch.cuh"
#include "launch.cuh"
#include "rope.cuh"

namespace slotwise::cuda {
namespace {

constexpr int kWarps = 8;

// One warp for a head of a row.
template <typename T, int D>
__global__ void __launch_bounds__(kWarps * 32) rope_append_kernel(ChunkParams params) {
  // No early start of the successor: decode attention reads the cache before its own wait.
  wait_for_predecessor();
  const AttentionInput& in = params.input;
  const CacheParams& cache = in.cache;
  const int q_heads = static_cast<int>(in.num_q_heads);
  const int kv_heads = static_cast<int>(cache.num_kv_heads);
  const int heads = q_heads + 2 * kv_heads;
  const int index = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int row = index / heads, h = index % heads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= in.num_rows) return;
  const int64_t position = params.start + row;
  T* const source = static_cast<T*>(in.qkv) + (static_cast<int64_t>(row) * heads + h) * D;
  Head<D> head = load_head<D>(source, lane);
  if (h >= q_heads + kv_heads) {
    T* const v = static_cast<T*>(cache.v) + params.slot * cache.v_slot_stride +
                 position * cache.v_position_stride +
                 (h - q_heads - kv_heads) * cache.v_head_stride;
    return store_head(head, v, lane);
  }
  const bool is_query = h < q_heads;
  norm_and_rotate(head, is_query ? in.q_norm : in.k_norm, in.eps, in.cos + position * (D / 2),
                  in.sin + position * (D / 2), lane);
  T* const k = static_cast<T*>(cache.k) + params.slot * cache.k_slot_stride +
               position * cache.k_position_stride + (h - q_heads) * cache.k_head_stride;
  store_head(head, is_query ? source : k, lane);
}

}  // namespace

void rope_append(const ChunkParams& params, Stream stream) {
  const CacheParams& cache = params.input.cache;
  const int64_t heads = params.input.num_q_heads + 2 * cache.num_kv_heads;
  const int64_t blocks = (params.input.num_rows * heads + kWarps - 1) / kWarps;
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
