// Attention of a chunk's rows over the slot cache, for every GPU from compute capability 8.0 on.
//
// A block takes up to 128 packed rows of a KV head, 16 to a warp, and walks the tiles of positions
// in order. K and V of the tiles pass through a ring of tiles in shared memory: K of tile 0, V of
// tile 0, K of tile 1 and so on.
#include "attention_float32.cuh"
#include "dispatch.cuh"
#include "mma.cuh"
#include "prefill_attention.cuh"

namespace slotwise::cuda {
namespace {

constexpr int kMaxWarps = 8;
constexpr int kMinWarps = 2;
constexpr int kChunk = 8;  // elements to a copy of 16 bytes

// The block's packed rows of q, zeros past the last.
template <typename T, int kDim>
__device__ __forceinline__ void load_queries(const PrefillArgs& args, T* to, int first_row,
                                             int num_rows, int kv_head) {
  constexpr int kChunks = kDim / kChunk;
  for (int i = threadIdx.x; i < num_rows * kChunks; i += blockDim.x) {
    const int row = first_row + i / kChunks, chunk = i % kChunks;
    const T* from = query_row<T, kDim>(args, min(row, args.num_rows - 1), kv_head) + chunk * kChunk;
    copy_async(to + chunk_offset<kDim>(i / kChunks, chunk), from, row < args.num_rows);
  }
}

// Positions [tile_start, tile_start + 128) of one head, zeros from `end` on.
template <typename T, int kDim>
__device__ __forceinline__ void load_tile(T* to, const T* head, int64_t position_stride,
                                          int tile_start, int end) {
  constexpr int kChunks = kDim / kChunk;
#pragma unroll 2
  for (int i = threadIdx.x; i < kAttentionTile * kChunks; i += blockDim.x) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int position = min(tile_start + row, end - 1);
    copy_async(to + chunk_offset<kDim>(row, chunk),
               head + position * position_stride + chunk * kChunk, tile_start + row < end);
  }
}

// Where a lane reads 8 x 8 matrices: of rows of shared memory at row `row`, and chunk `chunk` of
// these. Offsets known to the compiler then cost nothing.
template <int kDim>
struct MatrixRow {
  static constexpr int kTurns = kDim % 64 == 0 ? 8 : 4;
  uint32_t address;
  int turn;

  __device__ MatrixRow(const void* tile, int row, int chunk)
      : address(shared_address(tile) + row * kDim * 2),
        turn(chunk ^ chunk_offset<kDim>(row, 0) % kDim / kChunk) {}

  // `rows` further down, a multiple of 8, and `chunks` to the right, an even number.
  __device__ __forceinline__ uint32_t at(int rows, int chunks) const {
    return address + (rows * kDim + chunks / kTurns * kTurns * kChunk) * 2 +
           (chunks % kTurns ^ turn) * kChunk * 2;
  }
};

// s = q k^T of the warp's 16 rows.
template <typename T, int kDim>
__device__ __forceinline__ void score_tile(float (&s)[kEights][4], const T* q, const T* k,
                                           int lane) {
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (float& x : s[n]) x = 0;
  }
  const int in_eight = lane & 7, second = lane >> 3 & 1, third = lane >> 4;
  const MatrixRow<kDim> q_row(q, 8 * second + in_eight, third);
  const MatrixRow<kDim> k_row(k, 8 * third + in_eight, second);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t a[4];
    load_matrices(a, q_row.at(0, 2 * step));
#pragma unroll
    for (int pair = 0; pair < kEights / 2; ++pair) {
      uint32_t b[4];
      load_matrices(b, k_row.at(16 * pair, 2 * step));
      multiply_add<T>(s[2 * pair], a, b[0], b[1]);
      multiply_add<T>(s[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

// Folds o = p v into the totals, some columns at a time to save registers.
template <typename T, int kDim>
__device__ __forceinline__ void add_values(float (&totals)[kDim / 8][4],
                                           const uint32_t (&p)[kSixteens][4],
                                           const TileFactors& factors, const T* v, int lane) {
  constexpr int kColumns = kDim == 96 ? 48 : 64;
  const int in_eight = lane & 7, second = lane >> 3 & 1, third = lane >> 4;
  const MatrixRow<kDim> v_row(v, 8 * second + in_eight, third);
#pragma unroll
  for (int column = 0; column < kDim; column += kColumns) {
    float o[kColumns / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kSixteens; ++step) {
#pragma unroll
      for (int pair = 0; pair < kColumns / 16; ++pair) {
        uint32_t b[4];
        load_transposed(b, v_row.at(16 * step, column / 8 + 2 * pair));
        multiply_add<T>(o[2 * pair], p[step], b[0], b[1]);
        multiply_add<T>(o[2 * pair + 1], p[step], b[2], b[3]);
      }
    }
    fold_columns(totals + column / 8, o, factors);
  }
}

// Grid: KV heads, blocks of rows. The last rows have the most positions and come first.
template <typename T, int kDim, int kStages>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) prefill_kernel(const PrefillArgs launched) {
  extern __shared__ __align__(128) char shared[];
  wait_for_predecessor();
  start_successor();
  const PrefillArgs args = placed(launched);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int block_rows = blockDim.x / 2, kv_head = blockIdx.x;
  const int block_row = (gridDim.y - 1 - blockIdx.y) * block_rows;
  if (block_row >= args.num_rows) return;
  const int end = LaneRows::position_of(args, block_row + block_rows - 1) + 1;
  const int num_tiles = (end + kAttentionTile - 1) / kAttentionTile;

  T* const ring = reinterpret_cast<T*>(shared);
  T* const q = ring + kStages * kAttentionTile * kDim;
  const T* const k =
      static_cast<const T*>(args.k) + args.slot * args.k_slot_stride + kv_head * args.k_head_stride;
  const T* const v =
      static_cast<const T*>(args.v) + args.slot * args.v_slot_stride + kv_head * args.v_head_stride;
  const auto stage = [&](int step) { return ring + step % kStages * kAttentionTile * kDim; };
  const auto load = [&](int step) {
    const int tile_start = step / 2 * kAttentionTile;
    if (step < 2 * num_tiles) {
      load_tile<T, kDim>(stage(step), step % 2 == 0 ? k : v,
                         step % 2 == 0 ? args.k_position_stride : args.v_position_stride,
                         tile_start, end);
    }
    commit_copies();
  };
  // Makes a step's tile readable, and its predecessor's place in the ring free for the last of the
  // kStages - 1 steps after it. A ring of one has its tile loaded when the last has been read.
  const auto replace_only = [&](int step) {
    __syncthreads();
    load(step);
  };
  const auto ready = [&](int step) {
    wait_for_copies<kStages == 1 ? 0 : kStages - 2>();
    __syncthreads();
    if (kStages > 1) load(step + kStages - 1);
  };
  load_queries<T, kDim>(args, q, block_row, block_rows, kv_head);
  for (int step = 0; step < kStages - 1; ++step) load(step);

  const int warp_row = block_row + 16 * warp;
  const LaneRows rows(args, warp_row + lane / 4);
  const int first = LaneRows::position_of(args, warp_row);
  const int last = LaneRows::position_of(args, warp_row + 15);
  RowStates totals{{0, 0}, {kNothing, kNothing}};
  float o[kDim / 8][4];
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (float& x : o[n]) x = kNothing;
  }
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int tile_start = tile * kAttentionTile;
    const bool seen = warp_row < args.num_rows && last >= tile_start;
    float s[kEights][4];
    if (kStages == 1) replace_only(2 * tile);
    ready(2 * tile);
    if (seen) score_tile<T, kDim>(s, q + 16 * warp * kDim, stage(2 * tile), lane);
    if (kStages == 1) {
      replace_only(2 * tile + 1);
    } else {
      ready(2 * tile + 1);
    }
    uint32_t p[kSixteens][4];
    TileFactors factors;
    if (seen) {
      if (tile_start + kAttentionTile - 1 > first) mask_scores(s, rows, tile_start);
      const RowStates state = weigh_tile<T>(s, p, rows, tile_start, args.c);
      factors = fold_rows(totals, state, rows, tile_start, args.c);
    }
    if (kStages == 1) ready(2 * tile + 1);
    if (seen) add_values<T, kDim>(o, p, factors, stage(2 * tile + 1), lane);
  }
  store_rows<T, kDim>(args, kv_head, warp_row + lane / 4, o, totals);
}

template <typename T, int kDim, int kStages>
void launch_prefill(const PrefillArgs& args, int kv_heads, int warps, Stream stream) {
  const int rows = 16 * warps;
  const size_t bytes = (kStages * kAttentionTile + rows) * kDim * sizeof(T);
  const auto kernel = prefill_kernel<T, kDim, kStages>;
  allow_shared("prefill_attention", kernel, bytes);
  const dim3 blocks(kv_heads, (args.num_rows + rows - 1) / rows);
  launch("prefill_attention", kernel, {blocks, 32 * warps, bytes}, stream, args);
}

// As many rows to a block as leave no multiprocessor idle.
int choose_warps(const PrefillArgs& args, int most, int kv_heads) {
  int warps = most;
  while (warps > kMinWarps && args.num_rows / (16 * warps) * kv_heads < device_info().num_sms) {
    warps /= 2;
  }
  return warps;
}

// A block may have 99 KB of shared memory on some devices, 163 KB or more on others.
template <typename T, int kDim>
void launch_dim(const PrefillArgs& args, int kv_heads, Stream stream) {
  constexpr int kFewStages = kDim > 128 ? 1 : 2;
  constexpr size_t kManyBytes =
      (2 * kFewStages * kAttentionTile + 16 * kMaxWarps) * kDim * sizeof(T);
  if (device_info().block_shared_bytes >= kManyBytes) {
    const int warps = choose_warps(args, kMaxWarps, kv_heads);
    launch_prefill<T, kDim, 2 * kFewStages>(args, kv_heads, warps, stream);
  } else {
    const int warps = choose_warps(args, kDim > 128 ? kMaxWarps / 2 : kMaxWarps, kv_heads);
    launch_prefill<T, kDim, kFewStages>(args, kv_heads, warps, stream);
  }
}

PrefillArgs make_args(const ChunkParams& params) {
  const AttentionInput& input = params.input;
  const CacheParams& cache = input.cache;
  PrefillArgs args{};
  args.q = input.qkv;
  args.q_stride = (input.num_q_heads + 2 * cache.num_kv_heads) * cache.head_dim;
  args.k = cache.k;
  args.v = cache.v;
  args.k_slot_stride = cache.k_slot_stride;
  args.k_position_stride = cache.k_position_stride;
  args.k_head_stride = cache.k_head_stride;
  args.v_slot_stride = cache.v_slot_stride;
  args.v_position_stride = cache.v_position_stride;
  args.v_head_stride = cache.v_head_stride;
  args.out = input.out;
  args.out_stride = input.num_q_heads * cache.head_dim;
  args.group = static_cast<int>(input.num_q_heads / cache.num_kv_heads);
  args.num_rows = static_cast<int>(input.num_rows) * args.group;
  args.slot = static_cast<int>(params.slot);
  args.start = static_cast<int>(params.start);
  args.c = exponent_scale(input.scale);
  args.place = params.place;
  return args;
}

}  // namespace

void prefill_attention(const ChunkParams& params, Stream stream) {
  if (params.input.num_rows == 0) return;
  const CacheParams& cache = params.input.cache;
  if (cache.dtype == DType::kFloat32) return prefill_attention_float32(params, stream);
  check_cache("prefill_attention", cache);
  const PrefillArgs args = make_args(params);
  if (prefill_attention_wgmma(args, cache, stream)) return;
  const int kv_heads = static_cast<int>(cache.num_kv_heads);
  for_dtype(cache.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 2) {
      for_head_dim("prefill_attention", cache.head_dim,
                   [&](auto dim) { launch_dim<T, dim()>(args, kv_heads, stream); });
    }
  });
}

}  // namespace slotwise::cuda
