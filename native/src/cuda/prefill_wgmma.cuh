// What the two kernels of prefill attention on Hopper share: how q and tiles of K and V come into
// shared memory, and the two products of a warpgroup's 64 rows with a tile.
#pragma once

#include "hopper.cuh"
#include "prefill_attention.cuh"

namespace slotwise::cuda {

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kGroupRows = 64;
constexpr int kGroups = 2;  // that multiply, in a block

// K and V of the slot up to the chunk's last position: copies give zeros beyond.
struct ChunkMaps {
  CUtensorMap k, v;
};

// A tile of K or V in shared memory: panels of 128 positions and 64 columns.
template <int kDim>
struct TileLayout {
  static constexpr int kPanels = kDim / kPanelColumns;
  static constexpr int kPanelBytes = kAttentionTile * kPanelRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;
};

// Panels begin at multiples of this.
constexpr int kPanelAlignment = 1024;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ uint32_t aligned_memory(void* memory) {
  return (shared_address(memory) + kPanelAlignment - 1) / kPanelAlignment * kPanelAlignment;
}

// The warpgroups' turns at the tensor cores.
__device__ __forceinline__ void take_turn(int group) {
  sync_threads(1 + kGroups + group, kGroups * kGroupThreads);
}

__device__ __forceinline__ void pass_turn(int group) {
  arrive_threads(2 * kGroups - group, kGroups * kGroupThreads);
}

// By one thread.
template <int kDim>
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap& map, int tile,
                                          int kv_head, uint32_t barrier) {
  using Tile = TileLayout<kDim>;
  barrier_expect(barrier, Tile::kBytes);
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    copy_panel(to + panel * Tile::kPanelBytes, map, panel * kPanelColumns, tile * kAttentionTile,
               kv_head, barrier);
  }
}

// Packed rows [first_row, first_row + num_rows) of q to panels of `panel_bytes`, zeros past the
// last, by `threads` threads of which this is number `thread`.
template <typename T, int kDim>
__device__ __forceinline__ void load_queries(const PrefillArgs& args, uint32_t to, int panel_bytes,
                                             int first_row, int num_rows, int kv_head, int thread,
                                             int threads) {
  constexpr int kChunks = kDim / 8;
  for (int i = thread; i < num_rows * kChunks; i += threads) {
    const int row = first_row + i / kChunks, chunk = i % kChunks;
    uint4 x{};
    if (row < args.num_rows) {
      x = reinterpret_cast<const uint4*>(query_row<T, kDim>(args, row, kv_head))[chunk];
    }
    store_shared(to + chunk / 8 * panel_bytes + panel_offset(i / kChunks, chunk % 8), x);
  }
  fence_stores();
}

// s = q k^T.
template <typename T, int kDim>
__device__ __forceinline__ void begin_scores(float (&s)[kEights][4], uint32_t q, int q_panel_bytes,
                                             uint32_t k) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const int panel = step / 4, offset = step % 4 * 32;
    multiply_rows<T>(s, matrix_descriptor(q + panel * q_panel_bytes + offset),
                     matrix_descriptor(k + panel * TileLayout<kDim>::kPanelBytes + offset),
                     step > 0);
  }
  end_group();
}

// o = p v for the columns of one panel.
template <typename T>
__device__ __forceinline__ void begin_values(float (&o)[8][4], const uint32_t (&p)[kSixteens][4],
                                             uint32_t panel) {
#pragma unroll
  for (int step = 0; step < kSixteens; ++step) {
    const uint32_t rows = panel + step * 16 * kPanelRowBytes;
    multiply_64<T>(o, p[step], matrix_descriptor(rows), step > 0);
  }
  end_group();
}

#endif  // sm_90a

}  // namespace slotwise::cuda
