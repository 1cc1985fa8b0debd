// Prefill attention of 64 packed rows or fewer over few tiles on Hopper: each of the warpgroups of
// a cluster takes a tile, and every block folds the states of its own share of the rows in order
// from the shared memory of all. More tiles go to prefill_links.cuh, which does not wait for the
// whole cluster but takes longer to begin.
#pragma once

#include "prefill_wgmma.cuh"

namespace slotwise::cuda {

constexpr int kSplitCluster = 8;  // blocks
constexpr int kSplitTiles = kGroups * kSplitCluster;

template <int kDim>
struct SplitLayout {
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kRows = kGroupRows;
  static constexpr int kShareRows = kRows / kSplitCluster;  // that a block folds
  static constexpr int kRowQuads = kDim / 4;                // float4s
  static_assert(kShareRows * kRowQuads <= kThreads, "a thread folds 4 columns of a row");

  static constexpr int kQueryPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kTileBytes = TileLayout<kDim>::kBytes;
  static constexpr int kStateBytes = kRows * kDim * 4;
  static constexpr int kQueries = 0;  // offsets
  static constexpr int kTiles = kQueries + kRows * kDim * 2;
  static constexpr int kStates = kTiles + 2 * kGroups * kTileBytes;
  static constexpr int kRowStates = kStates + kGroups * kStateBytes;
  static constexpr int kBarriers = kRowStates + kGroups * kRows * 8;
  static constexpr int kBytes = kBarriers + 16 * kGroups + kPanelAlignment;

  // Of 4 columns of a state's row; turned so that a warp's stores meet no bank twice.
  static __device__ __forceinline__ int quad_offset(int row, int quad) {
    return row * kDim * 4 + (quad ^ (row & 3) << 1) * 16;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Folds 4 columns of a row over the tiles' states, which the cluster's blocks hold at `base` in
// their shared memory, and stores them.
template <typename T, int kDim>
__device__ __forceinline__ void fold_quad(const PrefillArgs& args, uint32_t base, int row, int quad,
                                          int num_tiles, int kv_head) {
  using Layout = SplitLayout<kDim>;
  float4 o[kSplitTiles];
  float2 state[kSplitTiles];
#pragma unroll
  for (int tile = 0; tile < kSplitTiles; ++tile) {
    if (tile >= num_tiles) break;
    const int group = tile % kGroups;
    const uint32_t block = in_cluster(base, tile / kGroups);
    o[tile] = load_cluster4(block + Layout::kStates + group * Layout::kStateBytes +
                            Layout::quad_offset(row, quad));
    state[tile] = load_cluster2(block + Layout::kRowStates + (group * Layout::kRows + row) * 8);
  }
  const int position = LaneRows::position_of(args, row);
  float4 total{kNothing, kNothing, kNothing, kNothing};
  float max = 0, sum = kNothing;
#pragma unroll
  for (int tile = 0; tile < kSplitTiles; ++tile) {
    if (tile >= num_tiles) break;
    const FoldFactors f =
        next_factors(max, state[tile].x, args.c, tile == 0, position >= tile * kAttentionTile);
    max = f.max;
    sum = fold(sum, state[tile].y, f);
    total.x = fold(total.x, o[tile].x, f);
    total.y = fold(total.y, o[tile].y, f);
    total.z = fold(total.z, o[tile].z, f);
    total.w = fold(total.w, o[tile].w, f);
  }
  const float scale = inverse(sum);
  const uint2 packed = {pack<T>(finish(total.x, scale), finish(total.y, scale)),
                        pack<T>(finish(total.z, scale), finish(total.w, scale))};
  T* const out = out_row<T, kDim>(args, row, kv_head);
  *reinterpret_cast<uint2*>(out + 4 * quad) = packed;
}

// o of a warpgroup's 64 rows and one panel's columns, to the block's own memory.
template <typename Layout>
__device__ __forceinline__ void store_state(uint32_t to, int row, int panel,
                                            const float (&o)[8][4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int quad = panel * 16 + 2 * n + lane / 2;
      store_shared(to + Layout::quad_offset(row + 8 * r, quad) + lane % 2 * 8,
                   {o[n][2 * r], o[n][2 * r + 1]});
    }
  }
}

// The states of one tile, to the block's own memory.
template <typename T, int kDim>
__device__ __forceinline__ void split_tile(const PrefillArgs& args, uint32_t base, int group,
                                           int tile) {
  using Layout = SplitLayout<kDim>;
  const uint32_t k = base + Layout::kTiles + 2 * group * Layout::kTileBytes;
  const uint32_t v = k + Layout::kTileBytes;
  const uint32_t k_full = base + Layout::kBarriers + 16 * group, v_full = k_full + 8;
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kGroupThreads / 32 * 16 + lane / 4;
  const LaneRows rows(args, row);
  float s[kEights][4];
  uint32_t p[kSixteens][4];
  barrier_wait(k_full, 0);
  begin_multiplying();
  begin_scores<T, kDim>(s, base + Layout::kQueries, Layout::kQueryPanelBytes, k);
  wait_groups<0>();
  pin(s);
  const int tile_start = tile * kAttentionTile;
  if (tile_start + kAttentionTile - 1 > args.start) {
    mask_scores(s, rows, tile_start);
  }
  const RowStates states = weigh_tile<T>(s, p, rows, tile_start, args.c);
  barrier_wait(v_full, 0);
#pragma unroll
  for (int panel = 0; panel < TileLayout<kDim>::kPanels; ++panel) {
    float o[8][4];
    pin(p);
    begin_multiplying();
    begin_values<T>(o, p, v + panel * TileLayout<kDim>::kPanelBytes);
    wait_groups<0>();
    pin(o);
    store_state<Layout>(base + Layout::kStates + group * Layout::kStateBytes, row, panel, o);
  }
  if (lane % 4 != 0) return;
  for (int r = 0; r < 2; ++r) {
    store_shared(base + Layout::kRowStates + (group * Layout::kRows + row + 8 * r) * 8,
                 {states.max[r], states.sum[r]});
  }
}

#endif  // sm_90a

// Grid: blocks of a cluster, KV heads.
template <typename T, int kDim>
__global__ void __launch_bounds__(kGroups* kGroupThreads, 1)
    prefill_split_kernel(const __grid_constant__ ChunkMaps maps, const PrefillArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Layout = SplitLayout<kDim>;
  extern __shared__ char memory[];
  const uint32_t base = aligned_memory(memory);
  const int thread = threadIdx.x, group = thread / kGroupThreads;
  const int rank = blockIdx.x, kv_head = blockIdx.y;
  const int end = LaneRows::position_of(args, Layout::kRows - 1) + 1;
  const int num_tiles = (end + kAttentionTile - 1) / kAttentionTile;
  const int tile = rank * kGroups + group;
  const bool first = thread % kGroupThreads == 0;
  const uint32_t k = base + Layout::kTiles + 2 * group * Layout::kTileBytes;
  const uint32_t k_full = base + Layout::kBarriers + 16 * group;
  if (first) {
    barrier_init(k_full, 1);
    barrier_init(k_full + 8, 1);
    fence_barriers();
  }
  wait_for_predecessor();
  start_successor();
  if (first && tile < num_tiles) {
    copy_tile<kDim>(k, maps.k, tile, kv_head, k_full);
    copy_tile<kDim>(k + Layout::kTileBytes, maps.v, tile, kv_head, k_full + 8);
  }
  load_queries<T, kDim>(args, base + Layout::kQueries, Layout::kQueryPanelBytes, 0, Layout::kRows,
                        kv_head, thread, Layout::kThreads);
  __syncthreads();
  if (tile < num_tiles) split_tile<T, kDim>(args, base, group, tile);
  arrive_cluster();
  wait_cluster();
  const int row = rank * Layout::kShareRows + thread / Layout::kRowQuads;
  if (thread < Layout::kShareRows * Layout::kRowQuads && row < args.num_rows) {
    fold_quad<T, kDim>(args, base, row, thread % Layout::kRowQuads, num_tiles, kv_head);
  }
  // No block ends while others may read its states.
  arrive_cluster();
  wait_cluster();
#else
  __trap();  // never launched on other devices
#endif
}

}  // namespace slotwise::cuda
