// Attention of a chunk's rows over the slot cache, for every GPU from compute capability 8.0 on.
//
// A block takes up to 128 packed rows of a KV head, 16 to a warp, and walks the tiles of positions
// in order. K and V of the tiles pass through a ring of tiles in shared memory: K of tile 0, V of
// tile 0, K of tile 1 and so on.
#include <initializer_list>
#include <stdexcept>

#include "attention_float32.cuh"
#include "prefill_attention.cuh"

namespace slotwise::cuda {

namespace {

constexpr int kMaxWarps = 8;
constexpr int kMinWarps = 2;
constexpr int kChunkBytes = 16;
constexpr int kChunk = 8;  // elements

// Rows of D elements in chunks of 16 bytes, which change places within a row so that eight rows'
// chunks of one column lie in different banks.
template <int kDim>
struct Rows {
  static constexpr int kBytes = 2 * kDim;
  static constexpr int kTileBytes = kAttentionTile * kBytes;

  static __device__ __forceinline__ int offset(int row, int chunk) {
    const int turn = kDim % 64 == 0 ? row & 7 : row >> 1 & 3;
    return row * kBytes + (chunk ^ turn) * kChunkBytes;
  }
};

// 16 bytes, or zeros.
__device__ __forceinline__ void copy_chunk(uint32_t to, const void* from, bool keep) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(keep ? kChunkBytes : 0)
               : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// sums[16 x 8] += a[16 x 16] b[16 x 8].
template <typename T>
__device__ __forceinline__ void multiply(float* sums, const uint32_t* a, const uint32_t* b);
template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(float* sums, const uint32_t* a,
                                                        const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void multiply<__half>(float* sums, const uint32_t* a,
                                                 const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The block's packed rows of q, zeros past the last.
template <typename T, int kDim>
__device__ __forceinline__ void load_queries(const PrefillArgs& args, uint32_t to, int first_row,
                                             int num_rows, int kv_head) {
  constexpr int kChunks = kDim / kChunk;
  for (int i = threadIdx.x; i < num_rows * kChunks; i += blockDim.x) {
    const int row = first_row + i / kChunks, chunk = i % kChunks;
    const bool keep = row < args.num_rows;
    const int token = keep ? row / args.group : 0;
    const int head = kv_head * args.group + (keep ? row % args.group : 0);
    const T* from = static_cast<const T*>(args.q) + token * args.q_stride +
                    static_cast<int64_t>(head) * kDim + chunk * kChunk;
    copy_chunk(to + Rows<kDim>::offset(i / kChunks, chunk), from, keep);
  }
}

// Positions [tile_start, tile_start + 128) of one head, zeros from `end` on.
template <typename T, int kDim>
__device__ __forceinline__ void load_tile(uint32_t to, const T* head, int64_t position_stride,
                                          int tile_start, int end) {
  constexpr int kChunks = kDim / kChunk;
#pragma unroll 4
  for (int i = threadIdx.x; i < kAttentionTile * kChunks; i += blockDim.x) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool keep = tile_start + row < end;
    const T* from = head + (keep ? tile_start + row : 0) * position_stride + chunk * kChunk;
    copy_chunk(to + Rows<kDim>::offset(row, chunk), from, keep);
  }
}

// s = q k^T of the warp's 16 rows, which start at row `row` of the block.
template <typename T, int kDim>
__device__ __forceinline__ void score_tile(float (&s)[kTileScores], uint32_t q, int row, uint32_t k,
                                           int lane) {
#pragma unroll
  for (int i = 0; i < kTileScores; ++i) s[i] = 0;
  const int in_eight = lane & 7, second = lane >> 3 & 1, third = lane >> 4;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t a[4];
    load_matrices(a, q + Rows<kDim>::offset(row + 8 * second + in_eight, 2 * step + third));
#pragma unroll
    for (int pair = 0; pair < kAttentionTile / 16; ++pair) {
      uint32_t b[4];
      load_matrices(b, k + Rows<kDim>::offset(16 * pair + 8 * third + in_eight, 2 * step + second));
      multiply<T>(s + 8 * pair, a, b);
      multiply<T>(s + 8 * pair + 4, a, b + 2);
    }
  }
}

// Folds o = p v into the totals, some columns at a time to save registers.
template <typename T, int kDim>
__device__ __forceinline__ void add_values(float (&totals)[kDim / 2], const uint32_t (&p)[32],
                                           const TileFactors& factors, uint32_t v, int lane) {
  constexpr int kColumns = kDim % 64 == 0 ? 64 : 48;
  const int in_eight = lane & 7, second = lane >> 3 & 1, third = lane >> 4;
#pragma unroll
  for (int column = 0; column < kDim; column += kColumns) {
    float o[kColumns / 2] = {};
#pragma unroll
    for (int step = 0; step < kAttentionTile / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < kColumns / 16; ++pair) {
        uint32_t b[4];
        load_transposed(b, v + Rows<kDim>::offset(16 * step + 8 * second + in_eight,
                                                  column / 8 + 2 * pair + third));
        multiply<T>(o + 8 * pair, p + 4 * step, b);
        multiply<T>(o + 8 * pair + 4, p + 4 * step, b + 2);
      }
    }
    fold_columns(totals + column / 2, o, factors);
  }
}

// Grid: KV heads, blocks of rows. The last rows have the most positions and come first.
template <typename T, int kDim, int kStages>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) prefill_kernel(const PrefillArgs args) {
  extern __shared__ __align__(128) char shared[];
  wait_for_predecessor();
  start_successor();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int block_rows = blockDim.x / 2, kv_head = blockIdx.x;
  const int block_row = (gridDim.y - 1 - blockIdx.y) * block_rows;
  const int end = LaneRows::position_of(args, block_row + block_rows - 1) + 1;
  const int num_tiles = (end + kAttentionTile - 1) / kAttentionTile;

  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t q = ring + kStages * Rows<kDim>::kTileBytes;
  const T* k = static_cast<const T*>(args.k) + kv_head * args.k_head_stride;
  const T* v = static_cast<const T*>(args.v) + kv_head * args.v_head_stride;
  const auto stage = [&](int step) { return ring + step % kStages * Rows<kDim>::kTileBytes; };
  const auto load = [&](int step) {
    const int tile_start = step / 2 * kAttentionTile;
    if (step / 2 < num_tiles && step % 2 == 0) {
      load_tile<T, kDim>(stage(step), k, args.k_position_stride, tile_start, end);
    } else if (step / 2 < num_tiles) {
      load_tile<T, kDim>(stage(step), v, args.v_position_stride, tile_start, end);
    }
    commit_copies();
  };
  load_queries<T, kDim>(args, q, block_row, block_rows, kv_head);
  for (int step = 0; step < kStages; ++step) load(step);

  const int warp_row = 16 * warp;
  const LaneRows rows(args, block_row + warp_row + lane / 4);
  const int first = LaneRows::position_of(args, block_row + warp_row);
  const int last = LaneRows::position_of(args, block_row + warp_row + 15);
  const bool busy = block_row + warp_row < args.num_rows;
  RowTotals totals;
  float o[kDim / 2];
#pragma unroll
  for (float& x : o) x = -0.0f;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int tile_start = tile * kAttentionTile;
    const bool seen = busy && last >= tile_start;
    float s[kTileScores];
    wait_copies<kStages - 1>();
    __syncthreads();
    if (seen) score_tile<T, kDim>(s, q, warp_row, stage(2 * tile), lane);
    __syncthreads();
    load(2 * tile + kStages);
    uint32_t p[32];
    TileFactors factors;
    if (seen) {
      if (tile_start + kAttentionTile - 1 > first) mask_scores(s, rows, tile_start, lane % 4);
      factors = take_tile<T>(s, p, totals, rows, tile_start, args.c);
    }
    wait_copies<kStages - 1>();
    __syncthreads();
    if (seen) add_values<T, kDim>(o, p, factors, stage(2 * tile + 1), lane);
    __syncthreads();
    load(2 * tile + 1 + kStages);
  }
  store_rows<T, kDim>(args, kv_head, block_row + warp_row + lane / 4, o, totals, lane % 4);
}

int shared_limit() {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device), "finding the current device");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "reading a device's properties");
  return bytes;
}

template <typename T, int kDim, int kStages>
void launch_prefill(const PrefillArgs& args, int kv_heads, int warps, Stream stream) {
  const int rows = 16 * warps;
  const size_t bytes = kStages * Rows<kDim>::kTileBytes + rows * Rows<kDim>::kBytes;
  const auto kernel = prefill_kernel<T, kDim, kStages>;
  allow_shared("prefill_attention", kernel, bytes);
  const dim3 blocks(kv_heads, (args.num_rows + rows - 1) / rows);
  launch("prefill_attention", kernel, {blocks, 32 * warps, bytes}, stream, args);
}

// As many rows to a block as leave no multiprocessor idle.
template <int kDim>
int choose_warps(const PrefillArgs& args, int kv_heads) {
  int warps = kDim > 128 ? kMaxWarps / 2 : kMaxWarps;
  while (warps > kMinWarps && args.num_rows / (16 * warps) * kv_heads < device_info().num_sms) {
    warps /= 2;
  }
  return warps;
}

template <typename T, int kDim>
void launch_dim(const PrefillArgs& args, int kv_heads, Stream stream) {
  constexpr int kSlow = kDim > 128 ? 1 : 2;  // where a block has 99 KB
  const int warps = choose_warps<kDim>(args, kv_heads);
  if (shared_limit() >= 2 * kSlow * Rows<kDim>::kTileBytes + 16 * warps * Rows<kDim>::kBytes) {
    launch_prefill<T, kDim, 2 * kSlow>(args, kv_heads, warps, stream);
  } else {
    launch_prefill<T, kDim, kSlow>(args, kv_heads, warps, stream);
  }
}

template <typename T>
void launch_type(const PrefillArgs& args, int head_dim, int kv_heads, Stream stream) {
  switch (head_dim) {
    case 64:
      return launch_dim<T, 64>(args, kv_heads, stream);
    case 96:
      return launch_dim<T, 96>(args, kv_heads, stream);
    case 128:
      return launch_dim<T, 128>(args, kv_heads, stream);
    case 256:
      return launch_dim<T, 256>(args, kv_heads, stream);
    default:
      throw std::invalid_argument("prefill_attention: head dimension " + std::to_string(head_dim));
  }
}

void check_aligned(std::initializer_list<int64_t> strides) {
  for (const int64_t stride : strides) {
    if (stride % kChunk != 0) {
      throw std::invalid_argument("prefill_attention: a stride of " + std::to_string(stride) +
                                  " elements in the cache, not a multiple of 8");
    }
  }
}

PrefillArgs make_args(const ChunkParams& params) {
  const AttentionInput& input = params.input;
  const CacheParams& cache = input.cache;
  const auto slot_of = [&](const void* base, int64_t stride) {
    return static_cast<const char*>(base) + 2 * params.slot * stride;
  };
  check_aligned({cache.k_slot_stride, cache.k_position_stride, cache.k_head_stride,
                 cache.v_slot_stride, cache.v_position_stride, cache.v_head_stride});
  PrefillArgs args{};
  args.q = input.qkv;
  args.q_stride = (input.num_q_heads + 2 * cache.num_kv_heads) * cache.head_dim;
  args.k = slot_of(cache.k, cache.k_slot_stride);
  args.v = slot_of(cache.v, cache.v_slot_stride);
  args.k_position_stride = cache.k_position_stride;
  args.k_head_stride = cache.k_head_stride;
  args.v_position_stride = cache.v_position_stride;
  args.v_head_stride = cache.v_head_stride;
  args.out = input.out;
  args.out_stride = input.num_q_heads * cache.head_dim;
  args.group = static_cast<int>(input.num_q_heads / cache.num_kv_heads);
  args.num_rows = static_cast<int>(input.num_rows) * args.group;
  args.start = static_cast<int>(params.start);
  args.c = input.scale * kLog2E;
  return args;
}

}  // namespace

void prefill_attention(const ChunkParams& params, Stream stream) {
  if (params.input.num_rows == 0) return;
  const CacheParams& cache = params.input.cache;
  if (cache.dtype == DType::kFloat32) return prefill_attention_float32(params, stream);
  const PrefillArgs args = make_args(params);
  const int dim = static_cast<int>(cache.head_dim), kv_heads = static_cast<int>(cache.num_kv_heads);
  if (cache.dtype == DType::kBFloat16) {
    launch_type<__nv_bfloat16>(args, dim, kv_heads, stream);
  } else {
    launch_type<__half>(args, dim, kv_heads, stream);
  }
}

}  // namespace slotwise::cuda
