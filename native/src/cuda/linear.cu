// The matrix product of decode and of short turns: up to 64 tokens, so its time is that of reading
// the weight once.
//
// A block owns tiles of `rows` weight rows and walks K through them once, a step of `slabs` slabs
// of 64 at a time. One thread streams weights and tokens into a ring of stages in shared memory;
// warpgroups multiply, 64 weight rows (A) by 8 to 64 tokens (B) by 16 of K an instruction. Each
// output is one chain of these along K; nothing about it depends on the other tokens or rows.
//
// The weights of the first stages are asked for before the previous kernel has ended: only tokens
// depend on it. With up to 16 tokens a block keeps to half of an SM's shared memory, so that it
// fits beside one of the previous kernel. With more, whose rows fill a stage as much as the weights
// do, twice as many stages are worth more than that.
#include <algorithm>

#include "hopper.cuh"
#include "launch.cuh"
#include "linear.cuh"
#include "silu.cuh"

namespace slotwise::cuda {
namespace {

constexpr int kWgmmaRows = 64;  // weight rows an instruction multiplies
constexpr int kMinRows = 16;    // of a tile
constexpr int kMaxGroups = 3;   // warpgroups that multiply, 64 rows each
constexpr int kGroupThreads = 128;
constexpr int kMaxStages = 32;
constexpr int kBarrierBytes = 16;  // of a stage: full and empty
constexpr int kFewTokens = 16;
constexpr int kFewBudget = 108 * 1024;  // of shared memory
constexpr int kBudget = 208 * 1024;
// Of a step, at least, where K is long enough: of weights with few tokens, else of both.
constexpr int kFewStepBytes = 8 * 1024;
constexpr int kStepBytes = 24 * 1024;

// How a product is cut: from N, K and the device alone, but for the ring's depth.
struct Plan {
  int tokens;  // 8, 16, 32 or 64, T rounded up
  int rows;    // of a tile, a multiple of 8
  int num_tiles;
  int tiles_per_block;
  int slabs;  // of a step
  int steps;  // of a tile
  int stages = 0;
  int weight_bytes = 0;  // of a stage
  int x_bytes = 0;
  int ring_bytes = 0;  // of all stages
  int groups = 0;

  int blocks() const { return ceil_div(num_tiles, tiles_per_block); }
  int threads() const { return groups * kGroupThreads + 32; }
  size_t shared_bytes() const { return static_cast<size_t>(ring_bytes + stages * kBarrierBytes); }
};

// Tiles of `rows` in steps of `slabs`.
Plan cut(int tokens, int rows, int tiles_per_block, int slabs, int64_t n, int64_t k) {
  Plan plan{tokens, rows, ceil_div(n, rows), tiles_per_block, slabs, ceil_div(k, slabs * kSlab)};
  plan.weight_bytes = rows * slabs * kRowBytes;
  plan.x_bytes = tokens * slabs * kRowBytes;
  const int budget = tokens <= kFewTokens ? kFewBudget : kBudget;
  plan.stages = std::min(
      {budget / (plan.weight_bytes + plan.x_bytes), kMaxStages, plan.steps * tiles_per_block});
  plan.groups = ceil_div(rows, kWgmmaRows);
  // Instructions read whole groups of 64 rows; what they read after the last weights is not used.
  const int unused = (plan.groups * kWgmmaRows - rows) * kRowBytes;
  plan.ring_bytes = plan.stages * plan.weight_bytes + std::max(plan.stages * plan.x_bytes, unused);
  return plan;
}

int step_slabs(int tokens, int rows) {
  if (tokens <= kFewTokens) return ceil_div(kFewStepBytes, rows * kRowBytes);
  return ceil_div(kStepBytes, (rows + tokens) * kRowBytes);
}

// All SMs get the same number of tiles, in the fewest rounds. Where N has not even kMinRows for
// each SM, fewer blocks are faster: all of them read x.
Plan make_plan(int64_t num_rows, int64_t n, int64_t k, int num_sms) {
  const int64_t groups = n / 8;
  const int tiles_per_block = ceil_div(groups, num_sms * kMaxGroups * (kWgmmaRows / 8));
  const int rows = std::max(kMinRows, 8 * ceil_div(groups, num_sms * tiles_per_block));
  const int tokens = num_rows <= 8 ? 8 : num_rows <= 16 ? 16 : num_rows <= 32 ? 32 : 64;
  const int slabs = std::min(ceil_div(k, kSlab), step_slabs(tokens, rows));
  return cut(tokens, rows, tiles_per_block, slabs, n, k);
}

// What a kernel is given besides the tensor maps.
struct Args {
  Plan plan;
  int num_rows;
  int n;
  int num_slabs;
  void* out;
  int64_t out_stride;
  bool float32_out;
  bool gated;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The ring in shared memory: weights of all stages, tokens of all stages, barriers.
class Ring {
 public:
  __device__ Ring(const Plan& plan, uint32_t base)
      : num_stages_(plan.stages),
        weight_bytes_(plan.weight_bytes),
        x_bytes_(plan.x_bytes),
        weights_(base),
        x_(base + plan.stages * plan.weight_bytes),
        barriers_(base + plan.ring_bytes) {}

  __device__ uint32_t weights() const { return weights_ + stage_ * weight_bytes_; }
  __device__ uint32_t x() const { return x_ + stage_ * x_bytes_; }
  __device__ uint32_t full() const { return barriers_ + kBarrierBytes * stage_; }
  __device__ uint32_t empty() const { return full() + 8; }
  __device__ uint32_t parity() const { return parity_; }
  __device__ int stage_bytes() const { return weight_bytes_ + x_bytes_; }

  __device__ void advance() {
    if (++stage_ == num_stages_) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  __device__ void init_barriers(int num_consumer_warps) const {
#pragma unroll 1
    for (int i = 0; i < num_stages_; ++i) {
      barrier_init(barriers_ + kBarrierBytes * i, 1);
      barrier_init(barriers_ + kBarrierBytes * i + 8, num_consumer_warps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

 private:
  int num_stages_;
  int weight_bytes_;
  int x_bytes_;
  uint32_t weights_;
  uint32_t x_;
  uint32_t barriers_;
  int stage_ = 0;
  uint32_t parity_ = 0;
};

// The steps of a block's tiles, one after the other.
struct Steps {
  int tile;
  int left;
  int num_steps;
  int step = 0;

  __device__ Steps(const Plan& plan)
      : tile(blockIdx.x * plan.tiles_per_block),
        left(plan.steps * min(plan.tiles_per_block, plan.num_tiles - tile)),
        num_steps(plan.steps) {}

  __device__ void next_tile() {
    left -= num_steps;
    ++tile;
  }

  __device__ void advance() {
    --left;
    if (++step == num_steps) {
      step = 0;
      ++tile;
    }
  }
};

__device__ __forceinline__ void produce(const CUtensorMap& weight_map, const CUtensorMap& x_map,
                                        const Args& args, Ring ring) {
  const Plan& plan = args.plan;
  const uint64_t once = evict_first();
  const uint64_t often = evict_last();
  const auto ask_weights = [&](const Ring& at, const Steps& steps) {
    barrier_expect(at.full(), at.stage_bytes());
    copy_box(at.weights(), weight_map, steps.tile * plan.rows, steps.step * plan.slabs, at.full(),
             once);
  };
  const auto ask_x = [&](const Ring& at, const Steps& steps) {
    copy_box(at.x(), x_map, 0, steps.step * plan.slabs, at.full(), often);
  };

  Ring ahead = ring;
  Steps steps_ahead(plan);
  const int num_ahead = min(plan.stages, steps_ahead.left);
#pragma unroll 1
  for (int i = 0; i < num_ahead; ++i) {
    ask_weights(ahead, steps_ahead);
    ahead.advance();
    steps_ahead.advance();
  }
  prefetch_map(x_map);
  wait_for_predecessor();
  Steps steps(plan);
#pragma unroll 1
  for (int i = 0; i < num_ahead; ++i) {
    ask_x(ring, steps);
    ring.advance();
    steps.advance();
  }
#pragma unroll 1
  while (steps.left > 0) {
    barrier_wait(ring.empty(), ring.parity() ^ 1);
    ask_weights(ring, steps);
    ask_x(ring, steps);
    ring.advance();
    steps.advance();
  }
}

template <typename T>
__device__ __forceinline__ void store_pair(const Args& args, int64_t token, int64_t n, float first,
                                           float second) {
  const int64_t start = token * args.out_stride;
  if (args.float32_out) {
    float* out = static_cast<float*>(args.out) + start + n;
    out[0] = first;
    out[1] = second;
    return;
  }
  T* out = static_cast<T*>(args.out) + start;
  const T rounded[2] = {T(first), T(second)};
  if (args.gated) {
    out[n / 2] = T(silu_times(float(rounded[0]), float(rounded[1])));
  } else {
    out[n] = rounded[0];
    out[n + 1] = rounded[1];
  }
}

// Thread (g, q) of a warp, lane 4 g + q, holds rows g and g + 8 of the warp's 16 weight rows, of
// each tokens 2 q and 2 q + 1. Threads of rows 2 i and 2 i + 1 exchange, so that each has both rows
// of one token.
template <typename T, int kTokens>
__device__ __forceinline__ void store_tile(const Args& args, int tile, int group,
                                           const float (&c)[kTokens / 2]) {
  const int lane = threadIdx.x % 32;
  const int odd = lane / 4 % 2;
#pragma unroll
  for (int i = 0; i < kTokens / 2; i += 2) {
    const float received = __shfl_xor_sync(0xffffffff, odd ? c[i] : c[i + 1], 4);
    const int row = group * kWgmmaRows + threadIdx.x / 32 % 4 * 16 + i / 2 % 2 * 8 + lane / 8 * 2;
    const int64_t n = static_cast<int64_t>(tile) * args.plan.rows + row;
    const int token = i / 4 * 8 + lane % 4 * 2 + odd;
    if (token < args.num_rows && row < args.plan.rows && n < args.n) {
      store_pair<T>(args, token, n, odd ? received : c[i], odd ? c[i + 1] : received);
    }
  }
}

// One of the block's warpgroups: 64 rows of each tile.
template <typename T, int kTokens>
__device__ __forceinline__ void consume(const Args& args, Ring ring, int group) {
  const Plan& plan = args.plan;
  const uint32_t group_offset = group * kWgmmaRows * kRowBytes;
  const uint32_t slab_step = plan.rows * kRowBytes >> 4;  // of the descriptors
  uint32_t last_empty = 0;  // of the stage whose products may still run
  for (Steps steps(plan); steps.left > 0; steps.next_tile()) {
    float c[kTokens / 2] = {};
    int slabs_left = args.num_slabs;
    // No loops that may run zero times: the compiler would have each product end before the next.
#pragma unroll 1
    do {
      barrier_wait(ring.full(), ring.parity());
      uint64_t a = matrix_descriptor(ring.weights() + group_offset);
      uint64_t b = matrix_descriptor(ring.x());
      int slabs = min(plan.slabs, slabs_left);
      slabs_left -= slabs;
#pragma unroll 1
      do {
        begin_multiplying();
#pragma unroll
        for (int k = 0; k < kSlab / 16; ++k) multiply<T>(c, a + 2 * k, b + 2 * k);
        end_group();
        wait_groups<1>();  // those of the stage before are done
        a += slab_step;
        b += kTokens * kRowBytes >> 4;
        if (last_empty != 0) {
          if (threadIdx.x % 32 == 0) barrier_arrive(last_empty);
          last_empty = 0;
        }
      } while (--slabs > 0);
      last_empty = ring.empty();
      ring.advance();
    } while (slabs_left > 0);
    wait_groups<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(last_empty);
    last_empty = 0;
    store_tile<T, kTokens>(args, steps.tile, group, c);
  }
}

#endif  // sm_90a

template <typename T, int kTokens>
__global__ void __launch_bounds__(kMaxGroups* kGroupThreads + 32)
    linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                  const __grid_constant__ CUtensorMap x_map, const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  start_successor();
  const Ring ring(args.plan, shared_address(shared));
  const int num_groups = args.plan.groups;
  if (threadIdx.x == 0) ring.init_barriers(num_groups * (kGroupThreads / 32));
  __syncthreads();
  const int group = __shfl_sync(0xffffffff, threadIdx.x / kGroupThreads, 0);
  if (group < num_groups) {
    wait_for_predecessor();
    consume<T, kTokens>(args, ring, group);
  } else if (threadIdx.x % 32 == 0) {
    produce(weight_map, x_map, args, ring);
  }
#else
  __trap();  // linear_supported says no
#endif
}

using Kernel = void(const CUtensorMap, const CUtensorMap, const Args);

template <typename T>
Kernel* kernel_of(int tokens) {
  if (tokens == 8) return linear_kernel<T, 8>;
  if (tokens == 16) return linear_kernel<T, 16>;
  return tokens == 32 ? linear_kernel<T, 32> : linear_kernel<T, 64>;
}

void run_plan(const LinearParams& params, const Plan& plan, Stream stream) {
  constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const CUtensorMap weight_map = map_matrix(params.weight, params.n, params.k, params.weight_stride,
                                            params.dtype, plan.rows, plan.slabs, kPromotion);
  const CUtensorMap x_map = map_matrix(params.x, params.num_rows, params.k, params.x_stride,
                                       params.dtype, plan.tokens, plan.slabs, kPromotion);
  const Args args{plan,
                  static_cast<int>(params.num_rows),
                  static_cast<int>(params.n),
                  static_cast<int>(params.k / kSlab),
                  params.out,
                  params.out_stride,
                  params.float32_out,
                  params.gated};
  Kernel* kernel = params.dtype == DType::kBFloat16 ? kernel_of<__nv_bfloat16>(plan.tokens)
                                                    : kernel_of<__half>(plan.tokens);
  const size_t shared_bytes = plan.shared_bytes();
  allow_shared("linear", kernel, shared_bytes);
  const Grid grid{dim3(static_cast<unsigned>(plan.blocks())), plan.threads(), shared_bytes};
  launch("linear", kernel, grid, stream, weight_map, x_map, args);
}

}  // namespace

bool linear_supported(int64_t num_rows, int64_t n, int64_t k, DType dtype) {
  const int64_t outputs = num_rows <= kStreamedRows ? 8 : 16;  // of a row that are stored at once
  return device_info().major == 9 && dtype != DType::kFloat32 && n > 0 && n % outputs == 0 &&
         k > 0 && k % kSlab == 0;
}

void linear(const LinearParams& params, Stream stream) {
  if (!linear_supported(params.num_rows, params.n, params.k, params.dtype)) {
    throw std::invalid_argument("linear: not a size, type or device it supports");
  }
  if (params.num_rows == 0) return;
  if (params.num_rows > kStreamedRows) return prefill_linear(params, stream);
  const Plan plan = make_plan(params.num_rows, params.n, params.k, device_info().num_sms);
  run_plan(params, plan, stream);
}

}  // namespace slotwise::cuda
