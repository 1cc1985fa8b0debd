// Prefill attention of few rows over many tiles on Hopper, where blocks of 128 rows would leave
// most of the device idle: a block has 64 packed rows, and its two multiplying warpgroups take the
// tiles in turn. They leave the tiles' states in shared memory, and a third warpgroup folds them in
// order. All three hold a row's numbers in the same lanes.
#pragma once

#include "prefill_wgmma.cuh"

namespace slotwise::cuda {

// A block's shared memory. K, V, the state and the barriers are of one multiplying warpgroup.
template <int kDim>
struct FewLayout {
  static constexpr int kTileBytes = TileLayout<kDim>::kBytes;
  static constexpr int kQueryPanelBytes = kGroupRows * hopper::kPanelRowBytes;
  static constexpr int kQueryBytes = kGroupRows * kDim * 2;
  static constexpr int kStateBytes = kGroupThreads * (kDim / 8 + 1) * 16;
  static constexpr int kStates = kQueryBytes + 2 * kGroups * kTileBytes;
  static constexpr int kBarriers = kStates + kGroups * kStateBytes;
  static constexpr int kBytes = kBarriers + kGroups * 32 + kPanelAlignment;

  uint32_t base;

  __device__ uint32_t q() const { return base; }
  __device__ uint32_t k(int group) const { return base + kQueryBytes + 2 * group * kTileBytes; }
  __device__ uint32_t v(int group) const { return k(group) + kTileBytes; }

  // Of a thread: four sums to every 8 columns, then the row states.
  __device__ uint32_t sums(int group, int thread) const {
    return base + kStates + group * kStateBytes + thread * 16;
  }
  static constexpr int kSumsStep = kGroupThreads * 16;
  static constexpr int kRowStates = kDim / 8 * kSumsStep;

  __device__ uint32_t k_full(int group) const { return base + kBarriers + 32 * group; }
  __device__ uint32_t v_full(int group) const { return k_full(group) + 8; }
  __device__ uint32_t written(int group) const { return k_full(group) + 16; }
  __device__ uint32_t read(int group) const { return k_full(group) + 24; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kDim>
__device__ __forceinline__ void store_panel(const FewLayout<kDim>& shared, int group, int thread,
                                            int panel, const float (&o)[8][4]) {
  const uint32_t to = shared.sums(group, thread) + panel * 8 * FewLayout<kDim>::kSumsStep;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    hopper::store_sums(to + n * FewLayout<kDim>::kSumsStep, o[n]);
  }
}

template <int kDim>
__device__ __forceinline__ void store_row_states(const FewLayout<kDim>& shared, int group,
                                                 int thread, const RowStates& states) {
  const float packed[4] = {states.max[0], states.sum[0], states.max[1], states.sum[1]};
  hopper::store_sums(shared.sums(group, thread) + FewLayout<kDim>::kRowStates, packed);
}

// A warpgroup that multiplies: tiles group, group + 2, ...
template <typename T, int kDim>
__device__ __forceinline__ void make_states(const FewLayout<kDim>& shared, const TileMaps& maps,
                                            const PrefillArgs& args, int num_tiles, int block_row,
                                            int kv_head, int group) {
  using Tile = TileLayout<kDim>;
  const int thread = threadIdx.x % kGroupThreads;
  const int row = block_row + thread / 32 * 16 + thread % 32 / 4;
  const LaneRows rows(args, row);
  const int first = LaneRows::position_of(args, block_row);
  const uint32_t k = shared.k(group), v = shared.v(group);
  const auto load_k = [&](int tile) {
    if (thread == 0 && tile < num_tiles) {
      copy_tile<kDim>(k, maps.k, tile, kv_head, shared.k_full(group));
    }
  };
  const auto load_v = [&](int tile) {
    if (thread == 0 && tile < num_tiles) {
      copy_tile<kDim>(v, maps.v, tile, kv_head, shared.v_full(group));
    }
  };
  const auto sync = [&] { hopper::sync_threads(1 + group, kGroupThreads); };
  float s[kEights][4], o[8][4];
  uint32_t p[kSixteens][4];
  RowStates states;
  const auto weigh = [&](int tile) {
    const int tile_start = tile * kAttentionTile;
    if (tile_start + kAttentionTile - 1 > first) mask_scores(s, rows, tile_start);
    states = weigh_tile<T>(s, p, rows, tile_start, args.c);
  };
  const auto publish = [&](int panel) {
    store_panel<kDim>(shared, group, thread, panel, o);
    if (panel < Tile::kPanels - 1) return;
    store_row_states<kDim>(shared, group, thread, states);
    __syncwarp();
    if (thread % 32 == 0) hopper::arrive(shared.written(group));
  };

  int tile = group;
  if (tile >= num_tiles) return;
  load_k(tile);
  load_v(tile);
  hopper::wait(shared.k_full(group), 0);
  hopper::fence_wgmma();
  begin_scores<T, kDim>(s, shared.q(), FewLayout<kDim>::kQueryPanelBytes, k);
  hopper::wait_wgmma<0>();
  hopper::pin(s);
  sync();
  load_k(tile + kGroups);
  weigh(tile);
  int parity = 0;
  for (; tile + kGroups < num_tiles; tile += kGroups, parity ^= 1) {
    hopper::wait(shared.v_full(group), parity);
    hopper::wait(shared.k_full(group), parity ^ 1);
    hopper::wait(shared.read(group), parity ^ 1);
    take_turn(group);
    hopper::pin(p);
    hopper::fence_wgmma();
    begin_values<T>(o, p, v);
    begin_scores<T, kDim>(s, shared.q(), FewLayout<kDim>::kQueryPanelBytes, k);
    hopper::wait_wgmma<1>();
    hopper::pin(o);
    publish(0);
    if constexpr (Tile::kPanels > 1) {
      hopper::pin(o);
      hopper::fence_wgmma();
      begin_values<T>(o, p, v + Tile::kPanelBytes);
      hopper::wait_wgmma<0>();
      pass_turn(group);
      hopper::pin(o);
      publish(1);
    } else {
      hopper::wait_wgmma<0>();
      pass_turn(group);
    }
    hopper::pin(s);
    hopper::pin(p);
    sync();
    load_v(tile + kGroups);
    load_k(tile + 2 * kGroups);
    weigh(tile + kGroups);
  }
  hopper::wait(shared.v_full(group), parity);
  hopper::wait(shared.read(group), parity ^ 1);
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    hopper::pin(p);
    hopper::fence_wgmma();
    begin_values<T>(o, p, v + panel * Tile::kPanelBytes);
    hopper::wait_wgmma<0>();
    hopper::pin(o);
    publish(panel);
  }
}

// The warpgroup that folds.
template <typename T, int kDim>
__device__ __forceinline__ void fold_states(const FewLayout<kDim>& shared, const PrefillArgs& args,
                                            int num_tiles, int block_row, int kv_head) {
  const int thread = threadIdx.x % kGroupThreads;
  const int row = block_row + thread / 32 * 16 + thread % 32 / 4;
  const LaneRows rows(args, row);
  RowStates totals{{0, 0}, {kNothing, kNothing}};
  float total[kDim / 8][4];
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (float& x : total[n]) x = kNothing;
  }
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int group = tile % kGroups;
    const uint32_t from = shared.sums(group, thread);
    hopper::wait(shared.written(group), tile / kGroups % 2);
    float packed[4];
    hopper::load_sums(packed, from + FewLayout<kDim>::kRowStates);
    const RowStates states{{packed[0], packed[2]}, {packed[1], packed[3]}};
    const TileFactors factors = fold_rows(totals, states, rows, tile * kAttentionTile, args.c);
#pragma unroll
    for (int part = 0; part < kDim / 64; ++part) {
      float o[8][4];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        hopper::load_sums(o[n], from + (8 * part + n) * FewLayout<kDim>::kSumsStep);
      }
      fold_columns(total + 8 * part, o, factors);
    }
    __syncwarp();
    if (thread % 32 == 0) hopper::arrive(shared.read(group));
  }
  store_rows<T, kDim>(args, kv_head, row, total, totals);
}

#endif  // sm_90a

// Grid: KV heads, blocks of rows.
template <typename T, int kDim>
__global__ void __launch_bounds__((kGroups + 1) * kGroupThreads, 1)
    prefill_few_kernel(const __grid_constant__ TileMaps maps, const PrefillArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  const FewLayout<kDim> shared{aligned_memory(memory)};
  if (threadIdx.x == 0) {
    for (int group = 0; group < kGroups; ++group) {
      hopper::init_barrier(shared.k_full(group), 1);
      hopper::init_barrier(shared.v_full(group), 1);
      hopper::init_barrier(shared.written(group), kGroupThreads / 32);
      hopper::init_barrier(shared.read(group), kGroupThreads / 32);
    }
    hopper::fence_barriers();
  }
  wait_for_predecessor();
  start_successor();
  const int kv_head = blockIdx.x;
  const int block_row = (gridDim.y - 1 - blockIdx.y) * kGroupRows;
  const int end = LaneRows::position_of(args, block_row + kGroupRows - 1) + 1;
  const int num_tiles = (end + kAttentionTile - 1) / kAttentionTile;
  load_queries<T, kDim>(args, shared.q(), FewLayout<kDim>::kQueryPanelBytes, block_row, kGroupRows,
                        kv_head, threadIdx.x, blockDim.x);
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (group == kGroups) {
    fold_states<T, kDim>(shared, args, num_tiles, block_row, kv_head);
  } else {
    if (group == 1) pass_turn(group);
    make_states<T, kDim>(shared, maps, args, num_tiles, block_row, kv_head, group);
  }
#endif
}

}  // namespace slotwise::cuda
