// Prefill attention of few rows over many tiles on Hopper: the blocks of a cluster take the tiles
// in turn, and fold their states in order through each other's shared memory.
//
// A round is one tile for each team, which is a block's two warpgroups with 64 rows each, or one
// warpgroup where there are no more rows. Between the rounds every block folds the round's states
// of its own share of the rows. On an H200 a round takes over three times as long as a tile takes
// without one, so this pays only where most of the device would be idle.
#pragma once

#include "prefill_wgmma.cuh"

namespace slotwise::cuda {

constexpr int kCluster = 8;  // blocks

template <int kDim, int kTeams>
struct SplitLayout {
  static constexpr int kTeamCount = kTeams;
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kTeamThreads = kThreads / kTeams;
  static constexpr int kRows = kGroups * kGroupRows / kTeams;  // of the cluster's blocks
  static constexpr int kRoundTiles = kTeams * kCluster;
  static constexpr int kShareRows = kRows / kCluster;  // that a block folds
  static constexpr int kRowQuads = kDim / 4;           // float4s
  static constexpr int kItems = (kShareRows * kRowQuads + kThreads - 1) / kThreads;  // of a thread

  static constexpr int kQueryPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kTileBytes = TileLayout<kDim>::kBytes;
  static constexpr int kStateBytes = kRows * kDim * 4;
  static constexpr int kQueries = 0;  // offsets
  static constexpr int kTiles = kQueries + kRows * kDim * 2;
  static constexpr int kStates = kTiles + 2 * kTeams * kTileBytes;
  static constexpr int kRowStates = kStates + kTeams * kStateBytes;
  static constexpr int kBarriers = kRowStates + kTeams * kRows * 8;
  static constexpr int kBytes = kBarriers + 16 * kTeams + kPanelAlignment;

  // Of 4 columns of a state's row; turned so that a warp's stores meet no bank twice.
  static __device__ __forceinline__ int quad_offset(int row, int quad) {
    return row * kDim * 4 + (quad ^ (row & 3) << 1) * 16;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The totals of 4 columns of a row.
struct SplitTotals {
  float4 o{kNothing, kNothing, kNothing, kNothing};
  float max = 0;
  float sum = kNothing;
};

// Folds the states of tiles [first_tile, last_tile) of the totals' row, which the cluster's blocks
// hold at `base` in their shared memory.
template <typename Layout>
__device__ __forceinline__ void fold_round(SplitTotals& totals, uint32_t base, int row, int quad,
                                           int position, int first_tile, int last_tile, float c) {
  float4 o[Layout::kRoundTiles];
  float2 state[Layout::kRoundTiles];
#pragma unroll
  for (int i = 0; i < Layout::kRoundTiles; ++i) {
    if (first_tile + i >= last_tile) break;
    const int team = i % Layout::kTeamCount;
    const uint32_t block = in_cluster(base, i / Layout::kTeamCount);
    o[i] = load_cluster4(block + Layout::kStates + team * Layout::kStateBytes +
                         Layout::quad_offset(row, quad));
    state[i] = load_cluster2(block + Layout::kRowStates + (team * Layout::kRows + row) * 8);
  }
#pragma unroll
  for (int i = 0; i < Layout::kRoundTiles; ++i) {
    const int tile = first_tile + i;
    if (tile >= last_tile) break;
    const FoldFactors f =
        next_factors(totals.max, state[i].x, c, tile == 0, position >= tile * kAttentionTile);
    totals.max = f.max;
    totals.sum = fold(totals.sum, state[i].y, f);
    totals.o.x = fold(totals.o.x, o[i].x, f);
    totals.o.y = fold(totals.o.y, o[i].y, f);
    totals.o.z = fold(totals.o.z, o[i].z, f);
    totals.o.w = fold(totals.o.w, o[i].w, f);
  }
}

template <typename T, int kDim>
__device__ __forceinline__ void store_quad(const PrefillArgs& args, int kv_head, int row, int quad,
                                           const SplitTotals& totals) {
  const float scale = inverse(totals.sum);
  const uint2 packed = {pack<T>(finish(totals.o.x, scale), finish(totals.o.y, scale)),
                        pack<T>(finish(totals.o.z, scale), finish(totals.o.w, scale))};
  *reinterpret_cast<uint2*>(out_row<T, kDim>(args, row, kv_head) + 4 * quad) = packed;
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

#endif  // sm_90a

// Grid: blocks of a cluster, KV heads, blocks of rows.
template <typename T, int kDim, int kTeams>
__global__ void __launch_bounds__(kGroups* kGroupThreads, 1)
    prefill_split_kernel(const __grid_constant__ TileMaps maps, const PrefillArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Layout = SplitLayout<kDim, kTeams>;
  extern __shared__ char memory[];
  const uint32_t base = aligned_memory(memory);
  const int thread = threadIdx.x, lane = thread % 32;
  const int team = thread / Layout::kTeamThreads, team_thread = thread % Layout::kTeamThreads;
  const int rank = blockIdx.x, kv_head = blockIdx.y;
  const int block_row = (gridDim.z - 1 - blockIdx.z) * Layout::kRows;
  const int end = LaneRows::position_of(args, block_row + Layout::kRows - 1) + 1;
  const int num_tiles = (end + kAttentionTile - 1) / kAttentionTile;

  const uint32_t k = base + Layout::kTiles + 2 * team * Layout::kTileBytes;
  const uint32_t v = k + Layout::kTileBytes;
  const uint32_t k_full = base + Layout::kBarriers + 16 * team, v_full = k_full + 8;
  if (team_thread == 0) {
    barrier_init(k_full, 1);
    barrier_init(v_full, 1);
    fence_barriers();
  }
  wait_for_predecessor();
  start_successor();
  int tile = rank * kTeams + team;
  if (team_thread == 0 && tile < num_tiles) {
    copy_tile<kDim>(k, maps.k, tile, kv_head, k_full);
    copy_tile<kDim>(v, maps.v, tile, kv_head, v_full);
  }
  load_queries<T, kDim>(args, base + Layout::kQueries, Layout::kQueryPanelBytes, block_row,
                        Layout::kRows, kv_head, thread, Layout::kThreads);
  __syncthreads();

  const int group_row = team_thread / kGroupThreads * kGroupRows;
  const int row = group_row + team_thread % kGroupThreads / 32 * 16 + lane / 4;
  const LaneRows rows(args, block_row + row);
  const int first = LaneRows::position_of(args, block_row + group_row);
  const uint32_t q = base + Layout::kQueries + group_row * kPanelRowBytes;
  const uint32_t state = base + Layout::kStates + team * Layout::kStateBytes;
  const uint32_t row_state = base + Layout::kRowStates + team * Layout::kRows * 8;
  SplitTotals totals[Layout::kItems];
  int parity = 0;
  for (int first_tile = 0; first_tile < num_tiles; first_tile += Layout::kRoundTiles) {
    const bool busy = tile < num_tiles, more = tile + Layout::kRoundTiles < num_tiles;
    RowStates states;
    uint32_t p[kSixteens][4];
    if (busy) {
      float s[kEights][4];
      barrier_wait(k_full, parity);
      begin_multiplying();
      begin_scores<T, kDim>(s, q, Layout::kQueryPanelBytes, k);
      wait_groups<0>();
      pin(s);
      sync_threads(1 + team, Layout::kTeamThreads);
      if (team_thread == 0 && more) {
        copy_tile<kDim>(k, maps.k, tile + Layout::kRoundTiles, kv_head, k_full);
      }
      const int tile_start = tile * kAttentionTile;
      if (tile_start + kAttentionTile - 1 > first) mask_scores(s, rows, tile_start);
      states = weigh_tile<T>(s, p, rows, tile_start, args.c);
      barrier_wait(v_full, parity);
    }
    // The others have read this block's states of the round before.
    if (first_tile > 0) wait_cluster();
    if (busy) {
#pragma unroll
      for (int panel = 0; panel < TileLayout<kDim>::kPanels; ++panel) {
        float o[8][4];
        pin(p);
        begin_multiplying();
        begin_values<T>(o, p, v + panel * TileLayout<kDim>::kPanelBytes);
        wait_groups<0>();
        pin(o);
        store_state<Layout>(state, row, panel, o);
      }
      if (lane % 4 == 0) {
        for (int r = 0; r < 2; ++r) {
          store_shared(row_state + (row + 8 * r) * 8, {states.max[r], states.sum[r]});
        }
      }
      sync_threads(1 + team, Layout::kTeamThreads);
      if (team_thread == 0 && more) {
        copy_tile<kDim>(v, maps.v, tile + Layout::kRoundTiles, kv_head, v_full);
      }
    }
    arrive_cluster();
    wait_cluster();
#pragma unroll
    for (int i = 0; i < Layout::kItems; ++i) {
      const int item = thread + i * Layout::kThreads;
      const int share_row = rank * Layout::kShareRows + item / Layout::kRowQuads;
      if (item >= Layout::kShareRows * Layout::kRowQuads) continue;
      if (block_row + share_row >= args.num_rows) continue;
      fold_round<Layout>(totals[i], base, share_row, item % Layout::kRowQuads,
                         LaneRows::position_of(args, block_row + share_row), first_tile, num_tiles,
                         args.c);
    }
    arrive_cluster();
    tile += Layout::kRoundTiles;
    parity ^= 1;
  }
#pragma unroll
  for (int i = 0; i < Layout::kItems; ++i) {
    const int item = thread + i * Layout::kThreads;
    const int share_row = rank * Layout::kShareRows + item / Layout::kRowQuads;
    if (item >= Layout::kShareRows * Layout::kRowQuads) continue;
    if (block_row + share_row >= args.num_rows) continue;
    store_quad<T, kDim>(args, kv_head, block_row + share_row, item % Layout::kRowQuads, totals[i]);
  }
  wait_cluster();
#else
  __trap();  // prefill_attention_wgmma_supported says no
#endif
}

}  // namespace slotwise::cuda
