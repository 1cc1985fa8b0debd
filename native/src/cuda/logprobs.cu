// Logprobs of the tokens that a step drew, and of the best tokens of each row. A team of blocks
// reads its row twice: for the best token of every thread, then for the sum and the best of all.
//
// A token is a key (`candidate`): larger for a better one, and no two are equal. The n best tokens
// of a block lie in the n threads whose own best are best, and these in the n groups of threads of
// which the same is true. So the lists that are sorted on the way are short, whatever the logits
// are. Weights are in fixed point, as in sample_row.cuh: sums do not depend on their order.
#include "launch.cuh"
#include "sample_row.cuh"
#include "slot_table.cuh"

namespace slotwise::cuda {
namespace {

constexpr int kWarps = kSampleThreads / 32;
constexpr int kGroup = 8;                                   // threads
constexpr uint64_t kLeastKey = uint64_t{0x007fffff} << 32;  // no token has a lesser one
constexpr uint32_t kPastBits = 0xffffffff;                  // a NaN: less and greater than nothing

template <int kCapacity>
struct KeyList {
  static_assert(kCapacity <= kSampleThreads, "a thread sorts one key");
  uint64_t keys[kCapacity];
  int count;
};

struct LogprobsShared {
  KeyList<kSampleThreads / kGroup> groups;
  KeyList<kGroup * kMaxLogprobs> threads;
  KeyList<(1 + 4 * kBatch) * kMaxLogprobs> tokens;
  uint64_t warp_sums[kWarps];
  uint32_t warp_better[kWarps];
  uint64_t best[kMaxTeam];  // of every block of the team
  // In the first block of the team: what each of them found.
  KeyList<kMaxTeam * kMaxLogprobs> team;
  uint64_t sums[kMaxTeam];
  uint32_t better[kMaxTeam];
};

template <int kCapacity>
__device__ __forceinline__ void push(KeyList<kCapacity>& list, uint64_t key) {
  list.keys[atomicAdd(&list.count, 1)] = key;
}

// Sorts the list that the block has pushed to and keeps its n largest keys. Returns the least of
// them, or kLeastKey where there are fewer than n. By all threads.
template <int kCapacity>
__device__ uint64_t keep_best(KeyList<kCapacity>& list, int n) {
  __syncthreads();
  const int count = list.count;
  uint64_t key = 0;
  int rank = n;
  if (threadIdx.x < count) {
    key = list.keys[threadIdx.x];
    rank = 0;
#pragma unroll 8
    for (int i = 0; i < count; ++i) rank += list.keys[i] > key;
  }
  __syncthreads();
  if (rank < n) list.keys[rank] = key;
  if (threadIdx.x == 0) list.count = min(count, n);
  __syncthreads();
  return count < n ? kLeastKey : list.keys[n - 1];
}

__device__ __forceinline__ uint64_t max_of_group(uint64_t key) {
#pragma unroll
  for (int distance = kGroup / 2; distance > 0; distance /= 2) {
    key = max(key, __shfl_xor_sync(0xffffffff, key, distance));
  }
  return key;
}

__device__ __forceinline__ uint64_t sum_of_warp(uint64_t x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffff, x, distance);
  }
  return x;
}

// A row's work. n: the best tokens to find, at least 1, at most V. Of a row from which nothing
// could be drawn the results mean nothing.
template <int kBlocks>
class RowLogprobs {
 public:
  __device__ RowLogprobs(const float* logits, int vocab, int32_t drawn, int n,
                         LogprobsShared& shared)
      : row_(logits, vocab, float_of_bits(kPastBits)),
        vocab_(vocab),
        num_turns_((vocab + 4 * kBlocks * kSampleThreads - 1) / (4 * kBlocks * kSampleThreads)),
        drawn_(drawn),
        drawn_logit_(logits[drawn]),
        n_(n),
        shared_(shared) {
    if (threadIdx.x == 0) {
      shared_.groups.count = shared_.threads.count = shared_.tokens.count = 0;
      shared_.team.count = kBlocks * n;
    }
    __syncthreads();
  }

  // Afterwards the first block of the team has the results, in all of its threads.
  __device__ void run() {
    Team<kBlocks>::arrive();
    const uint32_t rank = Team<kBlocks>::rank();
    const uint64_t thread_best = best_of_thread();
    const uint64_t group_best = max_of_group(thread_best);
    if (threadIdx.x % kGroup == 0 && group_best != 0) push(shared_.groups, group_best);
    uint64_t least = keep_best(shared_.groups, n_);
    Team<kBlocks>::wait();
    if (threadIdx.x < kBlocks) {
      const uint64_t best = shared_.groups.count > 0 ? shared_.groups.keys[0] : 0;
      Team<kBlocks>::in_block(shared_.best, threadIdx.x)[rank] = best;
    }
    Team<kBlocks>::arrive();
    if (thread_best >= least) push(shared_.threads, thread_best);
    least = keep_best(shared_.threads, n_);
    Team<kBlocks>::wait();
    find_max();
    add_up(least);
    report(rank);
    Team<kBlocks>::arrive();
    if (rank != 0) return;
    Team<kBlocks>::wait();
    keep_best(shared_.team, n_);
    finish();
  }

  // The results, in the first block.
  __device__ int rank() const { return static_cast<int>(better_) + 1; }
  __device__ float drawn_logprob() const { return logprob(drawn_logit_); }
  __device__ int best_id(int i) const { return id_of(shared_.team.keys[i]); }
  __device__ float best_logprob(int i) const { return logprob(value_of(shared_.team.keys[i])); }

 private:
  // 0 where the thread has no token.
  __device__ uint64_t best_of_thread() const {
    float best = -__int_as_float(kInfinityBits);
    // Where all are -inf, the first one.
    int best_id = 4 * place_of<kBlocks>(0);
    if (best_id >= vocab_) return 0;
    for (int turn = 0; turn < num_turns_; turn += kBatch) {
      each_of_batch(turn, [&](float x, int id) {
        if (x > best) {
          best = x;
          best_id = id;
        }
      });
    }
    return candidate(best, best_id);
  }

  // Of kBatch turns, this thread's logits and their ids.
  template <typename Call>
  __device__ __forceinline__ void each_of_batch(int turn, const Call& call) const {
    float x[kBatch][4];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) row_.load4(4 * place_of<kBlocks>(turn + i), x[i]);
#pragma unroll
    for (int i = 0; i < 4 * kBatch; ++i) {
      call(x[i / 4][i % 4], 4 * place_of<kBlocks>(turn + i / 4) + i % 4);
    }
  }

  __device__ void find_max() {
    uint64_t best = shared_.best[0];
#pragma unroll
    for (int block = 1; block < kBlocks; ++block) best = max(best, shared_.best[block]);
    max_ = value_of(best);
  }

  // The weights of the block's tokens, those better than the drawn one, and the best of those from
  // `least` on: a batch of turns has at most 4 kBatch n of them.
  __device__ void add_up(uint64_t least) {
    const float least_logit = value_of(least);
    for (int turn = 0; turn < num_turns_; turn += kBatch) {
      each_of_batch(turn, [&](float x, int id) {
        sum_ += fixed_weight(x - max_);
        better_ += x > drawn_logit_ || (x == drawn_logit_ && id < drawn_);
        if (x >= least_logit && candidate(x, id) >= least) {
          push(shared_.tokens, candidate(x, id));
        }
      });
      keep_best(shared_.tokens, n_);
    }
  }

  // What the block found, to the first one.
  __device__ void report(uint32_t rank) {
    const uint64_t warp_sum = sum_of_warp(sum_);
    const uint32_t warp_better = __reduce_add_sync(0xffffffff, better_);
    if (threadIdx.x % 32 == 0) {
      shared_.warp_sums[threadIdx.x / 32] = warp_sum;
      shared_.warp_better[threadIdx.x / 32] = warp_better;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    LogprobsShared* first = Team<kBlocks>::in_block(&shared_, 0);
    const uint64_t sum = sum_of_warp(shared_.warp_sums[threadIdx.x]);
    const uint32_t better = __reduce_add_sync(0xffffffff, shared_.warp_better[threadIdx.x]);
    if (threadIdx.x == 0) {
      first->sums[rank] = sum;
      first->better[rank] = better;
    }
    if (threadIdx.x < n_) {
      const bool found = threadIdx.x < shared_.tokens.count;
      first->team.keys[rank * n_ + threadIdx.x] = found ? shared_.tokens.keys[threadIdx.x] : 0;
    }
  }

  __device__ void finish() {
    sum_ = better_ = 0;
    for (int block = 0; block < kBlocks; ++block) {
      sum_ += shared_.sums[block];
      better_ += shared_.better[block];
    }
    log_of_sum_ = log(static_cast<double>(sum_) / static_cast<double>(kWeightUnit));
  }

  __device__ float logprob(float logit) const {
    return static_cast<float>(static_cast<double>(logit) - static_cast<double>(max_) - log_of_sum_);
  }

  LogitsRow row_;
  int vocab_;
  int num_turns_;
  int32_t drawn_;
  float drawn_logit_;
  int n_;
  LogprobsShared& shared_;
  float max_ = 0.0f;
  uint64_t sum_ = 0;     // weights of this thread, then of the row
  uint32_t better_ = 0;  // tokens better than the drawn one, alike
  double log_of_sum_ = 0.0;
};

// By a team. True in the one thread that ends it.
template <int kBlocks>
__device__ bool put_logprobs(const float* logits, int vocab, int32_t token, int count,
                             TokenLogprobs& out, LogprobsShared& shared) {
  const int n = min(max(count, 1), vocab);
  RowLogprobs<kBlocks> work(logits, vocab, token, n, shared);
  work.run();
  if (Team<kBlocks>::rank() != 0 || threadIdx.x >= 32) return false;
  const int i = static_cast<int>(threadIdx.x);
  if (i < min(count, n)) {
    out.best_ids[i] = work.best_id(i);
    out.best_logprobs[i] = work.best_logprob(i);
  }
  if (i != 0) return false;
  out.logprob = work.drawn_logprob();
  out.rank = work.rank();
  return true;
}

template <int kBlocks>
__global__ void
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__cluster_dims__(kBlocks, 1, 1)
#endif
    __launch_bounds__(kSampleThreads, 1) logprobs_kernel(SlotTable table, LogprobsParams params) {
  __shared__ LogprobsShared shared;
  start_successor();
  wait_for_predecessor();
  const int part = blockIdx.x / kBlocks;
  const int row = table_row(params.rows, part);
  const int count = params.counts[row];
  if (count < 0) return;
  // `sample` has counted the step.
  const uint32_t step = *table.counter - 1;
  const uint32_t out_row = step % static_cast<uint32_t>(params.out_rows);
  const bool reports = put_logprobs<kBlocks>(
      params.logits + part * params.logits_stride, table.vocab, table.last_token[row], count,
      params.out[static_cast<int64_t>(out_row) * table.num_rows + row], shared);
  // The step ends here now; rows that end together overwrite each other's.
  if (reports) stamp(table, step, Stamp::kEnd);
}

template <int kBlocks>
__global__ void
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__cluster_dims__(kBlocks, 1, 1)
#endif
    __launch_bounds__(kSampleThreads, 1) token_logprobs_kernel(TokenLogprobsParams params) {
  __shared__ LogprobsShared shared;
  start_successor();
  wait_for_predecessor();
  const int row = blockIdx.x / kBlocks;
  put_logprobs<kBlocks>(params.logits + row * params.logits_stride, params.vocab,
                        params.token_ids[row], params.count, params.out[row], shared);
}

Grid teams(int64_t rows, int blocks) {
  return {dim3(static_cast<unsigned>(rows * blocks)), kSampleThreads};
}

}  // namespace

void logprobs(const SlotTable& table, const LogprobsParams& params, Stream stream) {
  for_team([&](auto blocks) {
    launch("logprobs", logprobs_kernel<blocks()>, teams(params.num_rows, blocks()), stream, table,
           params);
  });
}

void token_logprobs(const TokenLogprobsParams& params, Stream stream) {
  if (params.num_rows == 0) return;
  for_team([&](auto blocks) {
    launch("token_logprobs", token_logprobs_kernel<blocks()>, teams(params.num_rows, blocks()),
           stream, params);
  });
}

}  // namespace slotwise::cuda
