// Operators on rows. A row is one block's, and its size alone decides how it is divided, so that
// its bits are the same beside any number of rows.
#include <algorithm>
#include <initializer_list>

#include "dispatch.cuh"
#include "launch.cuh"
#include "norm.cuh"
#include "silu.cuh"
#include "slot_table.cuh"
#include "vectors.cuh"

namespace slotwise::cuda {
namespace {

constexpr int kMaxThreads = kMaxNormThreads;
constexpr int kSiluThreads = 256;

bool aligned(int64_t row_size, std::initializer_list<const void*> pointers) {
  return row_size % kVector == 0 && std::all_of(pointers.begin(), pointers.end(), [](auto* p) {
           return reinterpret_cast<uintptr_t>(p) % 16 == 0;
         });
}

// Calls with a Type and whether rows are aligned.
template <typename Call>
void dispatch(DType dtype, bool is_aligned, const Call& call) {
  for_dtype(dtype, [&](auto type) {
    if (is_aligned) {
      call(type, std::true_type{});
    } else {
      call(type, std::false_type{});
    }
  });
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads) embed_kernel(EmbedParams p, SlotTable table) {
  // In this order: decode attention reads the cache and the positions before its own wait, the
  // exception to launch.cuh's rule, and what wrote them is complete once this starts its
  // successors.
  wait_for_predecessor();
  start_successor();
  const int64_t row = blockIdx.x;
  if (table.stamps != nullptr && row == 0 && threadIdx.x == 0) {
    stamp(table, *table.counter, Stamp::kStart);
  }
  const int64_t id = p.token_ids[row] - p.first_id;
  const bool known = id >= 0 && id < p.n;
  const T* weight = static_cast<const T*>(p.weight) + (known ? id : 0) * p.hidden;
  float* out = p.out + row * p.hidden;
  for (int64_t at = threadIdx.x * kVector; at < p.hidden; at += blockDim.x * kVector) {
    float values[kVector] = {};
    if (known) load8<kAligned>(weight + at, p.hidden - at, values);
    store8<kAligned>(out + at, p.hidden - at, values);
  }
}

// The residual's values from `at`, after the delta was added.
template <typename T, bool kAligned>
__device__ __forceinline__ void updated_residual(const NormParams& p, int64_t at, int64_t count,
                                                 float (&x)[kVector]) {
  load8<kAligned>(p.residual + at, count, x);
  if (p.delta == nullptr) return;
  float delta[kVector];
  load8<kAligned>(static_cast<const T*>(p.delta) + at, count, delta);
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] += delta[i];
  store8<kAligned>(p.residual + at, count, x);
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads) norm_kernel(NormParams p) {
  // Most rows have no more than one vector a thread, which then stays in registers.
  const int64_t row = blockIdx.x * p.hidden, first = threadIdx.x * kVector;
  const int64_t step = blockDim.x * kVector;
  float weight[kVector] = {}, held[kVector] = {};
  if (first < p.hidden) load8<kAligned>(p.weight + first, p.hidden - first, weight);
  wait_for_predecessor();
  // Not before: two products' loads at once would hold up the one that is waited for.
  start_successor();
  float squares = 0.0f;
  for (int64_t at = first; at < p.hidden; at += step) {
    float x[kVector];
    updated_residual<T, kAligned>(p, row + at, p.hidden - at, x);
    squares = add_squares(squares, x);
    if (at != first) continue;
#pragma unroll
    for (int i = 0; i < kVector; ++i) held[i] = x[i];
  }
  const float scale = norm_scale(block_sum(squares), p.hidden, p.eps);
  for (int64_t at = first; at < p.hidden; at += step) {
    if (at != first) {
      load8<kAligned>(p.residual + row + at, p.hidden - at, held);
      load8<kAligned>(p.weight + at, p.hidden - at, weight);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) held[i] = norm_value(held[i], scale, weight[i]);
    store8<kAligned>(static_cast<T*>(p.out) + row + at, p.hidden - at, held);
  }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kSiluThreads) silu_kernel(SiluParams p) {
  start_successor();
  wait_for_predecessor();
  const int64_t size = p.num_rows * p.inner;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kSiluThreads + threadIdx.x) * kVector;
  if (at >= size) return;
  const T* gate_up = static_cast<const T*>(p.gate_up) + 2 * at;
  const int64_t count = 2 * (size - at);
  float low[kVector], high[kVector], out[kVector];
  load8<kAligned>(gate_up, count, low);
  load8<kAligned>(gate_up + kVector, count - kVector, high);
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    out[i] = silu_times(low[2 * i], low[2 * i + 1]);
    out[kVector / 2 + i] = silu_times(high[2 * i], high[2 * i + 1]);
  }
  store8<kAligned>(static_cast<T*>(p.out) + at, size - at, out);
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads) bias_kernel(BiasParams p) {
  start_successor();
  wait_for_predecessor();
  T* row = static_cast<T*>(p.x) + static_cast<int64_t>(blockIdx.x) * p.n;
  for (int64_t at = threadIdx.x * kVector; at < p.n; at += blockDim.x * kVector) {
    float x[kVector], bias[kVector];
    load8<kAligned>(row + at, p.n - at, x);
    load8<kAligned>(p.bias + at, p.n - at, bias);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] += bias[i];
    store8<kAligned>(row + at, p.n - at, x);
  }
}

Grid block_per_row(int64_t num_rows, int64_t size) {
  return {dim3(static_cast<unsigned>(num_rows)), norm_threads(size)};
}

}  // namespace

void launch_embed(const EmbedParams& params, const SlotTable& table, Stream stream) {
  if (params.num_rows == 0) return;
  const Grid grid = block_per_row(params.num_rows, params.hidden);
  dispatch(params.dtype, aligned(params.hidden, {params.weight, params.out}),
           [&](auto type, auto is_aligned) {
             launch("embed", embed_kernel<typename decltype(type)::type, is_aligned.value>, grid,
                    stream, params, table);
           });
}

void embed(const EmbedParams& params, Stream stream) { launch_embed(params, SlotTable{}, stream); }

void rms_norm(const NormParams& params, Stream stream) {
  if (params.num_rows == 0) return;
  const Grid grid = block_per_row(params.num_rows, params.hidden);
  dispatch(params.dtype,
           aligned(params.hidden, {params.residual, params.delta, params.weight, params.out}),
           [&](auto type, auto is_aligned) {
             launch("rms_norm", norm_kernel<typename decltype(type)::type, is_aligned.value>, grid,
                    stream, params);
           });
}

void silu_mul(const SiluParams& params, Stream stream) {
  const int64_t size = params.num_rows * params.inner;
  if (size == 0) return;
  const int64_t per_block = kSiluThreads * kVector;
  const Grid grid{dim3(static_cast<unsigned>((size + per_block - 1) / per_block)), kSiluThreads};
  dispatch(params.dtype, aligned(size, {params.gate_up, params.out}),
           [&](auto type, auto is_aligned) {
             launch("silu_mul", silu_kernel<typename decltype(type)::type, is_aligned.value>, grid,
                    stream, params);
           });
}

void add_bias(const BiasParams& params, Stream stream) {
  if (params.num_rows == 0) return;
  const Grid grid = block_per_row(params.num_rows, params.n);
  dispatch(params.dtype, aligned(params.n, {params.x, params.bias}),
           [&](auto type, auto is_aligned) {
             launch("add_bias", bias_kernel<typename decltype(type)::type, is_aligned.value>, grid,
                    stream, params);
           });
}

}  // namespace slotwise::cuda
