// Attention of a chunk's rows over the slot cache by Hopper's matrix instructions.
//
// A block has 128 packed rows of a KV head. One thread copies the tiles into a ring, K of tile 0, V
// of tile 0, K of tile 1 and so on; two warpgroups of 64 rows multiply. The scores of the next tile
// and the values of the last are in the tensor cores together; o is taken by halves to save
// registers.
#include <algorithm>
#include <array>

#include "dispatch.cuh"
#include "prefill_links.cuh"
#include "prefill_split.cuh"
#include "tensor_map.cuh"

namespace slotwise::cuda {
namespace {

// What a ring of links costs, in the time in which a block walks one tile. On an H200 a pair of
// tiles takes 5.3 us, a tile of a block that walks alone 1.6.
constexpr double kPairCost = 3.25;
constexpr double kLinksCost = 1.5;

using ClusterCounts = std::array<int, kMaxCluster + 1>;  // by the blocks of a cluster

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The largest clusters, of at most `most` blocks, of which `num_clusters` run at once; 1 if none.
int choose_cluster(const ClusterCounts& counts, int num_clusters, int most) {
  for (int cluster = std::min(most, kMaxCluster); cluster > 1; --cluster) {
    if (counts[cluster] >= num_clusters) return cluster;
  }
  return 1;
}

constexpr int kBlockRows = kGroups * kGroupRows;
constexpr int kStages = 4;

// The block's shared memory: q, the ring, and two barriers for each of its tiles.
template <int kDim>
struct Ring {
  using Tile = TileLayout<kDim>;
  static constexpr int kQueryBytes = kBlockRows * kDim * 2;
  static constexpr int kBytes =
      kQueryBytes + kStages * Tile::kBytes + 16 * kStages + kPanelAlignment;

  uint32_t base;

  __device__ uint32_t q() const { return base; }
  __device__ uint32_t tile(int stage) const { return base + kQueryBytes + stage * Tile::kBytes; }
  __device__ uint32_t full(int stage) const { return tile(kStages) + 16 * stage; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kDim>
__device__ __forceinline__ void produce(const Ring<kDim>& ring, const ChunkMaps& maps,
                                        int num_tiles, int kv_head) {
  Place<kStages> place;
  for (int step = 0; step < 2 * num_tiles; ++step, place.next()) {
    barrier_wait(ring.empty(place.stage), place.parity ^ 1);
    copy_tile<kDim>(ring.tile(place.stage), step % 2 == 0 ? maps.k : maps.v, step / 2, kv_head,
                    ring.full(place.stage));
  }
}

__device__ __forceinline__ void release(uint32_t barrier) {
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

template <typename T, int kDim>
__device__ __forceinline__ void consume(const Ring<kDim>& ring, const PrefillArgs& args,
                                        int num_tiles, int block_row, int kv_head, int group) {
  using Tile = TileLayout<kDim>;
  const int thread = threadIdx.x % kGroupThreads;
  const int group_row = block_row + kGroupRows * group;
  const uint32_t q = ring.q() + kGroupRows * group * kPanelRowBytes;
  load_queries<T, kDim>(args, q, Tile::kPanelBytes, group_row, kGroupRows, kv_head, thread,
                        kGroupThreads);
  sync_threads(1 + group, kGroupThreads);
  if (group == 1) pass_turn(group);

  const int row = group_row + thread / 32 * 16 + thread % 32 / 4;
  const LaneRows rows(args, row);
  const int first = LaneRows::position_of(args, group_row);
  RowStates totals{{0, 0}, {kNothing, kNothing}};
  TileFactors factors;
  float s[kEights][4], o[8][4], total[kDim / 8][4];
  uint32_t p[kSixteens][4];
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (float& x : total[n]) x = kNothing;
  }
  const auto weigh = [&](int tile) {
    const int tile_start = tile * kAttentionTile;
    const RowStates state = weigh_tile<T>(s, p, rows, tile_start, args.c);
    factors = fold_rows(totals, state, rows, tile_start, args.c);
  };
  const auto mask = [&](int tile) {
    const int tile_start = tile * kAttentionTile;
    if (tile_start + kAttentionTile - 1 > first) mask_scores(s, rows, tile_start);
  };

  Place<kStages> keys, values;
  values.next();
  barrier_wait(ring.full(keys.stage), keys.parity);
  begin_multiplying();
  begin_scores<T, kDim>(s, q, Tile::kPanelBytes, ring.tile(keys.stage));
  wait_groups<0>();
  pin(s);
  release(ring.empty(keys.stage));
  mask(0);
  weigh(0);
  for (int tile = 1; tile < num_tiles; ++tile) {
    keys.next();
    keys.next();
    barrier_wait(ring.full(values.stage), values.parity);
    barrier_wait(ring.full(keys.stage), keys.parity);
    const uint32_t v = ring.tile(values.stage);
    take_turn(group);
    pin(p);
    begin_multiplying();
    begin_values<T>(o, p, v);
    begin_scores<T, kDim>(s, q, Tile::kPanelBytes, ring.tile(keys.stage));
    wait_groups<1>();
    pin(o);
    fold_columns(total, o, factors);
    if constexpr (Tile::kPanels > 1) {
      pin(o);
      begin_multiplying();
      begin_values<T>(o, p, v + Tile::kPanelBytes);
      wait_groups<1>();
    } else {
      wait_groups<0>();
      pass_turn(group);
    }
    pin(s);
    release(ring.empty(keys.stage));
    mask(tile);
    if constexpr (Tile::kPanels > 1) {
      wait_groups<0>();
      pass_turn(group);
      pin(o);
      fold_columns(total + 8, o, factors);
    }
    pin(p);
    release(ring.empty(values.stage));
    weigh(tile);
    values.next();
    values.next();
  }
  barrier_wait(ring.full(values.stage), values.parity);
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    pin(p);
    begin_multiplying();
    begin_values<T>(o, p, ring.tile(values.stage) + panel * Tile::kPanelBytes);
    wait_groups<0>();
    pin(o);
    fold_columns(total + 8 * panel, o, factors);
  }
  store_rows<T, kDim>(args, kv_head, row, total, totals);
}

#endif  // sm_90a

// Grid: KV heads, blocks of rows. The last rows have the most positions and come first.
template <typename T, int kDim>
__global__ void __launch_bounds__(kGroupThreads * (1 + kGroups), 1)
    prefill_wgmma_kernel(const __grid_constant__ ChunkMaps maps, const PrefillArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  const Ring<kDim> ring{aligned_memory(memory)};
  if (threadIdx.x == 0) {
    prefetch_map(maps.k);
    prefetch_map(maps.v);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(ring.full(stage), 1);
      barrier_init(ring.empty(stage), 4 * kGroups);
    }
    fence_barriers();
  }
  wait_for_predecessor();
  start_successor();
  __syncthreads();
  const int kv_head = blockIdx.x;
  const int block_row = (gridDim.y - 1 - blockIdx.y) * kBlockRows;
  const int end = LaneRows::position_of(args, block_row + kBlockRows - 1) + 1;
  const int num_tiles = (end + kAttentionTile - 1) / kAttentionTile;
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads - 1;
  if (group < 0) {
    fewer_registers<24>();
    if (threadIdx.x == 0) produce(ring, maps, num_tiles, kv_head);
  } else {
    more_registers<240>();
    consume<T, kDim>(ring, args, num_tiles, block_row, kv_head, group);
  }
#else
  __trap();  // never launched on other devices
#endif
}

CUtensorMap chunk_map(const void* cache_base, const CacheParams& cache, int64_t num_positions,
                      int64_t slot_offset, int64_t position_stride, int64_t head_stride) {
  const void* const base = static_cast<const char*>(cache_base) + 2 * slot_offset;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(cache.head_dim),
                              static_cast<cuuint64_t>(num_positions),
                              static_cast<cuuint64_t>(cache.num_kv_heads)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(2 * position_stride),
                                static_cast<cuuint64_t>(2 * head_stride)};
  const cuuint32_t box[] = {kPanelColumns, kAttentionTile, 1};
  return map_tensor("prefill_attention", base, cache.dtype, sizes, strides, box,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

// A chunk whose place the host knows.
ChunkMaps chunk_maps(const PrefillArgs& args, const CacheParams& cache) {
  const int num_positions = args.start + args.num_rows / args.group;
  return {chunk_map(args.k, cache, num_positions, args.slot * args.k_slot_stride,
                    args.k_position_stride, args.k_head_stride),
          chunk_map(args.v, cache, num_positions, args.slot * args.v_slot_stride,
                    args.v_position_stride, args.v_head_stride)};
}

template <typename T, int kDim>
void launch_many(const PrefillArgs& args, const CacheParams& cache, Stream stream) {
  const auto kernel = prefill_wgmma_kernel<T, kDim>;
  allow_shared("prefill_attention", kernel, Ring<kDim>::kBytes);
  const dim3 blocks(static_cast<unsigned>(cache.num_kv_heads),
                    (args.num_rows + kBlockRows - 1) / kBlockRows);
  launch("prefill_attention", kernel, {blocks, kGroupThreads * (1 + kGroups), Ring<kDim>::kBytes},
         stream, chunk_maps(args, cache), args);
}

// How many clusters of each size run at once, on the first device; others are taken to be alike.
template <typename T, int kDim, int kTeams>
const ClusterCounts& cluster_counts() {
  static const ClusterCounts counts = [] {
    const auto kernel = prefill_links_kernel<T, kDim, kTeams>;
    allow_shared("prefill_attention", kernel, LinkLayout<kDim, kTeams>::kBytes);
    ClusterCounts found{};
    for (unsigned cluster = 2; cluster <= kMaxCluster; ++cluster) {
      cudaLaunchAttribute attribute{};
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {cluster, 1, 1};
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(cluster);
      config.blockDim = dim3(LinkLayout<kDim, kTeams>::kThreads);
      config.dynamicSmemBytes = LinkLayout<kDim, kTeams>::kBytes;
      config.attrs = &attribute;
      config.numAttrs = 1;
      check(cudaOccupancyMaxActiveClusters(&found[cluster], kernel, &config), "prefill_attention");
    }
    return found;
  }();
  return counts;
}

// False where a ring would not be the faster way; a chunk whose place is on the device may have
// many tiles, and takes one if there is any.
template <typename T, int kDim, int kTeams>
bool launch_links(const PrefillArgs& args, const CacheParams& cache, int num_tiles, Stream stream) {
  using Layout = LinkLayout<kDim, kTeams>;
  const int kv_heads = static_cast<int>(cache.num_kv_heads);
  const int row_blocks = ceil_div(args.num_rows, Layout::kRows);
  const int num_pairs = ceil_div(num_tiles, kPairTiles);
  const int cluster = choose_cluster(cluster_counts<T, kDim, kTeams>(), row_blocks * kv_heads,
                                     ceil_div(num_pairs, kTeams));
  const int rounds = ceil_div(num_pairs, cluster * kTeams);
  if (cluster == 1) return false;
  if (!args.place && rounds * kPairCost + kLinksCost >= num_tiles) return false;
  const auto kernel = prefill_links_kernel<T, kDim, kTeams>;
  allow_shared("prefill_attention", kernel, Layout::kBytes);
  launch("prefill_attention", kernel,
         {dim3(cluster, kv_heads, row_blocks), Layout::kThreads, Layout::kBytes,
          static_cast<unsigned>(cluster)},
         stream, CacheMaps("prefill_attention", cache, kAttentionTile), args);
  return true;
}

// False where there are more tiles than warpgroups, or so few that a block walks them as fast. More
// clusters than fill half of the device might have to wait for each other.
template <typename T, int kDim>
bool launch_split(const PrefillArgs& args, const CacheParams& cache, int num_tiles, Stream stream) {
  using Layout = SplitLayout<kDim>;
  const int kv_heads = static_cast<int>(cache.num_kv_heads);
  constexpr int kFewTiles = 4;
  if (num_tiles <= kFewTiles || num_tiles > kSplitTiles) return false;
  if (2 * kSplitCluster * kv_heads > device_info().num_sms) return false;
  const auto kernel = prefill_split_kernel<T, kDim>;
  allow_shared("prefill_attention", kernel, Layout::kBytes);
  launch("prefill_attention", kernel,
         {dim3(kSplitCluster, kv_heads), Layout::kThreads, Layout::kBytes, kSplitCluster}, stream,
         chunk_maps(args, cache), args);
  return true;
}

template <typename T, int kDim>
bool launch_dim(const PrefillArgs& args, const CacheParams& cache, Stream stream) {
  const bool few = args.num_rows <= kGroupRows;
  if (args.place) {
    const int num_tiles = ceil_div(static_cast<int>(cache.num_positions), kAttentionTile);
    return few ? launch_links<T, kDim, 2>(args, cache, num_tiles, stream)
               : launch_links<T, kDim, 1>(args, cache, num_tiles, stream);
  }
  const int num_tiles = ceil_div(args.start + args.num_rows / args.group, kAttentionTile);
  const bool launched = few ? launch_split<T, kDim>(args, cache, num_tiles, stream) ||
                                  launch_links<T, kDim, 2>(args, cache, num_tiles, stream)
                            : launch_links<T, kDim, 1>(args, cache, num_tiles, stream);
  if (!launched) launch_many<T, kDim>(args, cache, stream);
  return true;
}

}  // namespace

bool prefill_attention_wgmma(const PrefillArgs& args, const CacheParams& cache, Stream stream) {
  if (device_info().major != 9 || (cache.head_dim != 64 && cache.head_dim != 128)) return false;
  bool launched = false;
  for_dtype(cache.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 2) {
      launched = cache.head_dim == 64 ? launch_dim<T, 64>(args, cache, stream)
                                      : launch_dim<T, 128>(args, cache, stream);
    }
  });
  return launched;
}

}  // namespace slotwise::cuda
