// Decode attention on Hopper: a block for an SM, whose one thread keeps a ring of tiles full; two
// groups of warps take turns at its items.
//
// The ring and what the groups need leave room for a block of `linear` on the SM: the keys of the
// first items come while the product before still runs, and the weights of the product behind come
// while the last items are attended.
#include <algorithm>

#include "decode_attention.cuh"
#include "decode_attention_tma.cuh"
#include "dispatch.cuh"
#include "hopper.cuh"
#include "tensor_map.cuh"

namespace slotwise::cuda {
namespace {

constexpr int kGroups = 2;
constexpr int kConsumers = kGroups * kDecodeThreads;
constexpr int kThreads = kConsumers + 32;
constexpr int kRingBytes = 96 * 1024;
constexpr int kBoxRows = 64;  // of a copy: tiles at the end of a row are copied in part

// A tile in shared memory: panels of 128 positions and 64 columns.
template <int D>
struct PanelTiles {
  static constexpr int kPanels = D / kPanelColumns;
  static constexpr int kPanelSize = kTile * kPanelColumns;

  static __device__ __forceinline__ int offset(int row, int chunk) {
    return chunk / 8 * kPanelSize + row * kPanelColumns + (chunk % 8 ^ row % 8) * 8;
  }
};

template <typename T, int D>
struct alignas(1024) StreamShared {
  static constexpr int kStages = kRingBytes / (kTile * D * static_cast<int>(sizeof(T)));
  // Full barriers are taken in turn, so many that one always serves the same group: who waits by
  // parity must see every phase, and a group sees every other pair of copies.
  static constexpr int kFull = 2 * kGroups * kStages;

  T tiles[kStages][kTile * D];
  GroupShared<T, D> groups[kGroups];
  uint64_t full[kFull];
  uint64_t empty[kStages];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The ring holds K of the block's first item, V of it, K of the second and so on: copy `step`.
template <typename T, int D>
class StreamDecoder : DecodeGroup<T, D, PanelTiles<D>> {
  using Tiles = PanelTiles<D>;
  using Base = DecodeGroup<T, D, Tiles>;
  using Base::after, Base::append, Base::clear_idle_rows, Base::first_head, Base::first_item,
      Base::fold_row, Base::is_last, Base::key, Base::last, Base::mask, Base::num_heads,
      Base::prefetch_constants, Base::prepare, Base::put_max, Base::put_result, Base::put_weights,
      Base::qkv, Base::rotate_head, Base::score, Base::sync, Base::value, Base::weigh;
  using Base::group_, Base::in_, Base::kChunks, Base::kv_heads_, Base::lane_, Base::q_heads_,
      Base::shared_, Base::warp_;

 public:
  __device__ StreamDecoder(const DecodeAttentionParams& params, float c, StreamShared<T, D>& shared,
                           int group)
      : Base(params, c, shared.groups[group], group), ring_(shared) {}

  // The positions and the rows of the cache that are copied are of earlier steps: no kernel of this
  // one writes them, so the copies need not wait for the predecessor.
  __device__ void produce(const CacheMaps& maps) {
    int left = 0;
    Item item = first_item(left);
    if (lane_ != 0) return;
    for (int step = 0; left > 0; --left) {
      copy(maps.k, item, step++);
      copy(maps.v, item, step++);
      if (left > 1) item = after(item);
    }
    // Not before: the next product's loads would be ahead of these, which all wait for.
    wait_for_predecessor();
    start_successor();
  }

  __device__ void consume() {
    int count = 0;
    Item item = first_item(count);
    int index = group_;
    if (index < count) {
      for (int i = 0; i < index; ++i) item = after(item);
      prefetch_constants(item);
    }
    wait_for_predecessor();
    clear_idle_rows(kConsumers);
    bool new_group = true;
    for (int tiles_done = 1; index < count; ++tiles_done, index += kGroups) {
      attend(item, index, new_group);
      const bool has_next = index + kGroups < count;
      Item next = item;
      if (has_next) {
        for (int i = 0; i < kGroups; ++i) next = after(next);
      }
      const bool same_row = has_next && next.row == item.row && next.kv_head == item.kv_head;
      if (!same_row) {
        if (item.position >= kTile) finish_row(item, tiles_done);
        tiles_done = 0;
      }
      new_group = !same_row || next.pass != item.pass;
      item = next;
    }
  }

 private:
  static constexpr int kStages = StreamShared<T, D>::kStages;
  static constexpr int kFull = StreamShared<T, D>::kFull;

  __device__ T* tile(int step) { return ring_.tiles[step % kStages]; }
  __device__ uint32_t full(int step) const { return shared_address(&ring_.full[step % kFull]); }
  __device__ uint32_t empty(int step) const { return shared_address(&ring_.empty[step % kStages]); }
  __device__ void wait_full(int step) const { barrier_wait(full(step), step / kFull % 2); }
  __device__ void wait_empty(int step) const {
    barrier_wait(empty(step), (step / kStages + 1) % 2);
  }
  __device__ void release(int step) const {
    if (lane_ == 0) barrier_arrive(empty(step));
  }

  // The rows of the item's tile that earlier steps wrote, and some behind them.
  __device__ void copy(const CUtensorMap& map, const Item& item, int step) {
    const int boxes = (min(last(item), kTile) + kBoxRows - 1) / kBoxRows;
    wait_empty(step);
    barrier_expect(full(step), boxes * kBoxRows * D * static_cast<int>(sizeof(T)));
    for (int box = 0; box < boxes; ++box) {
#pragma unroll
      for (int panel = 0; panel < Tiles::kPanels; ++panel) {
        T* const to = tile(step) + panel * Tiles::kPanelSize + box * kBoxRows * kPanelColumns;
        copy_panel(shared_address(to), map, panel * kPanelColumns,
                   item.tile * kTile + box * kBoxRows, item.kv_head, item.slot, full(step),
                   evict_first());
      }
    }
  }

  // Zeros behind the row's own position, and its value there: what was copied of these is older.
  __device__ void end_values(const Item& item, Head<D>& head, T* tile) const {
    constexpr int kRowChunks = D / 8;
    const int first = last(item) + 1;
    for (int i = first * kRowChunks + 32 * warp_ + lane_; i < kTile * kRowChunks;
         i += kDecodeThreads) {
      T* const to = tile + Tiles::offset(i / kRowChunks, i % kRowChunks);
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
    if (warp_ == kDecodeWarps - 1) append(head, tile, value(item, item.position), item);
    fence_stores();
  }

  __device__ void attend(const Item& item, int index, bool new_group) {
    // The compiler would keep every address that depends on the lane in a register of its own, from
    // one item to the next, and run out of them.
    asm volatile("" : "+r"(warp_), "+r"(lane_));
    const int k_step = 2 * index, v_step = k_step + 1;
    const bool is_end = last(item) < kTile;
    Head<D> new_value;
    if (is_end && warp_ == kDecodeWarps - 1) {
      new_value = load_head<D>(qkv(item, q_heads_ + kv_heads_ + item.kv_head), lane_);
    }
    prepare(item, new_group, 1, [&](Head<D>& new_key, int) {
      rotate_head(new_key, in_.k_norm, item.position);
      wait_full(k_step);
      append(new_key, tile(k_step), key(item, item.position), item);
      fence_stores();
    });
    wait_full(k_step);
    sync();
    float scores[4][4];
    score(scores, tile(k_step));
    release(k_step);
    mask(scores, last(item));
    put_max(scores);
    sync();
    put_weights(scores, num_heads(item));
    wait_full(v_step);
    if (is_end) end_values(item, new_value, tile(v_step));
    sync();
    float sums[kChunks][4];
    weigh(sums, tile(v_step));
    release(v_step);
    put_result(item, sums);
  }

  __device__ void finish_row(const Item& item, int tiles_done) {
    sync();
    if (is_last(item, tiles_done)) fold_row(item);
  }

  StreamShared<T, D>& ring_;
};

#endif  // sm_90a

template <typename T, int D>
__global__ __launch_bounds__(kThreads, 1) void stream_kernel(
    const __grid_constant__ CacheMaps maps, const __grid_constant__ DecodeAttentionParams params,
    float c) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<StreamShared<T, D>*>(memory);
  if (threadIdx.x == 0) {
    for (uint64_t& full : shared.full) barrier_init(shared_address(&full), 1);
    for (uint64_t& empty : shared.empty) barrier_init(shared_address(&empty), kDecodeWarps);
    fence_barriers();
  }
  __syncthreads();
  const int group = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kDecodeThreads, 0);
  if (group < kGroups) {
    StreamDecoder<T, D>(params, c, shared, group).consume();
  } else {
    StreamDecoder<T, D>(params, c, shared, 0).produce(maps);
  }
#else
  __trap();  // decode_attention_tma_supported says no
#endif
}

// A block on every SM, but no more than there can be items.
template <typename T, int D>
void launch_stream(const DecodeAttentionParams& params, const CacheMaps& maps, Stream stream) {
  const auto kernel = stream_kernel<T, D>;
  const CacheParams& cache = params.input.cache;
  allow_shared("decode_attention", kernel, sizeof(StreamShared<T, D>));
  const int64_t heads_per_kv = params.input.num_q_heads / cache.num_kv_heads;
  const int64_t groups = cache.num_kv_heads * ((heads_per_kv + kGroupHeads - 1) / kGroupHeads);
  const int64_t items =
      params.input.num_rows * groups * ((cache.num_positions + kTile - 1) / kTile);
  const int64_t blocks = std::min<int64_t>(device_info().num_sms, items);
  launch("decode_attention", kernel,
         {dim3(static_cast<unsigned>(blocks)), kThreads, sizeof(StreamShared<T, D>)}, stream, maps,
         params, exponent_scale(params.input.scale));
}

}  // namespace

bool decode_attention_tma_supported(const CacheParams& cache) {
  return device_info().major == 9 && cache.dtype != DType::kFloat32 &&
         (cache.head_dim == 64 || cache.head_dim == 128);
}

void decode_attention_tma(const DecodeAttentionParams& params, Stream stream) {
  const CacheParams& cache = params.input.cache;
  const CacheMaps maps("decode_attention", cache, kBoxRows);
  for_dtype(cache.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 2) {
      if (cache.head_dim == 64) {
        launch_stream<T, 64>(params, maps, stream);
      } else {
        launch_stream<T, 128>(params, maps, stream);
      }
    }
  });
}

}  // namespace slotwise::cuda
