// The matrix product of prefill: many tokens, so its time is that of the tensor cores.
//
// A tile is 128 tokens by 128, 192 or 256 weight rows. Two warpgroups multiply, 64 tokens each and
// all weight rows, 16 of K an instruction: each output is one chain of these along K, as in
// `linear`. One thread copies slabs of 64 of K into a ring of stages; a cluster of two blocks has
// the same weight rows for two tiles of tokens, and each block copies half of them for both.
//
// Rounded outputs go through shared memory to three more warps, which store them, or silu(gate) *
// up of them, while the next tile is multiplied.
#include <utility>

#include "dispatch.cuh"
#include "hopper.cuh"
#include "launch.cuh"
#include "linear.cuh"
#include "silu.cuh"
#include "vectors.cuh"

namespace slotwise::cuda {
namespace {

constexpr int kGroups = 2;
constexpr int kGroupThreads = 128;
constexpr int kGroupTokens = 64;
constexpr int kTokens = kGroups * kGroupTokens;  // of a tile
constexpr int kCluster = 2;
constexpr int kThreads = (1 + kGroups) * kGroupThreads;
constexpr int kAlignment = 1024;
constexpr int kSharedBytes = 227 * 1024;

// A block's shared memory: the ring, the rounded outputs, and barriers for both.
template <int kColumns>
struct Layout {
  static constexpr int kTokenBytes = kTokens * kRowBytes;
  static constexpr int kHalfBytes = kColumns / kCluster * kRowBytes;  // of a stage's weights
  static constexpr int kStageBytes = kTokenBytes + kCluster * kHalfBytes;
  static constexpr int kPanelBytes = kGroupTokens * kRowBytes;
  static constexpr int kPanels = kColumns / kPanelColumns;
  static constexpr int kOutBytes = kPanels * kPanelBytes;  // of a group
  static constexpr int kOverhead = kGroups * kOutBytes + 256 + kAlignment;
  static constexpr int kStages = (kSharedBytes - kOverhead) / kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes + kOverhead;

  uint32_t base;

  __device__ uint32_t tokens(int stage) const { return base + stage * kStageBytes; }
  __device__ uint32_t weights(int stage) const { return tokens(stage) + kTokenBytes; }
  __device__ uint32_t out(int group) const { return tokens(kStages) + group * kOutBytes; }
  __device__ uint32_t full(int stage) const { return out(kGroups) + 16 * stage; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8; }
  // A group's outputs lie there; they have been read.
  __device__ uint32_t written(int group) const { return full(kStages) + 16 * group; }
  __device__ uint32_t read(int group) const { return written(group) + 8; }
};

struct Args {
  int num_rows;
  int n;
  int num_slabs;
  int row_pairs;  // of tiles of tokens
  int columns;    // tiles of weight rows
  void* out;
  int64_t out_stride;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kWriters = 3 * 32;
// Pairs of token tiles that are walked before the next weight rows, so that both stay in L2.
constexpr int kBand = 8;

// A cluster's tiles, one after the other.
struct Walk {
  const Args& args;
  int tile = blockIdx.x / kCluster;
  int first_row;  // of the block's tokens
  int column;     // tile of weight rows

  __device__ explicit Walk(const Args& given) : args(given) { place(); }

  __device__ bool left() const { return tile < args.row_pairs * args.columns; }

  __device__ void next() {
    tile += gridDim.x / kCluster;
    place();
  }

  __device__ void place() {
    const int band = tile / (kBand * args.columns);
    const int height = min(kBand, args.row_pairs - band * kBand);
    const int index = tile - band * kBand * args.columns;
    if (height <= 0) return;
    column = index / height;
    first_row = ((band * kBand + index % height) * kCluster + blockIdx.x % kCluster) * kTokens;
  }
};

template <int kColumns>
__device__ __forceinline__ void produce(const CUtensorMap& weight_map, const CUtensorMap& x_map,
                                        const Args& args, const Layout<kColumns>& shared) {
  using L = Layout<kColumns>;
  const int half = blockIdx.x % kCluster;
  const auto ask_weights = [&](int stage, const Walk& walk, int slab) {
    barrier_expect(shared.full(stage), L::kStageBytes);
    copy_box_to_cluster(shared.weights(stage) + half * L::kHalfBytes, weight_map,
                        walk.column * kColumns + half * (kColumns / kCluster), slab,
                        shared.full(stage), (1 << kCluster) - 1);
  };
  const auto ask_tokens = [&](int stage, const Walk& walk, int slab) {
    copy_panel(shared.tokens(stage), x_map, 0, walk.first_row, slab, shared.full(stage));
  };
  Walk walk(args);
  // Only tokens depend on the previous kernel.
  const int ahead = min(L::kStages, args.num_slabs);
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) ask_weights(i, walk, i);
  wait_for_predecessor();
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) ask_tokens(i, walk, i);
  Place<L::kStages> place{ahead % L::kStages, ahead == L::kStages ? 1u : 0u};
  int slab = ahead;
#pragma unroll 1
  for (; walk.left(); walk.next(), slab = 0) {
#pragma unroll 1
    for (; slab < args.num_slabs; ++slab, place.next()) {
      barrier_wait(shared.empty(place.stage), place.parity ^ 1);
      ask_weights(place.stage, walk, slab);
      ask_tokens(place.stage, walk, slab);
    }
  }
  // The other block arrives at this one's barriers until all that was copied is multiplied.
  for (int stage = 0; stage < L::kStages; ++stage, place.next()) {
    barrier_wait(shared.empty(place.stage), place.parity ^ 1);
  }
}

// Rounded, to panels of 64 columns.
template <typename T, int kEights>
__device__ __forceinline__ void round_tile(const float (&c)[kEights][4], uint32_t out,
                                           int panel_bytes) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = 16 * warp + lane % 16;
  const uint32_t to = out + row * kRowBytes;
#pragma unroll
  for (int n = 0; n < kEights; n += 2) {
    const uint32_t pairs[4] = {pack<T>(c[n][0], c[n][1]), pack<T>(c[n][2], c[n][3]),
                               pack<T>(c[n + 1][0], c[n + 1][1]),
                               pack<T>(c[n + 1][2], c[n + 1][3])};
    const int chunk = n % 8 + lane / 16;
    store_matrices(to + n / 8 * panel_bytes + (chunk ^ (row & 7)) * 16, pairs);
  }
}

template <typename T, int kColumns>
__device__ __forceinline__ void multiply_tiles(const Args& args, const Layout<kColumns>& shared,
                                               int group) {
  using L = Layout<kColumns>;
  const int lane = threadIdx.x % 32;
  Place<L::kStages> place;
  uint32_t out_parity = 1;
  uint32_t last_empty = 0;  // of the stage whose products may still run
  const auto release = [&] {
    if (lane < kCluster) barrier_arrive_in_cluster(last_empty, lane);
  };
  for (Walk walk(args); walk.left(); walk.next()) {
    float c[kColumns / 8][4] = {};
    int slabs_left = args.num_slabs;
    // No loop that may run zero times: the compiler would have each product end before the next.
#pragma unroll 1
    do {
      barrier_wait(shared.full(place.stage), place.parity);
      const uint64_t a = matrix_descriptor(shared.tokens(place.stage) + group * L::kPanelBytes);
      const uint64_t b = matrix_descriptor(shared.weights(place.stage));
      begin_multiplying();
#pragma unroll
      for (int k = 0; k < kSlab / 16; ++k) multiply_rows<T>(c, a + 2 * k, b + 2 * k, 1);
      end_group();
      wait_groups<1>();  // those of the stage before are done
      if (last_empty != 0) release();
      last_empty = shared.empty(place.stage);
      place.next();
    } while (--slabs_left > 0);
    wait_groups<0>();
    pin(c);
    release();
    last_empty = 0;
    barrier_wait(shared.read(group), out_parity);
    out_parity ^= 1;
    round_tile<T>(c, shared.out(group), L::kPanelBytes);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.written(group));
  }
}

// silu(gate) * up of four pairs.
template <typename T>
__device__ __forceinline__ uint2 gate(uint4 pairs) {
  const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
  float out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    T pair[2];
    memcpy(pair, &words[i], sizeof(pair));
    out[i] = silu_times(to_float(pair[0]), to_float(pair[1]));
  }
  return {pack<T>(out[0], out[1]), pack<T>(out[2], out[3])};
}

// The outputs of both groups, 16 bytes a thread.
template <typename T, int kColumns, bool kGated>
__device__ __forceinline__ void write_tiles(const Args& args, const Layout<kColumns>& shared) {
  using L = Layout<kColumns>;
  constexpr int kInputs = kGated ? 2 : 1;  // chunks of 8 columns for 8 of out
  constexpr int kChunks = kColumns / 8 / kInputs;
  const int thread = threadIdx.x - 32;
  uint32_t parity = 0;
  for (Walk walk(args); walk.left(); walk.next(), parity ^= 1) {
    const int first_column = walk.column * (kColumns / kInputs);
    for (int group = 0; group < kGroups; ++group) {
      barrier_wait(shared.written(group), parity);
      const int first_row = walk.first_row + group * kGroupTokens;
#pragma unroll 4
      for (int i = thread; i < kGroupTokens * kChunks; i += kWriters) {
        const int row = i / kChunks, chunk = i % kChunks;
        const auto load = [&](int from) {
          return load_shared(shared.out(group) + from / 8 * L::kPanelBytes +
                             panel_offset(row, from % 8));
        };
        uint4 values;
        if constexpr (kGated) {
          const uint2 low = gate<T>(load(2 * chunk)), high = gate<T>(load(2 * chunk + 1));
          values = {low.x, low.y, high.x, high.y};
        } else {
          values = load(chunk);
        }
        const int column = first_column + 8 * chunk;
        if (first_row + row < args.num_rows && column < args.n / kInputs) {
          T* out = static_cast<T*>(args.out) + (first_row + row) * args.out_stride + column;
          *reinterpret_cast<uint4*>(out) = values;
        }
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(shared.read(group));
    }
  }
}

#endif  // sm_90a

template <typename T, int kColumns, bool kGated>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                          const __grid_constant__ CUtensorMap x_map,
                          const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t memory[];
  using L = Layout<kColumns>;
  const L shared{(shared_address(memory) + kAlignment - 1) / kAlignment * kAlignment};
  if (threadIdx.x == 0) {
    prefetch_map(weight_map);
    prefetch_map(x_map);
    for (int stage = 0; stage < L::kStages; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), kCluster * kGroups * 4);
    }
    for (int group = 0; group < kGroups; ++group) {
      barrier_init(shared.written(group), 4);
      barrier_init(shared.read(group), kWriters / 32);
    }
    fence_barriers();
  }
  arrive_cluster_relaxed();
  wait_cluster();
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (warp >= 4) {
    more_registers<208>();
    multiply_tiles<T, kColumns>(args, shared, warp / 4 - 1);
  } else {
    fewer_registers<80>();
    if (warp == 0) {
      if (threadIdx.x == 0) produce<kColumns>(weight_map, x_map, args, shared);
    } else {
      wait_for_predecessor();
      start_successor();
      write_tiles<T, kColumns, kGated>(args, shared);
    }
  }
#else
  __trap();  // linear_supported says no
#endif
}

template <typename T, int kColumns, bool kGated>
void run_tiles(const LinearParams& p, Stream stream) {
  using L = Layout<kColumns>;
  constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  const CUtensorMap weight_map =
      map_matrix(p.weight, p.n, p.k, p.weight_stride, p.dtype, kColumns / kCluster, 1, kPromotion);
  const CUtensorMap x_map =
      map_matrix(p.x, p.num_rows, p.k, p.x_stride, p.dtype, kTokens, 1, kPromotion);
  const Args args{static_cast<int>(p.num_rows),
                  static_cast<int>(p.n),
                  static_cast<int>(p.k / kSlab),
                  ceil_div(p.num_rows, kCluster * kTokens),
                  ceil_div(p.n, kColumns),
                  p.out,
                  p.out_stride};
  const auto kernel = prefill_linear_kernel<T, kColumns, kGated>;
  allow_shared("linear", kernel, L::kBytes);
  const int clusters = std::min(device_info().num_sms / kCluster, args.row_pairs * args.columns);
  launch("linear", kernel,
         {dim3(static_cast<unsigned>(kCluster * clusters)), kThreads, L::kBytes, kCluster}, stream,
         weight_map, x_map, args);
}

template <typename T, int kColumns>
void run_gated(const LinearParams& p, Stream stream) {
  if (p.gated) {
    run_tiles<T, kColumns, true>(p, stream);
  } else {
    run_tiles<T, kColumns, false>(p, stream);
  }
}

// How tiles of some width fill the device.
struct Cut {
  int columns = 0;
  double rounds = 0;  // that clusters make, in times of the widest tile

  // The share of the device that multiplies what is asked for.
  double share(int64_t num_rows, int64_t n, int clusters) const {
    const double tile = kCluster * kTokens * 256.0;
    return static_cast<double>(num_rows) * static_cast<double>(n) / (rounds * clusters * tile);
  }
};

int num_clusters() { return device_info().num_sms / kCluster; }

// The width with which the tiles are done first. Narrow ones take longer for what they do.
Cut best_cut(int64_t num_rows, int64_t n) {
  constexpr std::pair<int, double> kTimes[] = {{256, 1.0}, {192, 0.78}, {128, 0.56}};
  Cut best;
  for (const auto& [columns, time] : kTimes) {
    const int64_t tiles =
        static_cast<int64_t>(ceil_div(num_rows, kCluster * kTokens)) * ceil_div(n, columns);
    const double rounds = ceil_div(tiles, num_clusters()) * time;
    if (best.columns == 0 || rounds < best.rounds) best = {columns, rounds};
  }
  return best;
}

}  // namespace

bool linear_fills(int64_t num_rows, int64_t n) {
  constexpr double kEnough = 0.85;
  return num_rows > 0 && best_cut(num_rows, n).share(num_rows, n, num_clusters()) >= kEnough;
}

void prefill_linear(const LinearParams& params, Stream stream) {
  const int columns = best_cut(params.num_rows, params.n).columns;
  for_dtype(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 2) {
      if (columns == 256) {
        run_gated<T, 256>(params, stream);
      } else if (columns == 192) {
        run_gated<T, 192>(params, stream);
      } else {
        run_gated<T, 128>(params, stream);
      }
    }
  });
}

}  // namespace slotwise::cuda
