// One row of logits: the best token, what the filters keep, and the draw. The meaning is that of
// cpu/sample.cpp; logits are not sorted.
//
// With z = (logit - max) / temperature <= 0, tokens are in the order (z descending, id ascending),
// which is that of the integer `ordinal` = (bits of -z) 2^b + id. A filter keeps a prefix, so its
// result is the last ordinal kept. Histograms, each over the bin in which the one before ended,
// narrow down where that is, until few tokens are left; these are sorted. Weights are e^z in 64-bit
// fixed point: sums do not depend on their order.
#pragma once

#include "sample_math.cuh"
#include "team.cuh"

namespace slotwise::cuda {

constexpr int kSampleThreads = 1024;
constexpr int kBatch = 5;  // loads of four logits in flight
constexpr int kBinBits = 9;
constexpr int kBins = 1 << kBinBits;
constexpr int kListed = kBins;  // tokens that are sorted at most
// Of z in a first histogram; the last bin has the rest.
constexpr float kBinsPerUnit = 16.0f;
constexpr float kLeastBinsPerUnit = kBinsPerUnit / 256.0f;
constexpr float kWeightUnit = 17592186044416.0f;  // 2^44, the weight of the best token
constexpr float kWeightless = -32.0f;             // z of tokens whose weight is 0
constexpr uint32_t kInfinityBits = 0x7f800000u;

// In the initialisers of a template's members the host compiler does not know the intrinsic.
__device__ __forceinline__ float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }

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
  uint64_t seed;
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;
};

struct RowShared {
  Histogram histogram[2];
  uint64_t found[kListed];   // ordinals of this block
  uint64_t listed[kListed];  // of the team
  uint64_t sorted[kListed];
  int num_found;
  uint64_t mail[2][kMaxTeam];
  uint64_t warp[32];
  Choice choice;
  uint64_t last;
};

// What is added up.
enum class By { kCount, kWeight };

__device__ __forceinline__ uint64_t fixed_weight(float z) {
  return __float2ull_rn(exp_of(z) * kWeightUnit);
}

__device__ __forceinline__ uint32_t key_of(float z) { return __float_as_uint(z) & 0x7fffffffu; }

__device__ __forceinline__ int first_bin_of(float z, float bins_per_unit) {
  const float distance = z * -bins_per_unit;
  return distance < kBins - 1 ? static_cast<int>(distance) : kBins - 1;
}

// The least key of a bin of the first histogram.
__device__ __forceinline__ uint32_t first_bin_key(int bin, float bins_per_unit) {
  return __float_as_uint(static_cast<float>(bin) / bins_per_unit);
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

// Of a thread's four logits, in its turn-th time, among all fours.
template <int kBlocks>
__device__ __forceinline__ int place_of(int turn) {
  return (turn * kBlocks + Team<kBlocks>::rank()) * kSampleThreads + threadIdx.x;
}

// A row's logits; `past` stands for those past the vocabulary.
class LogitsRow {
 public:
  __device__ LogitsRow(const float* logits, int vocab, float past)
      : logits_(logits),
        vocab_(vocab),
        aligned_(reinterpret_cast<uintptr_t>(logits) % sizeof(float4) == 0),
        past_(past) {}

  __device__ __forceinline__ float load(int id) const { return id < vocab_ ? logits_[id] : past_; }

  __device__ __forceinline__ void load4(int id, float (&x)[4]) const {
    if (aligned_ && id + 4 <= vocab_) {
      const float4 four = *reinterpret_cast<const float4*>(logits_ + id);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = load(id + i);
    }
  }

 private:
  const float* logits_;  // [V]
  int vocab_;
  bool aligned_;
  float past_;
};

// A team's work on its row. Logits are read from memory once and then from the first level's cache.
// A thread's turn is four logits of consecutive ids or, where noise is drawn, a quad: four tokens
// that share a counter of the noise.
template <int kBlocks>
class RowSampler {
 public:
  __device__ RowSampler(const float* logits, int vocab, RowShared& shared)
      : row_(logits, vocab, -float_of_bits(kInfinityBits)), vocab_(vocab), shared_(shared) {
    const int num_quads = (vocab + 63) / 64 * 16;
    constexpr int kTeamThreads = kBlocks * kSampleThreads;
    num_turns_ = (num_quads + kTeamThreads - 1) / kTeamThreads;
    id_bits_ = 32 - __clz(4 * num_turns_ * kTeamThreads - 1);
    for (int i = threadIdx.x; i < 2 * kBins; i += kSampleThreads) clear(i / kBins, i % kBins);
    if (threadIdx.x == 0) shared_.num_found = 0;
  }

  // The best token as a candidate; all ones for a row with a NaN.
  __device__ uint64_t find_best() {
    float best = -__int_as_float(kInfinityBits);
    int best_id = -1;
    bool nan = false;
    for (int turn = 0; turn < num_turns_; turn += kBatch) {
      float x[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) row_.load4(4 * place(turn + i), x[i]);
#pragma unroll
      for (int i = 0; i < 4 * kBatch; ++i) {
        const float logit = x[i / 4][i % 4];
        nan |= logit != logit;
        if (logit > best) {
          best = logit;
          best_id = 4 * place(turn + i / 4) + i % 4;
        }
      }
    }
    thread_best_ = best;
    const uint64_t key = reduce(nan ? ~uint64_t{0} : candidate(best, best_id), Max{});
    best_ = value_of(key);
    best_id_ = id_of(key);
    return key;
  }

  // The token drawn from what the filters keep, in the first thread of the team; after find_best.
  __device__ int draw(const Draw& params, uint32_t position) {
    temperature_ = params.temperature;
    uint64_t last = last_ordinal(kInfinityBits);
    if (params.min_p > 0.0f) last = last_ordinal(key_of(logf(params.min_p)));
    uint64_t last_kept = last_ordinal(kInfinityBits);
    if (params.top_k > 0 && params.top_k < vocab_) {
      const uint64_t end = last_ordinal(end_of_count(params.top_k));
      if (params.top_k <= kListed) {
        const int count = list(0, end);
        if (count <= kListed) return draw_listed(count, last, params, position);
      }
      last_kept = find_last<By::kCount>(0, end, vocab_, 0, params.top_k);
    }
    if (params.top_p < 1.0f) last_kept = cut_to_weight(last_kept, params.top_p);
    return best_noisy(min(last, last_kept), position, params.seed);
  }

 private:
  struct Max {
    __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
  };
  struct Sum {
    __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
  };

  __device__ int place(int turn) const { return place_of<kBlocks>(turn); }

  __device__ int id_in_quad(int turn, int part) const {
    const int quad = place(turn);
    return quad / 16 * 64 + part * 16 + quad % 16;
  }

  __device__ float scale(float logit) const { return __fdiv_rn(logit - best_, temperature_); }

  // No smaller logit has a z of `z` or more; a little less than the least that has.
  __device__ float least_logit(float z) const {
    const double wanted = (static_cast<double>(z) - 1e-44) * 1.000001;
    return __double2float_rd(static_cast<double>(best_) + wanted * temperature_);
  }

  __device__ uint64_t ordinal(uint32_t key, int id) const {
    return static_cast<uint64_t>(key) << id_bits_ | static_cast<uint32_t>(id);
  }

  __device__ uint64_t last_ordinal(uint32_t key) const { return ordinal(key, (1 << id_bits_) - 1); }

  __device__ float z_of(uint64_t ordinal) const {
    return -__uint_as_float(static_cast<uint32_t>(ordinal >> id_bits_));
  }

  __device__ int id_of_ordinal(uint64_t ordinal) const {
    return static_cast<int>(ordinal) & ((1 << id_bits_) - 1);
  }

  // Calls with the ordinal and z of this thread's tokens in [first, last].
  template <typename Call>
  __device__ void each_in(uint64_t first, uint64_t last, const Call& call) const {
    const float least = least_logit(z_of(last));
    for (int turn = 0; turn < num_turns_; ++turn) {
      float logits[4];
      row_.load4(4 * place(turn), logits);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (logits[i] < least) continue;
        const float z = scale(logits[i]);
        const uint64_t at = ordinal(key_of(z), 4 * place(turn) + i);
        if (first <= at && at <= last) call(at, z);
      }
    }
  }

  __device__ void clear(int which, int bin) {
    Histogram& histogram = shared_.histogram[which];
    histogram.count[bin] = histogram.low[bin] = histogram.high[bin] = 0;
  }

  // Over all threads of the block; in the first warp.
  template <typename Combine>
  __device__ uint64_t reduce_block(uint64_t x, Combine combine) {
    const auto over_lanes = [&] {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        x = combine(x, __shfl_xor_sync(0xffffffff, x, distance));
      }
    };
    over_lanes();
    if (threadIdx.x % 32 == 0) shared_.warp[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
      x = shared_.warp[threadIdx.x];
      over_lanes();
    }
    return x;
  }

  // Over all threads of the team; the same in each. Two rounds of mail: while one is read, a block
  // ahead may write the next.
  template <typename Combine>
  __device__ uint64_t reduce(uint64_t x, Combine combine) {
    x = reduce_block(x, combine);
    uint64_t* mail = shared_.mail[++mails_ % 2];
    if (mails_ == 1) Team<kBlocks>::wait();
    if (threadIdx.x < kBlocks) {
      Team<kBlocks>::in_block(mail, threadIdx.x)[Team<kBlocks>::rank()] = x;
    }
    Team<kBlocks>::sync();
    x = mail[0];
#pragma unroll
    for (int block = 1; block < kBlocks; ++block) x = combine(x, mail[block]);
    return x;
  }

  // The sum up to and with this thread's x, over the first kBins threads.
  __device__ uint64_t running_sum(uint64_t x) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp < kBins / 32) {
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t lower = __shfl_up_sync(0xffffffff, x, distance);
        if (lane >= distance) x += lower;
      }
      if (lane == 31) shared_.warp[warp] = x;
    }
    __syncthreads();
#pragma unroll
    for (int other = 0; other < kBins / 32; ++other) {
      if (other < warp) x += shared_.warp[other];
    }
    return x;
  }

  // Fills the next histogram by `fill` in every block and finds where the sum of the bins, from
  // `before`, reaches `target`.
  template <By kBy, typename Fill>
  __device__ Choice choose(uint64_t before, uint64_t target, const Fill& fill) {
    const int which = ++histograms_ % 2, bin = threadIdx.x;
    fill(shared_.histogram[which]);
    Team<kBlocks>::sync();
    // The team has done with the histogram and the list before this.
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
    if (threadIdx.x == 0) {
      shared_.choice.bin = -1;
      shared_.num_found = 0;
    }
    const uint64_t after = before + running_sum(amount);
    if (bin < kBins && after >= target && after - amount < target) {
      shared_.choice = {bin, count, after - amount, after};
    }
    __syncthreads();
    return shared_.choice;
  }

  // Sorts the team's tokens in [first, last], in every block; their number. Nothing where there are
  // more than kListed. At least one `choose` before each call.
  __device__ int list(uint64_t first, uint64_t last) {
    each_in(first, last, [&](uint64_t at, float) {
      const int index = atomicAdd(&shared_.num_found, 1);
      if (index < kListed) shared_.found[index] = at;
    });
    Team<kBlocks>::sync();
    int count = 0;
    const uint64_t* mine = nullptr;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int index = static_cast<int>(threadIdx.x) - count;
      const int found = *Team<kBlocks>::in_block(&shared_.num_found, block);
      if (index >= 0 && index < found) {
        mine = Team<kBlocks>::in_block(shared_.found, block) + index;
      }
      count += found;
    }
    if (count > kListed) return count;
    const uint64_t at = mine != nullptr ? *mine : 0;
    if (mine != nullptr) shared_.listed[threadIdx.x] = at;
    __syncthreads();
    if (mine != nullptr) {
      int rank = 0;
#pragma unroll 8
      for (int i = 0; i < count; ++i) rank += shared_.listed[i] < at;
      shared_.sorted[rank] = at;
    }
    __syncthreads();
    return count;
  }

  // The key that ends a range with at least k tokens: that many threads have one there.
  __device__ uint32_t end_of_count(uint32_t k) {
    const float z = scale(thread_best_);
    for (float unit = kBinsPerUnit; unit >= kLeastBinsPerUnit; unit /= 16.0f) {
      const Choice choice = choose<By::kCount>(0, k, [&](Histogram& histogram) {
        add<By::kCount>(histogram, first_bin_of(z, unit), z);
      });
      if (choice.bin < 0) break;
      if (choice.bin < kBins - 1) return first_bin_key(choice.bin + 1, unit) - 1;
    }
    return kInfinityBits;
  }

  // The last ordinal of the smallest prefix of the sorted tokens that, with `before`, reaches
  // `target`.
  template <By kBy>
  __device__ uint64_t last_listed(int count, uint64_t before, uint64_t target) {
    if constexpr (kBy == By::kCount) return shared_.sorted[target - before - 1];
    const bool is_listed = threadIdx.x < count;
    const uint64_t at = is_listed ? shared_.sorted[threadIdx.x] : 0;
    const uint64_t weight = is_listed ? fixed_weight(z_of(at)) : 0;
    const uint64_t after = before + running_sum(weight);
    if (is_listed && after >= target && after - weight < target) shared_.last = at;
    __syncthreads();
    return shared_.last;
  }

  // The last ordinal of the smallest prefix of [first, last] that, with `before`, reaches `target`.
  // `count`: the tokens there, or more.
  template <By kBy>
  __device__ uint64_t find_last(uint64_t first, uint64_t last, uint32_t count, uint64_t before,
                                uint64_t target) {
    while (first < last) {
      if (count <= kListed) {
        const int listed = list(first, last);
        if (listed <= kListed) return last_listed<kBy>(listed, before, target);
      }
      const int shift = max(0, 64 - __clzll(last - first) - kBinBits);
      const Choice choice = choose<kBy>(before, target, [&](Histogram& histogram) {
        each_in(first, last, [&](uint64_t at, float z) {
          add<kBy>(histogram, static_cast<int>((at - first) >> shift), z);
        });
      });
      first += static_cast<uint64_t>(choice.bin) << shift;
      last = min(last, first + (uint64_t{1} << shift) - 1);
      if (choice.after == target) break;
      count = choice.count;
      before = choice.before;
    }
    return last;
  }

  // Of the tokens up to `last`, the smallest prefix with a share top_p of their weight.
  __device__ uint64_t cut_to_weight(uint64_t last, float top_p) {
    last = min(last, last_ordinal(key_of(kWeightless)));
    uint64_t mine = 0;
    each_in(0, last, [&](uint64_t, float z) { mine += fixed_weight(z); });
    const double total = static_cast<double>(reduce(mine, Sum{}));
    const double share = static_cast<double>(top_p);
    const uint64_t target = max(1ull, __double2ull_ru(share * total));
    // All tokens past this together are too light to matter.
    const double light = 0.5 * (1.0 - share) * total / kWeightUnit / vocab_;
    last = min(last, last_ordinal(key_of(logf(static_cast<float>(light)))));
    const Choice choice = choose<By::kWeight>(0, target, [&](Histogram& histogram) {
      each_in(0, last, [&](uint64_t, float z) {
        add<By::kWeight>(histogram, first_bin_of(z, kBinsPerUnit), z);
      });
    });
    const uint64_t first = ordinal(first_bin_key(choice.bin, kBinsPerUnit), 0);
    if (choice.bin < kBins - 1) {
      last = min(last, last_ordinal(first_bin_key(choice.bin + 1, kBinsPerUnit) - 1));
    }
    return find_last<By::kWeight>(first, last, choice.count, choice.before, target);
  }

  // The draw from the sorted tokens, the best `count` of the row; what lies past `last` is left
  // out.
  __device__ int draw_listed(int count, uint64_t last, const Draw& params, uint32_t position) {
    Team<kBlocks>::arrive();
    uint64_t best = 0;
    if (Team<kBlocks>::rank() == 0) {
      count = min(count, params.top_k);
      const bool is_listed = threadIdx.x < count;
      const uint64_t at = is_listed ? shared_.sorted[threadIdx.x] : 0;
      const float z = z_of(at);
      bool kept = is_listed && at <= last;
      if (params.top_p < 1.0f) {
        const uint64_t weight = is_listed ? fixed_weight(z) : 0;
        const uint64_t after = running_sum(weight);
        if (threadIdx.x == kBins - 1) shared_.last = after;
        __syncthreads();
        const double share = static_cast<double>(params.top_p);
        const double wanted = share * static_cast<double>(shared_.last);
        kept &= after - weight < max(1ull, __double2ull_ru(wanted));
      }
      if (kept) {
        const int id = id_of_ordinal(at);
        best = candidate(z + noise(id, position, params.seed), id);
      }
      best = reduce_block(best, Max{});
    }
    Team<kBlocks>::wait();  // other blocks may have read the list here until now
    return id_of(best);
  }

  __device__ float noise(int id, uint32_t position, uint64_t seed) const {
    return gumbel(word_at(philox(id / 64 * 16 + id % 16, position, seed), id / 16 % 4));
  }

  // The token up to `last` of the largest z + noise. The best token is always among them.
  __device__ int best_noisy(uint64_t last, uint32_t position, uint64_t seed) {
    float best = noise(best_id_, position, seed);
    int best_id = best_id_;
    const float least = least_logit(fmaxf(z_of(last), best - kMaxGumbel));
    for (int turn = 0; turn < num_turns_; ++turn) {
      float logits[4];
      bool any = false;
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        logits[part] = row_.load(id_in_quad(turn, part));
        any |= logits[part] >= least;
      }
      if (!any) continue;
      const Words words = philox(place(turn), position, seed);
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float z = scale(logits[part]);
        if (!may_reach(best, z, words.word[part])) continue;
        const int id = id_in_quad(turn, part);
        if (ordinal(key_of(z), id) > last) continue;
        const float noisy = z + gumbel(words.word[part]);
        if (noisy > best || (noisy == best && id < best_id)) {
          best = noisy;
          best_id = id;
        }
      }
    }
    return id_of(reduce(candidate(best, best_id), Max{}));
  }

  LogitsRow row_;
  int vocab_;
  RowShared& shared_;
  int num_turns_;
  int id_bits_;
  float best_ = 0.0f;  // the largest logit
  int best_id_ = 0;
  float thread_best_ = 0.0f;
  float temperature_ = 1.0f;
  int mails_ = 0;
  int histograms_ = 0;
};

}  // namespace slotwise::cuda
