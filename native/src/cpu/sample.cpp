// Which tokens may be drawn. A filter keeps a prefix of the tokens in the order (logit descending,
// id ascending); its end, a Cutoff, is found with a histogram and a sort of one bucket.
#include <algorithm>
#include <cmath>
#include <limits>

#include "slotwise/cpu_ops.h"

namespace slotwise {
namespace {

constexpr int kNumBuckets = 2048;
constexpr float kBucketsPerUnit = 32.0f;  // the last bucket holds everything 64 below the best
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr Cutoff kEverything{-kInfinity, std::numeric_limits<int32_t>::max() - 1};

struct Row {
  const float* scaled;   // [V], 0 for the best
  const float* weights;  // [V], exp(scaled)
  int64_t vocab;
};

// Tokens by how far they lie below the best: bucket 0 has the best ones.
struct Histogram {
  int64_t count[kNumBuckets];
  double weight[kNumBuckets];
};

int bucket_of(float scaled) {
  const float distance = -scaled * kBucketsPerUnit;
  return distance < kNumBuckets - 1 ? static_cast<int>(distance) : kNumBuckets - 1;
}

void fill(const Row& row, Histogram& histogram) {
  std::fill(histogram.count, histogram.count + kNumBuckets, 0);
  std::fill(histogram.weight, histogram.weight + kNumBuckets, 0.0);
  for (int64_t id = 0; id < row.vocab; ++id) {
    const int bucket = bucket_of(row.scaled[id]);
    ++histogram.count[bucket];
    histogram.weight[bucket] += static_cast<double>(row.weights[id]);
  }
}

// The tokens of one bucket, best first.
std::vector<int32_t> sorted_bucket(const Row& row, int bucket) {
  std::vector<int32_t> ids;
  for (int64_t id = 0; id < row.vocab; ++id) {
    if (bucket_of(row.scaled[id]) == bucket) ids.push_back(static_cast<int32_t>(id));
  }
  std::sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    return row.scaled[a] != row.scaled[b] ? row.scaled[a] > row.scaled[b] : a < b;
  });
  return ids;
}

// Keeps the best k tokens and returns their weight.
double cut_to_count(const Row& row, const Histogram& histogram, int64_t k, Cutoff& cutoff) {
  int bucket = 0;
  int64_t count = 0;
  double weight = 0.0;
  while (count + histogram.count[bucket] < k) {
    count += histogram.count[bucket];
    weight += histogram.weight[bucket++];
  }
  const std::vector<int32_t> ids = sorted_bucket(row, bucket);
  const int64_t rest = k - count;
  for (int64_t i = 0; i < rest; ++i) weight += static_cast<double>(row.weights[ids[i]]);
  const int32_t last = ids[rest - 1];
  cutoff = {row.scaled[last], last};
  return weight;
}

bool is_kept(const Row& row, int32_t id, const Cutoff& cutoff) {
  const float scaled = row.scaled[id];
  return scaled > cutoff.scaled || (scaled == cutoff.scaled && id <= cutoff.last_tie);
}

// Of the kept tokens, keeps the smallest prefix whose weight reaches `wanted`.
void cut_to_weight(const Row& row, const Histogram& histogram, double wanted, Cutoff& cutoff) {
  int bucket = 0;
  double weight = 0.0;
  const int last_bucket = bucket_of(cutoff.scaled);
  while (bucket < last_bucket && weight + histogram.weight[bucket] < wanted) {
    weight += histogram.weight[bucket++];
  }
  for (const int32_t id : sorted_bucket(row, bucket)) {
    if (!is_kept(row, id, cutoff)) break;
    weight += static_cast<double>(row.weights[id]);
    if (weight >= wanted) {
      cutoff = {row.scaled[id], id};
      return;
    }
  }
}

void raise_to(float scaled, Cutoff& cutoff) {
  if (scaled > cutoff.scaled) cutoff = {scaled, kEverything.last_tie};
}

Cutoff find_cutoff(const Row& row, int64_t top_k, float top_p, float min_p) {
  Cutoff cutoff = kEverything;
  const bool by_count = top_k > 0 && top_k < row.vocab;
  if (by_count || top_p < 1.0f) {
    Histogram histogram;
    fill(row, histogram);
    double weight = 0.0;
    if (by_count) {
      weight = cut_to_count(row, histogram, top_k, cutoff);
    } else {
      for (const double bucket : histogram.weight) weight += bucket;
    }
    if (top_p < 1.0f) {
      cut_to_weight(row, histogram, static_cast<double>(top_p) * weight, cutoff);
    }
  }
  if (min_p > 0.0f) raise_to(std::log(min_p), cutoff);
  return cutoff;
}

int32_t sample_row(const Kernels& kernels, const SampleParams& p, int64_t row, float* scratch) {
  const float* logits = p.logits + row * p.logits_stride;
  const LogitScan scan = kernels.scan_logits(logits, p.vocab);
  if (!scan.valid) return -1;
  if (p.temperature[row] == 0.0f) return static_cast<int32_t>(scan.argmax);
  float* scaled = scratch;
  float* weights = scratch + p.vocab;
  kernels.scale_logits(logits, p.vocab, scan.max, p.temperature[row], scaled, weights);
  const Cutoff cutoff =
      find_cutoff({scaled, weights, p.vocab}, p.top_k[row], p.top_p[row], p.min_p[row]);
  return static_cast<int32_t>(kernels.gumbel_argmax(scaled, p.vocab, cutoff,
                                                    static_cast<uint64_t>(p.seeds[row]),
                                                    static_cast<uint32_t>(p.positions[row])));
}

}  // namespace

void CpuOps::sample(const SampleParams& params, int64_t num_rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t scratch_size = 2 * params.vocab;
  scratch_.reserve(static_cast<size_t>(scratch_size * pool_.num_threads()) * sizeof(float));
  pool_.parallel_for(num_rows, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t row = begin; row < end; ++row) {
      params.out[row] =
          sample_row(kernels_, params, row, scratch_.floats() + thread * scratch_size);
    }
  });
}

}  // namespace slotwise
