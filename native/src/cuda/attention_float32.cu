// One block for a row and head walks the tiles. Decode and prefill share all but where the row's
// own key and value come from.
#include "attention_float32.cuh"
#include "attention_math.cuh"
#include "dispatch.cuh"
#include "fold_states.cuh"
#include "launch.cuh"
#include "rope.cuh"

namespace slotwise::cuda {
namespace {

constexpr int kTile = kAttentionTile;
constexpr int kThreads = kTile;  // one for a position of a tile

template <int D>
struct Float32Shared {
  float query[D];
  float key[D];    // of the row's own position, and used only in decode: the block that writes it
  float value[D];  // to the cache is another
  float weights[kTile];
  float max[kThreads / 32];
  float sum[kThreads / 32];
};

template <int D>
class Float32Row {
 public:
  __device__ Float32Row(const AttentionInput& in, int64_t slot, int row, int head, float c,
                        Float32Shared<D>& shared)
      : in_(in),
        cache_(in.cache),
        slot_(slot),
        row_(row),
        head_(head),
        kv_head_(head / static_cast<int>(in.num_q_heads / in.cache.num_kv_heads)),
        c_(c),
        shared_(shared),
        thread_(static_cast<int>(threadIdx.x)),
        warp_(thread_ / 32),
        lane_(thread_ % 32) {}

  __device__ void clear() {
    for (int d = thread_; d < D; d += kThreads) out()[d] = 0.0f;
  }

  __device__ void load_query() {
    for (int d = thread_; d < D; d += kThreads) shared_.query[d] = qkv(head_)[d];
  }

  // Norms, rotates and appends what rope_append would.
  __device__ void append(int position) {
    if (warp_ > 2) return;
    const int q_heads = static_cast<int>(in_.num_q_heads);
    const int kv_heads = static_cast<int>(cache_.num_kv_heads);
    const int source = warp_ == 0 ? head_ : q_heads + (warp_ - 1) * kv_heads + kv_head_;
    Head<D> head = load_head<D>(qkv(source), lane_);
    if (warp_ < 2) {
      const int64_t row = int64_t{position} * (D / 2);
      const Head<D> angles = load_angles<D>(in_.cos + row, in_.sin + row, lane_);
      norm_and_rotate(head, warp_ == 0 ? in_.q_norm : in_.k_norm, in_.eps, angles, lane_);
    }
    store_head(head, warp_ == 0 ? shared_.query : warp_ == 1 ? shared_.key : shared_.value, lane_);
    if (warp_ > 0 && head_ % (q_heads / kv_heads) == 0) {
      store_head(head, const_cast<float*>(warp_ == 1 ? key(position) : value(position)), lane_);
    }
  }

  // `own` says where the row's own key and value are: in shared memory, or in the cache.
  __device__ void attend(int position, bool own) {
    float max, sum, total[kColumns];
    for (int first = 0; first <= position; first += kTile) {
      float part[kColumns];
      __syncthreads();
      const int j = first + thread_;
      const float s = j > position ? -INFINITY : dot(own && j == position ? shared_.key : key(j));
      const float part_max = block_max(s);
      const float p = weight_of(s, c_, __fmul_rn(part_max, c_));
      shared_.weights[thread_] = p;
      const float part_sum = block_sum(p);
      weigh(first, position, own, part);
      if (first == 0) {
        max = part_max;
        sum = part_sum;
        for (int i = 0; i < kColumns; ++i) total[i] = part[i];
      } else {
        const FoldFactors f = fold_factors(max, part_max, c_);
        max = f.max;
        sum = fold(sum, part_sum, f);
        for (int i = 0; i < kColumns; ++i) total[i] = fold(total[i], part[i], f);
      }
    }
    for (int i = 0; i < kColumns; ++i) {
      const int d = thread_ + i * kThreads;
      if (d < D) out()[d] = finish(total[i], inverse(sum));
    }
  }

 private:
  static constexpr int kColumns = (D + kThreads - 1) / kThreads;

  __device__ const float* qkv(int head) const {
    const int64_t heads = in_.num_q_heads + 2 * cache_.num_kv_heads;
    return static_cast<const float*>(in_.qkv) + (row_ * heads + head) * D;
  }
  __device__ const float* key(int position) const {
    return static_cast<const float*>(cache_.k) + slot_ * cache_.k_slot_stride +
           position * cache_.k_position_stride + kv_head_ * cache_.k_head_stride;
  }
  __device__ const float* value(int position) const {
    return static_cast<const float*>(cache_.v) + slot_ * cache_.v_slot_stride +
           position * cache_.v_position_stride + kv_head_ * cache_.v_head_stride;
  }
  __device__ float* out() const {
    return static_cast<float*>(in_.out) + (row_ * in_.num_q_heads + head_) * D;
  }

  __device__ float dot(const float* key) const {
    float sum = 0.0f;
    for (int d = 0; d < D; ++d) sum = __fmaf_rn(shared_.query[d], key[d], sum);
    return sum;
  }

  __device__ float block_max(float x) {
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
    if (lane_ == 0) shared_.max[warp_] = x;
    __syncthreads();
    return fmaxf(fmaxf(shared_.max[0], shared_.max[1]), fmaxf(shared_.max[2], shared_.max[3]));
  }

  __device__ float block_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    if (lane_ == 0) shared_.sum[warp_] = x;
    __syncthreads();
    return (shared_.sum[0] + shared_.sum[1]) + (shared_.sum[2] + shared_.sum[3]);
  }

  __device__ void weigh(int first, int position, bool own, float (&part)[kColumns]) const {
    const int count = min(kTile, position + 1 - first);
    for (int i = 0; i < kColumns; ++i) {
      const int d = thread_ + i * kThreads;
      part[i] = 0.0f;
      for (int j = 0; j < count && d < D; ++j) {
        const float* v = own && first + j == position ? shared_.value : value(first + j);
        part[i] = __fmaf_rn(shared_.weights[j], v[d], part[i]);
      }
    }
  }

  const AttentionInput& in_;
  const CacheParams& cache_;
  const int64_t slot_, row_;
  const int head_, kv_head_;
  const float c_;
  Float32Shared<D>& shared_;
  const int thread_, warp_, lane_;
};

template <int D>
__global__ void __launch_bounds__(kThreads)
    decode_float32_kernel(const __grid_constant__ DecodeAttentionParams params, float c) {
  __shared__ Float32Shared<D> shared;
  start_successor();
  wait_for_predecessor();
  const int index = static_cast<int>(blockIdx.x);
  const int position = params.positions[index], slot = params.slots[index];
  Float32Row<D> row(params.input, slot, index, static_cast<int>(blockIdx.y), c, shared);
  if (position < 0) return row.clear();
  row.append(position);
  row.attend(position, true);
}

template <int D>
__global__ void __launch_bounds__(kThreads)
    prefill_float32_kernel(const __grid_constant__ ChunkParams params, float c) {
  __shared__ Float32Shared<D> shared;
  start_successor();
  wait_for_predecessor();
  const int index = static_cast<int>(blockIdx.x);
  const ChunkPlace place = place_of(params);
  if (index >= place.num_rows) return;
  Float32Row<D> row(params.input, place.slot, index, static_cast<int>(blockIdx.y), c, shared);
  row.load_query();
  row.attend(place.start + index, false);
}

// One block for a row and head.
Grid blocks_of(const AttentionInput& in) {
  return {dim3(static_cast<unsigned>(in.num_rows), static_cast<unsigned>(in.num_q_heads)),
          kThreads};
}

}  // namespace

void decode_attention_float32(const DecodeAttentionParams& params, Stream stream) {
  const AttentionInput& in = params.input;
  for_head_dim("decode_attention", in.cache.head_dim, [&](auto dim) {
    launch("decode_attention", decode_float32_kernel<decltype(dim)::value>, blocks_of(in), stream,
           params, exponent_scale(in.scale));
  });
}

void prefill_attention_float32(const ChunkParams& params, Stream stream) {
  const AttentionInput& in = params.input;
  if (in.num_rows == 0) return;
  check_cache("prefill_attention", in.cache);
  for_head_dim("prefill_attention", in.cache.head_dim, [&](auto dim) {
    launch("prefill_attention", prefill_float32_kernel<decltype(dim)::value>, blocks_of(in), stream,
           params, exponent_scale(in.scale));
  });
}

}  // namespace slotwise::cuda
