// One row of logits: the best token, what the filters keep, and the draw. The meaning is that of
// cpu/sample.cpp; there is no sort.
//
// With z = (logit - max) / temperature <= 0, tokens are in the order (z descending, id ascending),
// which is that of the integer `ordinal` = (bits of -z) 2^b + id. A filter keeps a prefix, so its
// result is the last ordinal kept. It is found by a few histograms, each over the bin in which the
// one before ended. Weights are e^z in 64-bit fixed point: sums do not depend on their order.
#pragma once

#include "sample_math.cuh"
#include "team.cuh"

namespace slotwise::cuda {

constexpr int kSampleThreads = 1024;
constexpr int kBatch = 4;  // loads of four logits in flight
constexpr int kBinBits = 9;
constexpr int kBins = 1 << kBinBits;
constexpr float kBinsPerUnit = 16.0f;  // of z in a first histogram; the last bin has the rest
constexpr float kWeightUnit = 17592186044416.0f;  // 2^44, the weight of the best token
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr int kMaxTeam = 8;

struct Histogram {
  uint32_t count[kBins];
  uint32_t low[kBins], high[kBins];  // halves of the weight
};

// The bin in which a running sum reaches its target; -1 where none does.
struct Choice {
  int bin;
  uint32_t count;
  uint64_t before;  // the sum before the bin
  uint64_t after;
};

// The parameters of a draw, and its key.
struct Draw {
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;
  uint64_t seed;
  uint32_t position;
};

struct RowShared {
  Draw draw;
  Histogram histogram[2];
  uint64_t mail[2][kMaxTeam];
  uint64_t warp[32];
  Choice choice;
};

struct RowLogits {
  const float* logits;  // [V]
  int vocab;
  int num_staged;  // values of a thread that fit shared memory
};

// What a histogram adds up.
enum class By { kCount, kWeight };

__device__ __forceinline__ uint64_t fixed_weight(float z) {
  return __float2ull_rn(exp_of(z) * kWeightUnit);
}

__device__ __forceinline__ uint32_t key_of(float z) { return __float_as_uint(z) & 0x7fffffffu; }

__device__ __forceinline__ int first_bin_of(float z) {
  const float distance = z * -kBinsPerUnit;
  return distance < kBins - 1 ? static_cast<int>(distance) : kBins - 1;
}

// The least key of a bin of the first histogram.
__device__ __forceinline__ uint32_t first_bin_key(int bin) {
  return __float_as_uint(static_cast<float>(bin) / kBinsPerUnit);
}

template <By kBy>
__device__ __forceinline__ void add(Histogram& histogram, int bin, float z) {
  if constexpr (kBy == By::kWeight) {
    const uint64_t weight = fixed_weight(z);
    if (weight == 0) return;
    const uint32_t low = static_cast<uint32_t>(weight);
    const uint32_t old = atomicAdd(&histogram.low[bin], low);
    const uint32_t high = static_cast<uint32_t>(weight >> 32) + (old + low < old);
    if (high != 0) atomicAdd(&histogram.high[bin], high);
  }
  atomicAdd(&histogram.count[bin], 1u);
}

// A team's work on its row. Value j of a thread is part j % 4 of its quad j / 4; a quad has the
// four tokens that share a counter of the noise.
template <int kBlocks>
class RowSampler {
 public:
  __device__ RowSampler(const RowLogits& row, RowShared& shared, float* staged)
      : row_(row), shared_(shared), staged_(staged + threadIdx.x) {
    const int num_quads = (row_.vocab + 63) / 64 * 16;
    constexpr int kTeamThreads = kBlocks * kSampleThreads;
    num_turns_ = (num_quads + kTeamThreads - 1) / kTeamThreads;
    id_bits_ = 32 - __clz(4 * num_turns_ * kTeamThreads - 1);
    for (int i = threadIdx.x; i < 2 * kBins; i += kSampleThreads) clear(i / kBins, i % kBins);
  }

  // The best token as a candidate; all ones for a row with a NaN.
  __device__ uint64_t find_best() {
    float best = -__int_as_float(kInfinityBits);
    int best_id = -1;
    bool nan = false;
    for (int turn = 0; turn < num_turns_; turn += kBatch) {
      float x[4 * kBatch];
#pragma unroll
      for (int i = 0; i < 4 * kBatch; ++i) x[i] = load(4 * turn + i);
#pragma unroll
      for (int i = 0; i < 4 * kBatch; ++i) {
        const int j = 4 * turn + i;
        if (j < row_.num_staged) staged_[j * kSampleThreads] = x[i];
        nan |= x[i] != x[i];
        if (x[i] > best) {
          best = x[i];
          best_id = id_of_value(j);
        }
      }
    }
    thread_best_ = best;
    const uint64_t key = reduce(nan ? ~uint64_t{0} : candidate(best, best_id), Max{});
    best_ = value_of(key);
    best_id_ = id_of(key);
    return key;
  }

  // The token drawn from what the filters keep; after find_best.
  __device__ int draw(const Draw& params) {
    temperature_ = params.temperature;
    for (int j = 0; j < row_.num_staged; ++j) {
      staged_[j * kSampleThreads] = scale(staged_[j * kSampleThreads]);
    }
    uint64_t last = ~uint64_t{0};
    if (params.top_k > 0 && params.top_k < row_.vocab) last = cut_to_count(params.top_k);
    if (params.top_p < 1.0f) last = cut_to_weight(last, params.top_p);
    if (params.min_p > 0.0f) last = min(last, last_ordinal(key_of(logf(params.min_p))));
    return best_noisy(last, params.position, params.seed);
  }

 private:
  struct Max {
    __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
  };
  struct Sum {
    __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
  };

  __device__ int quad_of(int turn) const {
    return (turn * kBlocks + Team<kBlocks>::rank()) * kSampleThreads + threadIdx.x;
  }

  __device__ int id_of_value(int j) const {
    const int quad = quad_of(j / 4);
    return quad / 16 * 64 + j % 4 * 16 + quad % 16;
  }

  // -inf past the vocabulary.
  __device__ float load(int j) const {
    const int id = id_of_value(j);
    return id < row_.vocab ? row_.logits[id] : -__int_as_float(kInfinityBits);
  }

  __device__ float scale(float logit) const { return __fdiv_rn(logit - best_, temperature_); }

  __device__ float value(int j) const {
    return j < row_.num_staged ? staged_[j * kSampleThreads] : scale(load(j));
  }

  __device__ uint64_t ordinal(uint32_t key, int id) const {
    return static_cast<uint64_t>(key) << id_bits_ | static_cast<uint32_t>(id);
  }

  __device__ uint64_t last_ordinal(uint32_t key) const { return ordinal(key, (1 << id_bits_) - 1); }

  // Calls with the ordinal and z of this thread's tokens in [first, last].
  template <typename Call>
  __device__ void each_in(uint64_t first, uint64_t last, const Call& call) const {
    const uint32_t first_key = static_cast<uint32_t>(first >> id_bits_);
    const uint32_t last_key = static_cast<uint32_t>(min(last >> id_bits_, uint64_t{kInfinityBits}));
    for (int turn = 0; turn < num_turns_; ++turn) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float z = value(4 * turn + part);
        const uint32_t key = key_of(z);
        if (key - first_key > last_key - first_key) continue;
        const uint64_t at = ordinal(key, id_of_value(4 * turn + part));
        if (first <= at && at <= last) call(at, z);
      }
    }
  }

  __device__ void clear(int which, int bin) {
    Histogram& histogram = shared_.histogram[which];
    histogram.count[bin] = histogram.low[bin] = histogram.high[bin] = 0;
  }

  // Over all threads of the team; the same in each. Two rounds of mail: while one is read, a block
  // ahead may write the next.
  template <typename Combine>
  __device__ uint64_t reduce(uint64_t x, Combine combine) {
    const auto over_lanes = [&] {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        x = combine(x, __shfl_xor_sync(0xffffffff, x, distance));
      }
    };
    const int lane = threadIdx.x % 32;
    over_lanes();
    if (lane == 0) shared_.warp[threadIdx.x / 32] = x;
    __syncthreads();
    uint64_t* mail = shared_.mail[++mails_ % 2];
    if (mails_ == 1) Team<kBlocks>::wait();
    if (threadIdx.x < 32) {
      x = shared_.warp[lane];
      over_lanes();
      if (lane < kBlocks) Team<kBlocks>::in_block(mail, lane)[Team<kBlocks>::rank()] = x;
    }
    Team<kBlocks>::sync();
    x = mail[0];
#pragma unroll
    for (int block = 1; block < kBlocks; ++block) x = combine(x, mail[block]);
    return x;
  }

  // Fills the next histogram by `fill` in every block and finds where the sum of the bins, from
  // `before`, reaches `target`.
  template <By kBy, typename Fill>
  __device__ Choice choose(uint64_t before, uint64_t target, const Fill& fill) {
    const int which = ++histograms_ % 2, bin = threadIdx.x, lane = threadIdx.x % 32;
    fill(shared_.histogram[which]);
    Team<kBlocks>::sync();
    // The team has done with the one before this.
    uint64_t amount = 0;
    uint32_t count = 0;
    if (bin < kBins) {
      clear(1 - which, bin);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const Histogram* other = Team<kBlocks>::in_block(&shared_.histogram[which], block);
        count += other->count[bin];
        if constexpr (kBy == By::kWeight) {
          amount += static_cast<uint64_t>(other->high[bin]) << 32;
          amount += other->low[bin];
        }
      }
      if constexpr (kBy == By::kCount) amount = count;
    }
    uint64_t after = amount;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint64_t lower = __shfl_up_sync(0xffffffff, after, distance);
      if (lane >= distance) after += lower;
    }
    if (lane == 31) shared_.warp[threadIdx.x / 32] = after;
    if (threadIdx.x == 0) shared_.choice.bin = -1;
    __syncthreads();
    if (bin < kBins) {
      after += before;
      for (int warp = 0; warp < threadIdx.x / 32; ++warp) after += shared_.warp[warp];
      if (after >= target && after - amount < target) {
        shared_.choice = {bin, count, after - amount, after};
      }
    }
    __syncthreads();
    return shared_.choice;
  }

  // The last ordinal of the smallest prefix of [first, last] that, with `before`, reaches `target`.
  template <By kBy>
  __device__ uint64_t find_last(uint64_t first, uint64_t last, uint64_t before, uint64_t target) {
    while (first < last) {
      const int shift = max(0, 64 - __clzll(last - first) - kBinBits);
      const Choice choice = choose<kBy>(before, target, [&](Histogram& histogram) {
        each_in(first, last, [&](uint64_t at, float z) {
          add<kBy>(histogram, static_cast<int>((at - first) >> shift), z);
        });
      });
      first += static_cast<uint64_t>(choice.bin) << shift;
      last = min(last, first + (uint64_t{1} << shift) - 1);
      if (choice.count == 1 || choice.after == target) break;
      before = choice.before;
    }
    return last;
  }

  // The best k tokens. The threads' best alone show how far down one has to look at most.
  __device__ uint64_t cut_to_count(uint32_t k) {
    const Choice choice = choose<By::kCount>(0, k, [&](Histogram& histogram) {
      const float z = scale(thread_best_);
      add<By::kCount>(histogram, first_bin_of(z), z);
    });
    const bool whole = choice.bin < 0 || choice.bin == kBins - 1;
    const uint32_t end = whole ? kInfinityBits : first_bin_key(choice.bin + 1) - 1;
    return find_last<By::kCount>(0, last_ordinal(end), 0, k);
  }

  // Of the tokens up to `last`, the smallest prefix with a share top_p of their weight.
  __device__ uint64_t cut_to_weight(uint64_t last, float top_p) {
    uint64_t mine = 0;
    each_in(0, last, [&](uint64_t, float z) { mine += fixed_weight(z); });
    const double total = static_cast<double>(reduce(mine, Sum{}));
    const double share = static_cast<double>(top_p);
    const uint64_t target = max(1ull, __double2ull_ru(share * total));
    // All tokens past this together are too light to matter.
    const double light = 0.5 * (1.0 - share) * total / kWeightUnit / row_.vocab;
    last = min(last, last_ordinal(key_of(logf(static_cast<float>(light)))));
    const Choice choice = choose<By::kWeight>(0, target, [&](Histogram& histogram) {
      each_in(0, last, [&](uint64_t, float z) { add<By::kWeight>(histogram, first_bin_of(z), z); });
    });
    if (choice.bin < kBins - 1) last = min(last, last_ordinal(first_bin_key(choice.bin + 1) - 1));
    if (choice.count == 1 || choice.after == target) return last;
    return find_last<By::kWeight>(ordinal(first_bin_key(choice.bin), 0), last, choice.before,
                                  target);
  }

  // The token up to `last` of the largest z + noise. The best token is always among them.
  __device__ int best_noisy(uint64_t last, uint32_t position, uint64_t seed) {
    const int best_quad = best_id_ / 64 * 16 + best_id_ % 16;
    float best = gumbel(word_at(philox(best_quad, position, seed), best_id_ / 16 % 4));
    int best_id = best_id_;
    for (int turn = 0; turn < num_turns_; ++turn) {
      float z[4];
      bool any = false;
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        z[part] = value(4 * turn + part);
        const int id = id_of_value(4 * turn + part);
        const bool kept = z[part] + kMaxGumbel >= best && ordinal(key_of(z[part]), id) <= last;
        if (!kept) z[part] = -__int_as_float(kInfinityBits);
        any |= kept;
      }
      if (!any) continue;
      const Words words = philox(quad_of(turn), position, seed);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        if (!may_reach(best, z[part], words.word[part])) continue;
        const int id = id_of_value(4 * turn + part);
        const float noisy = z[part] + gumbel(words.word[part]);
        if (noisy > best || (noisy == best && id < best_id)) {
          best = noisy;
          best_id = id;
        }
      }
    }
    return id_of(reduce(candidate(best, best_id), Max{}));
  }

  const RowLogits row_;
  RowShared& shared_;
  float* staged_;  // value j at [j * kSampleThreads]
  int num_turns_;  // quads of a thread
  int id_bits_;
  float best_ = 0.0f;  // the largest logit
  int best_id_ = 0;
  float thread_best_ = 0.0f;
  float temperature_ = 1.0f;
  int mails_ = 0;
  int histograms_ = 0;
};

}  // namespace slotwise::cuda
