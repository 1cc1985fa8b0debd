// Decode attention: one kernel norms and rotates the new token's heads, appends it to the cache,
// attends, and folds the tiles. The arithmetic is the one of attention_math.cuh.
#include <algorithm>

#include "attention_float32.cuh"
#include "decode_attention.cuh"
#include "decode_attention_tma.cuh"
#include "dispatch.cuh"

namespace slotwise::cuda {
namespace {

template <typename T, int D>
struct alignas(16) Shared {
  // Tiles of K and V have a buffer each, so that the next item's are loaded behind this one's; the
  // large ones take turns in one.
  static constexpr bool kTwoBuffers = D <= 128;

  T tiles[kTwoBuffers ? 2 : 1][kTile * D];
  GroupShared<T, D> group;
};

// A block is one group, which copies its tiles itself.
template <typename T, int D>
class CopyDecoder : DecodeGroup<T, D> {
  using Base = DecodeGroup<T, D>;
  using Base::after, Base::append, Base::clear_idle_rows, Base::first_head, Base::first_item,
      Base::fold_row, Base::is_last, Base::key, Base::last, Base::mask, Base::num_heads,
      Base::prefetch_constants, Base::prepare, Base::put_max, Base::put_result, Base::put_weights,
      Base::qkv, Base::rotate_head, Base::score, Base::sync, Base::value, Base::weigh;
  using Base::cache_, Base::in_, Base::kChunks, Base::kv_heads_, Base::lane_, Base::q_heads_,
      Base::shared_, Base::warp_;

 public:
  __device__ CopyDecoder(const DecodeAttentionParams& params, float c, Shared<T, D>& shared)
      : Base(params, c, shared.group, 0), tiles_(shared) {}

  // The positions and the rows of the cache that are copied are of earlier steps: no kernel of this
  // one writes them, so the first copies start while the predecessor ends.
  __device__ void run() {
    int left = 0;
    Item item = first_item(left);
    if (left > 0) {
      start_key(item);
      if constexpr (kTwoBuffers) start_value(item);
      prefetch_constants(item);
    }
    wait_for_predecessor();
    // Not before: the next product's loads would be ahead of these few, which all wait for.
    start_successor();
    clear_idle_rows(kDecodeThreads);
    if (left == 0) return;
    bool new_group = true;
    for (int tiles_done = 1;; ++tiles_done) {
      const Item next = left > 1 ? after(item) : item;
      attend(item, new_group, next, left > 1);
      const bool same_row = left > 1 && next.row == item.row && next.kv_head == item.kv_head;
      if (!same_row) {
        if (item.position >= kTile && is_last(item, tiles_done)) fold_row(item);
        tiles_done = 0;
      }
      if (--left == 0) return;
      new_group = !same_row || next.pass != item.pass;
      item = next;
    }
  }

 private:
  static constexpr bool kTwoBuffers = Shared<T, D>::kTwoBuffers;

  __device__ T* keys() { return tiles_.tiles[0]; }
  __device__ T* values() { return tiles_.tiles[kTwoBuffers ? 1 : 0]; }

  // The rows of the tile that earlier steps wrote, and zeros after the row's own position, which
  // `append` writes.
  __device__ void start_tile(T* to, const T* from, int64_t stride, int last) {
    // A warp copies every fourth group of 8 rows, whose places repeat in each group. Offsets within
    // a tile fit 32 bits.
    const int step = static_cast<int>(stride);
#pragma unroll
    for (int part = 0; part < D / 32; ++part) {
      const int first = (lane_ + 32 * part) / (D / 8), chunk = (lane_ + 32 * part) % (D / 8);
      T* const shared_first = to + chunk_offset<D>(first, chunk) + warp_ * 8 * D;
      int offset = (8 * warp_ + first) * step + chunk * 8;
      int row = 8 * warp_ + first;
#pragma unroll
      for (int group = 0; group < kTile / 8; group += kDecodeWarps) {
        if (row != last) copy_async(shared_first + group * 8 * D, from + offset, row < last);
        offset += 8 * kDecodeWarps * step;
        row += 8 * kDecodeWarps;
      }
    }
    commit_copies();
  }
  __device__ void start_key(const Item& item) {
    start_tile(keys(), key(item, item.tile * kTile), cache_.k_position_stride, last(item));
  }
  __device__ void start_value(const Item& item) {
    start_tile(values(), value(item, item.tile * kTile), cache_.v_position_stride, last(item));
  }

  __device__ void put_new(Head<D>& head, int which, const Item& item) {
    if (which == 0) {
      rotate_head(head, in_.k_norm, item.position);
      append(head, keys(), key(item, item.position), item);
    } else {
      append(head, values(), value(item, item.position), item);
    }
  }

  __device__ void append_value(const Item& item) {
    if (warp_ != 0 || last(item) >= kTile) return;
    Head<D> head = load_head<D>(qkv(item, q_heads_ + kv_heads_ + item.kv_head), lane_);
    append(head, values(), value(item, item.position), item);
  }

  // One item, and the loads of the next.
  __device__ void attend(const Item& item, bool new_group, const Item& next, bool has_next) {
    // The compiler would keep every address that depends on the lane in a register of its own, from
    // one item to the next, and run out of them.
    asm volatile("" : "+r"(warp_), "+r"(lane_));
    float scores[4][4];
    prepare(item, new_group, kTwoBuffers ? 2 : 1,
            [&](Head<D>& head, int which) { put_new(head, which, item); });
    wait_for_copies<kTwoBuffers ? 1 : 0>();
    sync();
    score(scores, keys());
    mask(scores, last(item));
    put_max(scores);
    sync();
    if constexpr (kTwoBuffers) {
      start_next(has_next, [&] { start_key(next); });
    } else {
      start_value(item);
      append_value(item);
    }
    put_weights(scores, num_heads(item));
    wait_for_copies<kTwoBuffers ? 1 : 0>();
    sync();
    float sums[kChunks][4];
    weigh(sums, values());
    put_result(item, sums);
    sync();
    start_next(has_next, [&] { kTwoBuffers ? start_value(next) : start_key(next); });
  }

  // The count of groups under way is the same without a next item.
  template <typename Start>
  __device__ void start_next(bool has_next, const Start& start) {
    if (has_next) {
      start();
    } else {
      commit_copies();
    }
  }

  Shared<T, D>& tiles_;
};

template <typename T, int D>
__global__ __launch_bounds__(kDecodeThreads, D > 128 ? 2 : 3) void decode_kernel(
    const __grid_constant__ DecodeAttentionParams params, float c) {
  extern __shared__ uint4 memory[];
  CopyDecoder<T, D>(params, c, *reinterpret_cast<Shared<T, D>*>(memory)).run();
}

// As many blocks as fit on the device at once, but no more than there can be items.
template <typename T, int D>
void launch_decode(const DecodeAttentionParams& params, float c, Stream stream) {
  const auto kernel = decode_kernel<T, D>;
  const CacheParams& cache = params.input.cache;
  const size_t bytes = sizeof(Shared<T, D>);
  allow_shared("decode_attention", kernel, bytes);
  int per_sm = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, kDecodeThreads, bytes),
        "decode_attention");
  const int64_t blocks = int64_t{device_info().num_sms} * per_sm;
  const int64_t heads_per_kv = params.input.num_q_heads / cache.num_kv_heads;
  const int64_t groups = cache.num_kv_heads * ((heads_per_kv + kGroupHeads - 1) / kGroupHeads);
  const int64_t items =
      params.input.num_rows * groups * ((cache.num_positions + kTile - 1) / kTile);
  launch("decode_attention", kernel,
         {dim3(static_cast<unsigned>(std::min(blocks, items))), kDecodeThreads, bytes}, stream,
         params, c);
}

}  // namespace

int64_t decode_attention_workspace(int64_t num_rows, int64_t num_positions, int64_t num_q_heads,
                                   int64_t head_dim) {
  const int64_t tiles = (num_positions + kTile - 1) / kTile;
  return num_rows * tiles * num_q_heads * (head_dim + 2) * static_cast<int64_t>(sizeof(float));
}

void decode_attention(const DecodeAttentionParams& params, Stream stream) {
  const AttentionInput& in = params.input;
  const CacheParams& cache = in.cache;
  if (in.num_rows == 0 || cache.num_positions == 0) return;
  check_cache("decode_attention", cache);
  if (cache.dtype == DType::kFloat32) return decode_attention_float32(params, stream);
  if (decode_attention_tma_supported(cache)) return decode_attention_tma(params, stream);
  const float c = exponent_scale(in.scale);
  for_head_dim("decode_attention", cache.head_dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    if (cache.dtype == DType::kBFloat16) {
      launch_decode<__nv_bfloat16, kDim>(params, c, stream);
    } else {
      launch_decode<__half, kDim>(params, c, stream);
    }
  });
}

}  // namespace slotwise::cuda
