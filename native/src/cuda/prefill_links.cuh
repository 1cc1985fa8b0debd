// Prefill attention of few rows over many tiles on Hopper: a cluster's warpgroups take pairs of
// tiles in turn, and hand the totals of their rows on in the order of the tiles.
//
// They form a ring of links. A link multiplies its pair on its own and keeps both tiles' o in
// registers until the totals come from the link before; folds the two into them; and sends them to
// the link behind it, into an inbox in that block's shared memory. Maxima and sums travel ahead of
// the columns of o, of which some are sent while others are still to come. All of it is between
// single warps, each of which has 16 rows everywhere. A warp folds in its inbox and sends from
// there: what comes into it next depends on what was sent, so nothing is overwritten too early.
#pragma once

#include "prefill_wgmma.cuh"
#include "tensor_map.cuh"

namespace slotwise::cuda {

constexpr int kMaxCluster = 8;  // blocks
constexpr int kPairTiles = 2;

// kTeams: 1 where a block's two warpgroups have 64 rows each of the same tiles, 2 where both have
// the same 64 rows, and each is a link with tiles of its own.
template <int kDim, int kTeams>
struct LinkLayout {
  static constexpr int kThreads = (1 + kGroups) * kGroupThreads;
  static constexpr int kRows = kGroups * kGroupRows / kTeams;  // of the cluster's blocks
  static constexpr int kStages = 4 / kTeams;                   // of a team's ring of tiles
  static constexpr int kChunkEights = 8;                       // of columns that travel together
  static constexpr int kChunks = kDim / (8 * kChunkEights);
  static constexpr int kChunkBytes = kChunkEights * 4 * 4 * 32;  // of a warp
  static constexpr int kStateBytes = 16 * 8;                     // of a warp
  static constexpr int kWarps = 4 * kGroups;                     // that multiply
  static constexpr int kInboxes = kWarps * (1 + kChunks);        // barriers of these

  static constexpr int kTileBytes = TileLayout<kDim>::kBytes;
  static constexpr int kQueryPanelBytes = kGroups * kGroupRows * kPanelRowBytes;
  static constexpr int kQueries = 0;  // offsets
  static constexpr int kTiles = kQueries + kGroups * kGroupRows * kDim * 2;
  static constexpr int kTotals = kTiles + kTeams * kStages * kTileBytes;
  static constexpr int kRowStates = kTotals + kWarps * kChunks * kChunkBytes;
  static constexpr int kRingBarriers = kRowStates + kWarps * kStateBytes;
  static constexpr int kInboxBarriers = kRingBarriers + 16 * kTeams * kStages;
  static constexpr int kBytes = kInboxBarriers + 8 * kInboxes + kPanelAlignment;

  uint32_t base;

  __device__ uint32_t q(int group) const {
    return base + kQueries + group * kGroupRows * kPanelRowBytes;
  }
  __device__ uint32_t tile(int team, int stage) const {
    return base + kTiles + (team * kStages + stage) * kTileBytes;
  }
  __device__ uint32_t full(int team, int stage) const {
    return base + kRingBarriers + 16 * (team * kStages + stage);
  }
  __device__ uint32_t empty(int team, int stage) const { return full(team, stage) + 8; }

  // Of a warp: what comes from the link before.
  __device__ uint32_t row_states(int warp) const { return base + kRowStates + warp * kStateBytes; }
  __device__ uint32_t totals(int warp, int chunk) const {
    return base + kTotals + (warp * kChunks + chunk) * kChunkBytes;
  }
  // Chunk -1: of the states.
  __device__ uint32_t inbox(int warp, int chunk) const {
    return base + kInboxBarriers + 8 * (warp * (1 + kChunks) + 1 + chunk);
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A store to another block's shared memory that its barrier counts, in bytes.
__device__ __forceinline__ void send(uint32_t to, float2 x, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "f"(x.x), "f"(x.y), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ float2 load_shared2(uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

// `bytes` of this block's shared memory, a multiple of 16.
__device__ __forceinline__ void send_bytes(uint32_t to, uint32_t from, int bytes,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// A link's place in the ring, and the one behind it: always in another block, for compute-sanitizer
// takes a bulk copy from a block to itself for an error.
template <int kTeams>
struct Link {
  int number, count;
  int next_block, next_warp;

  __device__ Link(int rank, int cluster, int group, int warp_of_group)
      : number(number_of(rank, cluster, kTeams > 1 ? group : 0)), count(cluster * kTeams) {
    const int next = number + 1 == count ? 0 : number + 1;
    next_block = next % cluster;
    next_warp = 4 * (kTeams > 1 ? next / cluster : group) + warp_of_group;
  }

  __device__ static int number_of(int rank, int cluster, int team) { return team * cluster + rank; }
};

// The tiles of a team's pairs, K and V of one and K and V of the other. Zeros for a tile without
// positions before `end`; a tile that has some comes whole.
template <typename Layout, int kDim>
__device__ __forceinline__ void produce_pairs(const Layout& shared, const CacheMaps& maps,
                                              int num_pairs, int first, int links, int team,
                                              int kv_head, int slot, int end) {
  constexpr int kPastTheCache = 1 << 30;
  Place<Layout::kStages> place;
  for (int pair = first; pair < num_pairs; pair += links) {
    for (int step = 0; step < 2 * kPairTiles; ++step, place.next()) {
      const CUtensorMap& map = step % 2 == 0 ? maps.k : maps.v;
      const int tile_start = (kPairTiles * pair + step / 2) * kAttentionTile;
      const int row = tile_start < end ? tile_start : kPastTheCache;
      const uint32_t barrier = shared.full(team, place.stage);
      barrier_wait(shared.empty(team, place.stage), place.parity ^ 1);
      barrier_expect(barrier, Layout::kTileBytes);
#pragma unroll
      for (int panel = 0; panel < kDim / kPanelColumns; ++panel) {
        copy_panel(shared.tile(team, place.stage) + panel * TileLayout<kDim>::kPanelBytes, map,
                   panel * kPanelColumns, row, kv_head, slot, barrier);
      }
    }
  }
}

__device__ __forceinline__ void release_tile(uint32_t barrier) {
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Zeros in a tile of V from position `end` on, where the cache may hold anything: what no row sees
// has the weight 0, and 0 * NaN is NaN. By a warpgroup; another may do the same.
template <int kDim>
__device__ __forceinline__ void end_values(uint32_t v, int tile_start, int end, int group) {
  if (end <= tile_start || end >= tile_start + kAttentionTile) return;
  constexpr int kRowChunks = kDim / 8;
  for (int i = (end - tile_start) * kRowChunks + threadIdx.x % kGroupThreads;
       i < kAttentionTile * kRowChunks; i += kGroupThreads) {
    const int chunk = i % kRowChunks;
    store_shared(
        v + chunk / 8 * TileLayout<kDim>::kPanelBytes + panel_offset(i / kRowChunks, chunk % 8),
        uint4{});
  }
  fence_stores();
  sync_threads(1 + group, kGroupThreads);
}

// o of a tile, and what it does to the totals.
template <int kDim>
struct TileValues {
  float o[TileLayout<kDim>::kPanels][8][4];
  TileFactors factors;

  // o * b, as `fold` has it.
  __device__ __forceinline__ void scale() {
#pragma unroll
    for (auto& panel : o) {
#pragma unroll
      for (auto& eight : panel) {
#pragma unroll
        for (int i = 0; i < 4; ++i) eight[i] = __fmul_rn(eight[i], factors.b[i / 2]);
      }
    }
  }
  // The rest of `fold`, for four values of eight columns.
  __device__ __forceinline__ void add_to(float4& total, int eight) const {
    const float (&x)[4] = o[eight / 8][eight % 8];
    total.x = __fmaf_rn(total.x, factors.a[0], x[0]);
    total.y = __fmaf_rn(total.y, factors.a[0], x[1]);
    total.z = __fmaf_rn(total.z, factors.a[1], x[2]);
    total.w = __fmaf_rn(total.w, factors.a[1], x[3]);
  }
};

template <typename T, int kDim>
__device__ __forceinline__ void begin_tile_values(TileValues<kDim>& values,
                                                  const uint32_t (&p)[kSixteens][4], uint32_t v) {
#pragma unroll
  for (int panel = 0; panel < TileLayout<kDim>::kPanels; ++panel) {
    begin_values<T>(values.o[panel], p, v + panel * TileLayout<kDim>::kPanelBytes);
  }
}

template <int kDim>
__device__ __forceinline__ void pin(TileValues<kDim>& values) {
#pragma unroll
  for (auto& panel : values.o) pin(panel);
}

// Folds a pair into the totals that come from the link before, and sends them on or stores them.
template <typename T, int kDim, int kTeams>
struct Handover {
  using Layout = LinkLayout<kDim, kTeams>;
  const Layout& shared;
  const PrefillArgs& args;
  const Link<kTeams>& link;
  const LaneRows& rows;
  int kv_head, row, warp, num_pairs;
  uint32_t parity = 0;

  // Until the states (chunk -1) or columns have come; the next ones may come from then on.
  __device__ __forceinline__ void receive(int pair, int chunk) {
    const uint32_t barrier = shared.inbox(warp, chunk);
    barrier_wait(barrier, parity);
    if (threadIdx.x % 32 == 0 && pair + link.count < num_pairs) {
      barrier_expect(barrier, chunk < 0 ? Layout::kStateBytes : Layout::kChunkBytes);
    }
  }

  __device__ __forceinline__ RowStates receive_states(int pair) {
    if (pair == 0) return {{0, 0}, {kNothing, kNothing}};
    receive(pair, -1);
    RowStates totals;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t place = shared.row_states(warp) + (threadIdx.x % 32 / 4 + 8 * r) * 8;
      const float2 state = load_shared2(place);
      totals.max[r] = state.x;
      totals.sum[r] = state.y;
    }
    __syncwarp();  // all lanes have read before one of them sends
    return totals;
  }

  __device__ __forceinline__ void send_states(const RowStates& totals) {
    if (threadIdx.x % 4 != 0) return;
    const uint32_t barrier = in_cluster(shared.inbox(link.next_warp, -1), link.next_block);
    const uint32_t to = in_cluster(shared.row_states(link.next_warp), link.next_block);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      send(to + (threadIdx.x % 32 / 4 + 8 * r) * 8, make_float2(totals.max[r], totals.sum[r]),
           barrier);
    }
  }

  // Where the lane's first columns of its two rows go; null past the last row.
  __device__ __forceinline__ void find_out(T* (&out)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      T* const to = out_row<T, kDim>(args, row + 8 * r, kv_head) + 2 * (threadIdx.x % 4);
      out[r] = row + 8 * r < args.num_rows ? to : nullptr;
    }
  }

  // The totals of some columns so far, four values of the lane for each eight.
  __device__ __forceinline__ void receive_totals(float4 (&totals)[Layout::kChunkEights], int pair,
                                                 int chunk) {
    if (pair > 0) receive(pair, chunk);
#pragma unroll
    for (int i = 0; i < Layout::kChunkEights; ++i) {
      totals[i] = make_float4(kNothing, kNothing, kNothing, kNothing);
      if (pair == 0) continue;
      const uint4 x = load_shared(lane_totals(chunk, i));
      totals[i] = make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                              __uint_as_float(x.w));
    }
  }

  __device__ __forceinline__ void send_totals(const float4 (&totals)[Layout::kChunkEights],
                                              int chunk) {
#pragma unroll
    for (int i = 0; i < Layout::kChunkEights; ++i) {
      store_shared(lane_totals(chunk, i),
                   make_uint4(__float_as_uint(totals[i].x), __float_as_uint(totals[i].y),
                              __float_as_uint(totals[i].z), __float_as_uint(totals[i].w)));
    }
    fence_stores();
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    send_bytes(in_cluster(shared.totals(link.next_warp, chunk), link.next_block),
               shared.totals(warp, chunk), Layout::kChunkBytes,
               in_cluster(shared.inbox(link.next_warp, chunk), link.next_block));
  }

  __device__ __forceinline__ uint32_t lane_totals(int chunk, int i) const {
    return shared.totals(warp, chunk) + i * 512 + threadIdx.x % 32 * 16;
  }

  __device__ __forceinline__ void store(T* const (&out)[2], const float (&scale)[2],
                                        const float4& total, int eight) const {
    const uint32_t packed[] = {pack<T>(finish(total.x, scale[0]), finish(total.y, scale[0])),
                               pack<T>(finish(total.z, scale[1]), finish(total.w, scale[1]))};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (out[r]) *reinterpret_cast<uint32_t*>(out[r] + 8 * eight) = packed[r];
    }
  }

  __device__ __forceinline__ void pass_on(int pair, TileValues<kDim>& first,
                                          TileValues<kDim>& second, const RowStates (&states)[2]) {
    const int tile_start = kPairTiles * pair * kAttentionTile;
    const bool last = pair + 1 == num_pairs;
    RowStates state = receive_states(pair);
    first.factors = fold_rows(state, states[0], rows, tile_start, args.c);
    second.factors = fold_rows(state, states[1], rows, tile_start + kAttentionTile, args.c);
    if (!last) send_states(state);
    first.scale();
    second.scale();
    const float scale[] = {inverse(state.sum[0]), inverse(state.sum[1])};
    T* out[2] = {};
    if (last) find_out(out);
#pragma unroll
    for (int chunk = 0; chunk < Layout::kChunks; ++chunk) {
      float4 totals[Layout::kChunkEights];
      receive_totals(totals, pair, chunk);
#pragma unroll
      for (int i = 0; i < Layout::kChunkEights; ++i) {
        const int eight = chunk * Layout::kChunkEights + i;
        first.add_to(totals[i], eight);
        second.add_to(totals[i], eight);
        if (last) store(out, scale, totals[i], eight);
      }
      if (!last) send_totals(totals, chunk);
    }
    if (pair > 0) parity ^= 1;
  }
};

// A warpgroup. Past the last tile of an odd number is one more, of which no row sees anything.
template <typename T, int kDim, int kTeams>
__device__ __forceinline__ void consume_pairs(const LinkLayout<kDim, kTeams>& shared,
                                              const PrefillArgs& args, int num_pairs, int end,
                                              int block_row, int kv_head, int group) {
  using Layout = LinkLayout<kDim, kTeams>;
  const int thread = threadIdx.x % kGroupThreads, warp_of_group = thread / 32;
  const int team = kTeams > 1 ? group : 0;
  const int group_row = block_row + (kTeams > 1 ? 0 : kGroupRows * group);
  const uint32_t q = shared.q(group);
  load_queries<T, kDim>(args, q, Layout::kQueryPanelBytes, group_row, kGroupRows, kv_head, thread,
                        kGroupThreads);
  sync_threads(1 + group, kGroupThreads);

  const int row = group_row + warp_of_group * 16 + thread % 32 / 4;
  const LaneRows rows(args, row);
  const int first_position = LaneRows::position_of(args, group_row);
  const Link<kTeams> link(blockIdx.x, gridDim.x, group, warp_of_group);
  Handover<T, kDim, kTeams> handover{
      shared, args, link, rows, kv_head, row, 4 * group + warp_of_group, num_pairs};
  float s[kEights][4];
  uint32_t p[kSixteens][4];
  TileValues<kDim> first, second;
  RowStates states[kPairTiles];
  Place<Layout::kStages> place;
  const auto await_tile = [&] {
    barrier_wait(shared.full(team, place.stage), place.parity);
    const int stage = place.stage;
    place.next();
    return stage;
  };
  const auto weigh = [&](int tile) {
    const int tile_start = tile * kAttentionTile;
    if (tile_start + kAttentionTile - 1 > first_position) mask_scores(s, rows, tile_start);
    return weigh_tile<T>(s, p, rows, tile_start, args.c);
  };
  int k = 0;
  const auto begin = [&] {
    k = await_tile();
    begin_multiplying();
    begin_scores<T, kDim>(s, q, Layout::kQueryPanelBytes, shared.tile(team, k));
  };
  for (int pair = link.number; pair < num_pairs; pair += link.count) {
    begin();
    wait_groups<0>();
    pin(s);
    release_tile(shared.empty(team, k));
    states[0] = weigh(kPairTiles * pair);

    int v = await_tile();
    k = await_tile();
    end_values<kDim>(shared.tile(team, v), kPairTiles * pair * kAttentionTile, end, group);
    pin(p);
    begin_multiplying();
    begin_tile_values<T>(first, p, shared.tile(team, v));
    begin_scores<T, kDim>(s, q, Layout::kQueryPanelBytes, shared.tile(team, k));
    wait_groups<1>();
    release_tile(shared.empty(team, v));
    wait_groups<0>();
    pin(first);
    pin(p);
    pin(s);
    release_tile(shared.empty(team, k));
    states[1] = weigh(kPairTiles * pair + 1);

    v = await_tile();
    end_values<kDim>(shared.tile(team, v), (kPairTiles * pair + 1) * kAttentionTile, end, group);
    pin(p);
    begin_multiplying();
    begin_tile_values<T>(second, p, shared.tile(team, v));
    wait_groups<0>();
    pin(second);
    pin(p);
    release_tile(shared.empty(team, v));
    handover.pass_on(pair, first, second, states);
  }
}

#endif  // sm_90a

// Grid: blocks of a cluster, KV heads, blocks of rows.
template <typename T, int kDim, int kTeams>
__global__ void __launch_bounds__((1 + kGroups) * kGroupThreads, 1)
    prefill_links_kernel(const __grid_constant__ CacheMaps maps, const PrefillArgs launched) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Layout = LinkLayout<kDim, kTeams>;
  extern __shared__ char memory[];
  const Layout shared{aligned_memory(memory)};
  const int thread = threadIdx.x, group = thread / kGroupThreads - 1;
  if (thread < kTeams * Layout::kStages) {
    barrier_init(shared.full(0, thread), 1);
    barrier_init(shared.empty(0, thread), 4 * kGroups / kTeams);
  }
  const int chunk = thread % (1 + Layout::kChunks) - 1;
  const uint32_t inbox = shared.inbox(thread / (1 + Layout::kChunks), chunk);
  if (thread < Layout::kInboxes) barrier_init(inbox, 1);
  fence_barriers();
  __syncthreads();
  if (thread < Layout::kInboxes) {
    barrier_expect(inbox, chunk < 0 ? Layout::kStateBytes : Layout::kChunkBytes);
  }
  arrive_cluster_relaxed();
  wait_for_predecessor();
  start_successor();
  wait_cluster();
  const PrefillArgs args = placed(launched);
  const int rank = blockIdx.x, kv_head = blockIdx.y;
  const int block_row = (gridDim.z - 1 - blockIdx.z) * Layout::kRows;
  if (block_row >= args.num_rows) return;  // the whole cluster
  const int end = LaneRows::position_of(args, block_row + Layout::kRows - 1) + 1;
  constexpr int kPairPositions = kPairTiles * kAttentionTile;
  const int num_pairs = (end + kPairPositions - 1) / kPairPositions;
  if (group < 0) {
    fewer_registers<24>();
    const int team = thread / 32;
    if (thread % 32 == 0 && team < kTeams) {
      const int first = Link<kTeams>::number_of(rank, gridDim.x, team);
      produce_pairs<Layout, kDim>(shared, maps, num_pairs, first, gridDim.x * kTeams, team, kv_head,
                                  args.slot, end);
    }
  } else {
    more_registers<240>();
    consume_pairs<T, kDim, kTeams>(shared, args, num_pairs, end, block_row, kv_head, group);
  }
  // No block ends while others may send to it.
  arrive_cluster_relaxed();
  wait_cluster();
#else
  __trap();  // never launched on other devices
#endif
}

}  // namespace slotwise::cuda
