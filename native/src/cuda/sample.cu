// A team of blocks draws each row's token and moves the row on.
#include <cuda_pipeline.h>

#include "launch.cuh"
#include "sample_row.cuh"
#include "slot_table.cuh"

namespace slotwise::cuda {
namespace {

constexpr int32_t kCorrupted = -1;
constexpr int32_t kNoPart = -2;

// What a row needs of the table; copied to shared memory while its position is read.
struct RowState {
  Draw draw;
  uint32_t step;
  int32_t max_len;
  int32_t scheduled;
};

template <typename T>
__device__ void fetch(T& to, const T* from) {
  __pipeline_memcpy_async(&to, from, sizeof(T));
}

__device__ void fetch_state(const SlotTable& table, int row, RowState& state) {
  fetch(state.step, table.counter);
  fetch(state.max_len, table.max_len + row);
  fetch(state.scheduled, table.scheduled + row);
  fetch(state.draw.temperature, table.temperature + row);
  fetch(state.draw.top_k, table.top_k + row);
  fetch(state.draw.top_p, table.top_p + row);
  fetch(state.draw.min_p, table.min_p + row);
  fetch(state.draw.seed, reinterpret_cast<uint64_t*>(table.seed) + row);
  __pipeline_commit();
}

// In the first thread of the team. `length`: of the slot with the tokens before this one.
template <int kBlocks>
__device__ int32_t sample_row(const float* logits, int vocab, uint32_t length,
                              const RowState& state, RowShared& shared) {
  Team<kBlocks>::arrive();
  RowSampler<kBlocks> sampler(logits, vocab, shared);
  const uint64_t best = sampler.find_best();
  const uint32_t order = static_cast<uint32_t>(best >> 32);
  const uint32_t infinity = ordered(__int_as_float(kInfinityBits));
  const bool finite = order < infinity && order > ~infinity;
  if (!finite) return kCorrupted;
  const Draw draw = state.draw;
  return draw.temperature == 0.0f ? id_of(best) : sampler.draw(draw, length);
}

__device__ int32_t* ring_row(const SlotTable& table, uint32_t step) {
  return table.ring +
         static_cast<int64_t>(step % static_cast<uint32_t>(table.ring_rows)) * table.num_rows;
}

__device__ bool is_end(const SlotTable& table, int row, int32_t token) {
  const int64_t words = (table.vocab + 31) / 32;
  return table.end_ids[row * words + token / 32] >> (token % 32) & 1;
}

// The row's token is drawn, and `length` tokens lie before it.
__device__ void accept(const SlotTable& table, int row, int32_t token, int length,
                       const RowState& state) {
  const bool active =
      token != kCorrupted && !is_end(table, row, token) && length + 1 < state.max_len;
  const bool decodes = active && state.scheduled == kAlways;
  ring_row(table, state.step)[row] = token;
  table.length[row] = length;
  if (token != kCorrupted) table.last_token[row] = token;
  table.active[row] = active;
  if (state.scheduled == kOnce) table.scheduled[row] = kNotScheduled;
  table.row_token[row] = decodes ? token : -1;
  table.row_position[row] = decodes ? length : -1;
}

// One row is done. The last one ends the step; by then every row has read the counter.
__device__ void count_row(const SlotTable& table, const SampleParams& params, uint32_t step) {
  uint32_t* rows_done = static_cast<uint32_t*>(params.workspace);
  if (atomicAdd(rows_done, 1u) != params.num_rows - 1) return;
  *rows_done = 0;
  stamp(table, step, Stamp::kEnd);
  *table.counter = step + 1;
}

// Rows that are not among those of the prompts.
__device__ void skip_others(const SlotTable& table, const SampleParams& params, uint32_t step) {
  for (int row = threadIdx.x; row < table.num_rows; row += kSampleThreads) {
    bool has_part = false;
    for (int part = 0; part < params.num_rows; ++part) has_part |= params.rows[part] == row;
    if (has_part) continue;
    ring_row(table, step)[row] = kNoPart;
    set_row(table, row);
  }
}

template <int kBlocks>
__global__ void
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__cluster_dims__(kBlocks, 1, 1)
#endif
    __launch_bounds__(kSampleThreads, 1) sample_kernel(SlotTable table, SampleParams params) {
  __shared__ RowShared shared;
  __shared__ RowState state;
  start_successor();
  wait_for_predecessor();
  const int part = blockIdx.x / kBlocks;
  const uint32_t rank = Team<kBlocks>::rank();
  const bool decodes = params.rows == nullptr, first = rank == 0 && threadIdx.x == 0;
  const int row = table_row(params.rows, part);
  if (threadIdx.x == 0) fetch_state(table, row, state);
  const int position = decodes ? table.row_position[row] : table.length[row];
  __pipeline_wait_prior(0);
  if (position < 0) {
    if (first) {
      count_row(table, params, state.step);
      ring_row(table, state.step)[row] = kNoPart;
    }
    return;
  }
  const int length = decodes ? position + 1 : position;
  const int32_t token = sample_row<kBlocks>(params.logits + part * params.logits_stride,
                                            table.vocab, length, state, shared);
  if (first) {
    count_row(table, params, state.step);
    accept(table, row, token, length, state);
  }
  if (!decodes && part == 0 && rank == kBlocks - 1) skip_others(table, params, state.step);
}

template <int kBlocks>
void launch_sample(const SlotTable& table, const SampleParams& params, Stream stream) {
  const dim3 blocks(static_cast<unsigned>(params.num_rows * kBlocks));
  launch("sample", sample_kernel<kBlocks>, {blocks, kSampleThreads}, stream, table, params);
}

}  // namespace

int64_t sample_workspace(int64_t, int64_t) { return sizeof(uint32_t); }

void sample(const SlotTable& table, const SampleParams& params, Stream stream) {
  for_team([&](auto blocks) { launch_sample<blocks()>(table, params, stream); });
}

}  // namespace slotwise::cuda
