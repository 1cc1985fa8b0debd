// Logprobs of drawn tokens and of the best ones, a row at a time.
#include <algorithm>
#include <cmath>

#include "slotwise/cpu_ops.h"

namespace slotwise {
namespace {

// log of the sum of exp(logit - max). `scratch`: 2 V floats.
double log_of_sum(const Kernels& kernels, const float* logits, int64_t vocab, float max,
                  float* scratch) {
  float* weights = scratch + vocab;
  kernels.scale_logits(logits, vocab, max, 1.0f, scratch, weights);
  // Eight sums, so that additions need not wait for each other.
  double sums[8] = {};
  for (int64_t id = 0; id < vocab; ++id) sums[id % 8] += static_cast<double>(weights[id]);
  double sum = 0.0;
  for (const double part : sums) sum += part;
  return std::log(sum);
}

// The ids of the `count` best tokens, best first.
void find_best(const float* logits, int64_t vocab, int32_t count, int32_t* ids) {
  int32_t found = 0;
  for (int64_t id = 0; id < vocab; ++id) {
    if (found == count && !(count > 0 && logits[id] > logits[ids[count - 1]])) continue;
    int32_t at = found == count ? count - 1 : found++;
    for (; at > 0 && logits[id] > logits[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = static_cast<int32_t>(id);
  }
}

int32_t rank_of(const float* logits, int64_t vocab, int32_t token) {
  int32_t better = 0;
  for (int64_t id = 0; id < vocab; ++id) {
    better += logits[id] > logits[token] || (logits[id] == logits[token] && id < token);
  }
  return better + 1;
}

void row_logprobs(const Kernels& kernels, const LogprobsParams& p, int64_t row, float* scratch) {
  const float* logits = p.logits + row * p.logits_stride;
  TokenLogprobs& out = p.out[row];
  const float max = kernels.scan_logits(logits, p.vocab).max;
  const double all = log_of_sum(kernels, logits, p.vocab, max, scratch);
  const auto logprob = [&](int32_t id) {
    return static_cast<float>(static_cast<double>(logits[id]) - static_cast<double>(max) - all);
  };
  const int32_t token = p.token_ids[row];
  out.logprob = logprob(token);
  out.rank = rank_of(logits, p.vocab, token);
  const auto count = static_cast<int32_t>(std::min(int64_t{p.counts[row]}, p.vocab));
  find_best(logits, p.vocab, count, out.best_ids);
  for (int32_t i = 0; i < count; ++i) out.best_logprobs[i] = logprob(out.best_ids[i]);
}

}  // namespace

void CpuOps::logprobs(const LogprobsParams& params, int64_t num_rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t scratch_size = 2 * params.vocab;
  scratch_.reserve(static_cast<size_t>(scratch_size * pool_.num_threads()) * sizeof(float));
  pool_.parallel_for(num_rows, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t row = begin; row < end; ++row) {
      row_logprobs(kernels_, params, row, scratch_.floats() + thread * scratch_size);
    }
  });
}

}  // namespace slotwise
