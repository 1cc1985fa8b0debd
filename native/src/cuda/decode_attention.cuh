// What the kernels of decode attention share: a group of four warps takes one item after another,
// whose tiles of K and V lie in shared memory.
//
// An item is a tile of one row and group of query heads. The grid is fixed; each block finds its
// share of the items, a contiguous run, from the positions. So which block computes a tile depends
// on the neighbours, and what it computes does not. The states of a row of several tiles go through
// memory, and the last group to finish one folds them.
#pragma once

#include "attention_math.cuh"
#include "fold_states.cuh"
#include "launch.cuh"
#include "mma.cuh"
#include "rope.cuh"

namespace slotwise::cuda {

constexpr int kDecodeWarps = 4;
constexpr int kDecodeThreads = 32 * kDecodeWarps;  // of a group
constexpr int kTile = kAttentionTile;
constexpr int kGroupHeads = 16;  // query heads of an item: the rows of a matrix instruction

__device__ __forceinline__ int tiles_of(int position) {
  return position < 0 ? 0 : position / kTile + 1;
}

__device__ __forceinline__ int sum_lanes(int x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// The sum over this lane and those before.
__device__ __forceinline__ int scan_lanes(int x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kAllLanes, x, step);
    if (lane >= step) x += before;
  }
  return x;
}

__device__ __forceinline__ float max_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// What this block wrote is visible to the block that sees the last arrival.
__device__ __forceinline__ int add_and_order(int* counter, int count) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(count)
               : "memory");
  return before;
}

__device__ __forceinline__ void prefetch(const float* p) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
}

struct Item {
  int row;
  int slot;  // of the cache, the row's
  int kv_head;
  int pass;  // over the KV head's query heads, kGroupHeads at a time
  int tile;
  int position;  // the row's
};

// A group's own part of shared memory.
template <typename T, int D>
struct alignas(16) GroupShared {
  T queries[kGroupHeads * D];
  T weights[kGroupHeads * kTile];
  float max[kDecodeWarps][kGroupHeads];
  float sum[kDecodeWarps][kGroupHeads][4];
  int is_last;
};

// Tiles whose rows lie one after another.
template <int D>
struct RowTiles {
  // Of the 8 elements `chunk` of a row, in elements.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return chunk_offset<D>(row, chunk);
  }
};

// One group of a block.
template <typename T, int D, typename Tiles = RowTiles<D>>
class DecodeGroup {
 public:
  __device__ DecodeGroup(const DecodeAttentionParams& params, float c, GroupShared<T, D>& shared,
                         int group)
      : params_(params),
        in_(params.input),
        cache_(params.input.cache),
        c_(c),
        shared_(shared),
        group_(group),
        warp_(static_cast<int>(threadIdx.x) / 32 % kDecodeWarps),
        lane_(static_cast<int>(threadIdx.x) % 32),
        q_heads_(static_cast<int>(in_.num_q_heads)),
        kv_heads_(static_cast<int>(cache_.num_kv_heads)),
        heads_per_kv_(q_heads_ / kv_heads_),
        passes_((heads_per_kv_ + kGroupHeads - 1) / kGroupHeads),
        max_tiles_(tiles_of(static_cast<int>(cache_.num_positions) - 1)) {}

 protected:
  static constexpr int kChunks = D / 32;  // of 8 output columns, of a warp

  // A barrier of the group's threads.
  __device__ void sync() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group_), "n"(kDecodeThreads) : "memory");
  }

  __device__ int first_head(const Item& item) const {
    return item.kv_head * heads_per_kv_ + item.pass * kGroupHeads;
  }
  __device__ int num_heads(const Item& item) const {
    return min(kGroupHeads, heads_per_kv_ - item.pass * kGroupHeads);
  }
  // Where the row's own position is, counted from the start of the tile.
  __device__ int last(const Item& item) const { return item.position - item.tile * kTile; }

  __device__ const T* qkv(const Item& item, int head) const {
    const int64_t heads = q_heads_ + 2 * kv_heads_;
    return static_cast<const T*>(in_.qkv) + (item.row * heads + head) * D;
  }
  __device__ T* key(const Item& item, int position) const {
    return static_cast<T*>(cache_.k) + item.slot * cache_.k_slot_stride +
           position * cache_.k_position_stride + item.kv_head * cache_.k_head_stride;
  }
  __device__ T* value(const Item& item, int position) const {
    return static_cast<T*>(cache_.v) + item.slot * cache_.v_slot_stride +
           position * cache_.v_position_stride + item.kv_head * cache_.v_head_stride;
  }
  __device__ T* out(int row, int head) const {
    return static_cast<T*>(in_.out) + (static_cast<int64_t>(row) * q_heads_ + head) * D;
  }
  // States: o [T, tiles, H_q, D], then max and sum [T, tiles, H_q, 2].
  __device__ int64_t state(int row, int tile, int head) const {
    return (static_cast<int64_t>(row) * max_tiles_ + tile) * q_heads_ + head;
  }
  __device__ float* state_out(int64_t state) const { return params_.states + state * D; }
  __device__ float2* state_max_sum(int64_t state) const {
    const int64_t states = in_.num_rows * max_tiles_ * q_heads_;
    return reinterpret_cast<float2*>(params_.states + states * D) + state;
  }

  // By the block's first `threads`; from the end of the grid, where blocks have the least to do.
  __device__ void clear_idle_rows(int threads) const {
    const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    for (int row = first; row < in_.num_rows; row += static_cast<int>(gridDim.x)) {
      if (params_.positions[row] >= 0) continue;
      uint4* const to = reinterpret_cast<uint4*>(out(row, 0));
      for (int i = static_cast<int>(threadIdx.x); i < q_heads_ * D / 8; i += threads) {
        to[i] = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // The first of this block's items, and how many they are. Each warp finds it by itself.
  __device__ Item first_item(int& count) const {
    const int num_rows = static_cast<int>(in_.num_rows);
    int total = 0;
    for (int row = lane_; row < num_rows; row += 32) {
      total += tiles_of(params_.positions[row]);
    }
    const int groups = kv_heads_ * passes_;
    total = sum_lanes(total) * groups;
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    const int share = total / blocks, rest = total % blocks;
    count = share + (block < rest ? 1 : 0);
    int first = block * share + min(block, rest);
    if (count == 0) return {};
    for (int base = 0;; base += 32) {
      const int row = base + lane_;
      const int position = row < num_rows ? params_.positions[row] : -1;
      // At the same time as the position, though few lanes' are used.
      const int slot = row < num_rows ? params_.slots[row] : 0;
      const int items = tiles_of(position) * groups;
      const int end = scan_lanes(items, lane_);
      const unsigned past = __ballot_sync(kAllLanes, end > first);
      if (past == 0) {
        first -= __shfl_sync(kAllLanes, end, 31);
        continue;
      }
      const int found = __ffs(static_cast<int>(past)) - 1;
      first -= __shfl_sync(kAllLanes, end - items, found);
      const int last = __shfl_sync(kAllLanes, position, found);
      const int group = first / tiles_of(last), tile = first % tiles_of(last);
      const int cache_slot = __shfl_sync(kAllLanes, slot, found);
      return {base + found, cache_slot, group / passes_, group % passes_, tile, last};
    }
  }

  __device__ Item after(Item item) const {
    if (++item.tile < tiles_of(item.position)) return item;
    item.tile = 0;
    if (++item.pass < passes_) return item;
    item.pass = 0;
    if (++item.kv_head < kv_heads_) return item;
    item.kv_head = 0;
    do {
      ++item.row;
      item.position = params_.positions[item.row];
      item.slot = params_.slots[item.row];
    } while (item.position < 0);
    return item;
  }

  template <typename Layout>
  __device__ void store_row(Head<D>& head, T* tile, int row) const {
    for_pairs(head, lane_, [&](int i, const float2& pair) {
      store_two(tile + Layout::offset(row, i / 8) + i % 8, pair);
    });
  }

  __device__ void rotate_head(Head<D>& head, const float* norm, int64_t position) const {
    const Head<D> angles =
        load_angles<D>(in_.cos + position * (D / 2), in_.sin + position * (D / 2), lane_);
    norm_and_rotate(head, norm, in_.eps, angles, lane_);
  }

  // What the heads need as soon as they are there, into the caches.
  __device__ void prefetch_constants(const Item& item) const {
    constexpr int kLine = 32;  // floats
    const int at = (32 * warp_ + lane_) * kLine;
    const int64_t row = int64_t{item.position} * (D / 2) + at;
    if (at < D / 2) {
      prefetch(in_.cos + row);
      prefetch(in_.sin + row);
    }
    if (at < D && in_.q_norm != nullptr) {
      prefetch(in_.q_norm + at);
      prefetch(in_.k_norm + at);
    }
  }

  // The group's queries where the group is new, and put_new(head, which) for the new key, which =
  // 0, and value, 1, where the tile holds their position: the first `num_new` of these. Rows past
  // the group's heads stay as they are: a row's results depend on no other row.
  template <typename PutNew>
  __device__ void prepare(const Item& item, bool new_group, int num_new, const PutNew& put_new) {
    const int queries = new_group ? num_heads(item) : 0;
    const int all = queries + (last(item) < kTile ? num_new : 0);
    const auto source = [&](int task) {
      const int head = task < queries ? first_head(item) + task
                                      : q_heads_ + (task - queries) * kv_heads_ + item.kv_head;
      return qkv(item, head);
    };
    if (warp_ >= all) return;
    Head<D> coming = load_head<D>(source(warp_), lane_);
    for (int task = warp_; task < all; task += kDecodeWarps) {
      Head<D> head = coming;
      if (task + kDecodeWarps < all) coming = load_head<D>(source(task + kDecodeWarps), lane_);
      if (task < queries) {
        rotate_head(head, in_.q_norm, item.position);
        store_row<RowTiles<D>>(head, shared_.queries, task);
      } else {
        put_new(head, task - queries);
      }
    }
  }

  __device__ void append(Head<D>& head, T* tile, T* in_cache, const Item& item) const {
    store_row<Tiles>(head, tile, last(item));
    if (item.pass == 0) store_head(head, in_cache, lane_);
  }

  // A warp's scores: heads lane / 4 + 8 h, positions 32 warp + 8 n + 2 (lane % 4) + e of the tile
  // are scores[n][2 h + e].
  __device__ void score(float (&scores)[4][4], const T* keys) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t q[4];
      load_matrices(q, shared_.queries + chunk_offset<D>(lane_ % 16, 2 * step + lane_ / 16));
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        const int row = 32 * warp_ + 8 * n + lane_ / 16 * 8 + lane_ % 8;
        uint32_t k[4];
        load_matrices(k, keys + Tiles::offset(row, 2 * step + lane_ / 8 % 2));
        multiply_add<T>(scores[n], q, k[0], k[1]);
        multiply_add<T>(scores[n + 1], q, k[2], k[3]);
      }
    }
  }

  __device__ void mask(float (&scores)[4][4], int last) const {
    if (last >= kTile - 1) return;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = 32 * warp_ + 8 * n + 2 * (lane_ % 4) + i % 2;
        if (position > last) scores[n][i] = -INFINITY;
      }
    }
  }

  __device__ void put_max(const float (&scores)[4][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float max = -INFINITY;
#pragma unroll
      for (int n = 0; n < 4; ++n) max = fmaxf(max, fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
      max = max_of_quad(max);
      if (lane_ % 4 == 0) shared_.max[warp_][lane_ / 4 + 8 * h] = max;
    }
  }

  __device__ float row_max(int row) const {
    return fmaxf(fmaxf(shared_.max[0][row], shared_.max[1][row]),
                 fmaxf(shared_.max[2][row], shared_.max[3][row]));
  }

  __device__ float row_sum(int row) const {
    const int lane = lane_ % 4;
    float sum = (shared_.sum[0][row][lane] + shared_.sum[1][row][lane]) +
                (shared_.sum[2][row][lane] + shared_.sum[3][row][lane]);
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    return sum + __shfl_xor_sync(kAllLanes, sum, 2);
  }

  __device__ void put_weights(const float (&scores)[4][4], int num_heads) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (8 * h >= num_heads) return;
      const int row = lane_ / 4 + 8 * h;
      const float max_c = __fmul_rn(row_max(row), c_);
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 pair = make_float2(weight_of(scores[n][2 * h], c_, max_c),
                                        weight_of(scores[n][2 * h + 1], c_, max_c));
        sum = (sum + pair.x) + pair.y;
        store_two(shared_.weights + chunk_offset<kTile>(row, 4 * warp_ + n) + 2 * (lane_ % 4),
                  pair);
      }
      shared_.sum[warp_][row][lane_ % 4] = sum;
    }
  }

  // Weights times values: heads lane / 4 + 8 h, columns D / 4 warp + 8 n + 2 (lane % 4) + e.
  __device__ void weigh(float (&sums)[kChunks][4], const T* values) const {
#pragma unroll
    for (int n = 0; n < kChunks; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      uint32_t p[4];
      load_matrices(p, shared_.weights + chunk_offset<kTile>(lane_ % 16, 2 * step + lane_ / 16));
#pragma unroll
      for (int n = 0; n < kChunks; n += 2) {
        const int chunk = kChunks * warp_ + min(n + lane_ / 16, kChunks - 1);
        uint32_t v[4];
        load_transposed(v, values + Tiles::offset(16 * step + lane_ % 16, chunk));
        multiply_add<T>(sums[n], p, v[0], v[1]);
        if (n + 1 < kChunks) multiply_add<T>(sums[n + 1], p, v[2], v[3]);
      }
    }
  }

  // The output of a row of one tile, else the tile's state.
  __device__ void put_result(const Item& item, const float (&sums)[kChunks][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (8 * h >= num_heads(item)) return;
      const int row = lane_ / 4 + 8 * h;
      const float sum = row_sum(row);
      if (row >= num_heads(item)) continue;
      const int head = first_head(item) + row;
      const int column = D / 4 * warp_ + 2 * (lane_ % 4);
      if (item.position < kTile) {
        const float scale = inverse(sum);
#pragma unroll
        for (int n = 0; n < kChunks; ++n) {
          store_two(out(item.row, head) + column + 8 * n,
                    make_float2(finish(sums[n][2 * h], scale), finish(sums[n][2 * h + 1], scale)));
        }
        continue;
      }
      const int64_t at = state(item.row, item.tile, head);
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        store_two(state_out(at) + column + 8 * n, make_float2(sums[n][2 * h], sums[n][2 * h + 1]));
      }
      if (warp_ == 0 && lane_ % 4 == 0) *state_max_sum(at) = make_float2(row_max(row), sum);
    }
  }

  // Whether the `done` tiles that end here were the last of the row and KV head. The barrier
  // before it has made them this thread's to publish.
  __device__ bool is_last(const Item& item, int done) {
    if (warp_ == 0 && lane_ == 0) {
      int* const counter = params_.counters + item.row * kv_heads_ + item.kv_head;
      const int all = tiles_of(item.position) * passes_;
      shared_.is_last = add_and_order(counter, done) + done == all ? 1 : 0;
      if (shared_.is_last != 0) *counter = 0;
    }
    sync();
    return shared_.is_last != 0;
  }
  __device__ void fold_row(const Item& item) const {
    for (int i = warp_; i < heads_per_kv_; i += kDecodeWarps) {
      const int head = item.kv_head * heads_per_kv_ + i;
      const int64_t first = state(item.row, 0, head);
      fold_states<D>({state_out(first), state_max_sum(first), q_heads_, tiles_of(item.position)},
                     c_, out(item.row, head), lane_);
    }
  }

  const DecodeAttentionParams& params_;
  const AttentionInput& in_;
  const CacheParams& cache_;
  const float c_;
  GroupShared<T, D>& shared_;
  const int group_;
  int warp_, lane_;
  const int q_heads_, kv_heads_, heads_per_kv_, passes_, max_tiles_;
};

}  // namespace slotwise::cuda
