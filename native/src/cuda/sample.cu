// A team of blocks draws each row's token; the last to finish moves the slot table on.
#include <algorithm>

#include "launch.cuh"
#include "sample_row.cuh"
#include "slot_table.cuh"

namespace slotwise::cuda {
namespace {

constexpr int32_t kCorrupted = -1;
constexpr int32_t kNoPart = -2;
constexpr int kTeamBlocks = kMaxTeam;
constexpr size_t kFixedShared = 20 * 1024;  // more than the kernel's own

// The workspace: how many rows are done, then each row's token.
struct Workspace {
  uint32_t* rows_done;
  int32_t* tokens;  // [B]

  __device__ explicit Workspace(void* start)
      : rows_done(static_cast<uint32_t*>(start)), tokens(static_cast<int32_t*>(start) + 1) {}
};

struct Shared {
  RowShared row;
  int32_t by_slot[kSampleThreads];
  bool last;
};

// kNoPart for a row that takes no part.
template <int kBlocks>
__device__ int32_t sample_row(const SlotTable& table, const SampleParams& params, int num_staged,
                              int64_t row, Shared& shared, float* staged) {
  const bool decodes = params.slots == nullptr;
  const int64_t slot = decodes ? row : params.slots[row];
  const int position = decodes ? table.row_position[slot] : table.length[slot];
  if (position < 0) return kNoPart;
  if (threadIdx.x == 0) {
    shared.row.draw = {
        table.temperature[slot],
        table.top_k[slot],
        table.top_p[slot],
        table.min_p[slot],
        static_cast<uint64_t>(table.seed[slot]),
        static_cast<uint32_t>(decodes ? position + 1 : position),
    };
  }
  Team<kBlocks>::arrive();
  const RowLogits logits{params.logits + row * params.logits_stride, table.vocab, num_staged};
  RowSampler<kBlocks> sampler(logits, shared.row, staged);
  const uint64_t best = sampler.find_best();
  const uint32_t order = static_cast<uint32_t>(best >> 32);
  const uint32_t infinity = ordered(__int_as_float(kInfinityBits));
  const bool finite = order < infinity && order > ~infinity;
  if (!finite) return kCorrupted;
  const Draw draw = shared.row.draw;
  return draw.temperature == 0.0f ? id_of(best) : sampler.draw(draw);
}

__device__ bool is_end(const SlotTable& table, int slot, int32_t token) {
  const int64_t words = (table.vocab + 31) / 32;
  return table.end_ids[slot * words + token / 32] >> (token % 32) & 1;
}

__device__ void accept(const SlotTable& table, int slot, int32_t token, bool decodes) {
  if (token == kNoPart) return;
  const int32_t length = table.length[slot] + (decodes ? 1 : 0);
  table.length[slot] = length;
  if (token != kCorrupted) table.last_token[slot] = token;
  table.active[slot] =
      token != kCorrupted && !is_end(table, slot, token) && length + 1 < table.max_len[slot];
}

// Every slot, whether it has a row or not.
__device__ void finish_step(const SlotTable& table, const SampleParams& params,
                            const Workspace& workspace, int32_t* by_slot) {
  const bool decodes = params.slots == nullptr;
  const uint32_t step = *table.counter;
  int32_t* ring = table.ring + static_cast<int64_t>(step % static_cast<uint32_t>(table.ring_rows)) *
                                   table.num_slots;
  for (int first = 0; first < table.num_slots; first += kSampleThreads) {
    by_slot[threadIdx.x] = kNoPart;
    __syncthreads();
    for (int row = threadIdx.x; row < params.num_rows; row += kSampleThreads) {
      const int place = (decodes ? row : params.slots[row]) - first;
      // Past the first level's cache: other blocks wrote it during this kernel.
      if (place >= 0 && place < kSampleThreads) by_slot[place] = __ldcg(workspace.tokens + row);
    }
    __syncthreads();
    const int slot = first + threadIdx.x;
    if (slot < table.num_slots) {
      const int32_t token = by_slot[threadIdx.x];
      accept(table, slot, token, decodes);
      set_row(table, slot);
      ring[slot] = token;
    }
  }
  if (threadIdx.x == 0) {
    stamp(table, Stamp::kEnd);
    *table.counter = step + 1;
    *workspace.rows_done = 0;
  }
}

template <int kBlocks>
__global__ void
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__cluster_dims__(kBlocks, 1, 1)
#endif
    __launch_bounds__(kSampleThreads, 1)
        sample_kernel(SlotTable table, SampleParams params, int num_staged) {
  extern __shared__ float staged[];
  __shared__ Shared shared;
  start_successor();
  wait_for_predecessor();
  const int64_t row = blockIdx.x / kBlocks;
  const int32_t token = sample_row<kBlocks>(table, params, num_staged, row, shared, staged);
  if (Team<kBlocks>::rank() != 0) return;
  const Workspace workspace(params.workspace);
  if (threadIdx.x == 0) {
    workspace.tokens[row] = token;
    __threadfence();
    shared.last = atomicAdd(workspace.rows_done, 1u) == params.num_rows - 1;
    __threadfence();
  }
  __syncthreads();
  if (shared.last) finish_step(table, params, workspace, shared.by_slot);
}

// Values of a thread that are kept in shared memory, of those it has.
int staged_values(int64_t vocab, int blocks) {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device), "sample");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "sample");
  const int64_t quads = (vocab + 63) / 64 * 16, threads = blocks * kSampleThreads;
  const int64_t values = 4 * ((quads + threads - 1) / threads);
  const int64_t room = (static_cast<int64_t>(bytes) - static_cast<int64_t>(kFixedShared)) /
                       static_cast<int64_t>(kSampleThreads * sizeof(float));
  return static_cast<int>(std::min(values, room));
}

template <int kBlocks>
void launch_sample(const SlotTable& table, const SampleParams& params, Stream stream) {
  const int num_staged = staged_values(table.vocab, kBlocks);
  const size_t bytes = static_cast<size_t>(num_staged) * kSampleThreads * sizeof(float);
  allow_shared("sample", sample_kernel<kBlocks>, bytes);
  const dim3 blocks(static_cast<unsigned>(params.num_rows * kBlocks));
  launch("sample", sample_kernel<kBlocks>, {blocks, kSampleThreads, bytes}, stream, table, params,
         num_staged);
}

}  // namespace

int64_t sample_workspace(int64_t num_rows, int64_t) {
  return (1 + num_rows) * static_cast<int64_t>(sizeof(int32_t));
}

void sample(const SlotTable& table, const SampleParams& params, Stream stream) {
  if (device_info().major >= 9) {
    launch_sample<kTeamBlocks>(table, params, stream);
  } else {
    launch_sample<1>(table, params, stream);
  }
}

}  // namespace slotwise::cuda
