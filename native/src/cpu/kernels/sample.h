// Passes over one row of logits. The random numbers are Philox4x32-10 (Salmon, Moraes, Dror, Shaw:
// Parallel random numbers: as easy as 1, 2, 3, SC 2011).
#pragma once

#include "kernels/math.h"
#include "slotwise/kernels.h"

namespace slotwise {
namespace {

LogitScan scan_logits(const float* logits, int64_t vocab) {
  LogitScan scan{-__builtin_inff(), -1, false};
  bool nan = false;
  for (int64_t i = 0; i < vocab; ++i) {
    nan |= logits[i] != logits[i];
    if (logits[i] > scan.max) {
      scan.max = logits[i];
      scan.argmax = i;
    }
  }
  scan.valid = !nan && scan.argmax >= 0 && scan.max < __builtin_inff();
  return scan;
}

void scale_logits(const float* logits, int64_t vocab, float max, float temperature, float* scaled,
                  float* weights) {
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    const F z = (load(logits + i) - set1(max)) / set1(temperature);
    store(scaled + i, z);
    store(weights + i, vexp(z));
  }
  if (i < vocab) {
    const int64_t count = vocab - i;
    const F z = (load_part(logits + i, count) - set1(max)) / set1(temperature);
    store_part(scaled + i, z, count);
    store_part(weights + i, vexp(z), count);
  }
}

// Four words for each of 16 counters (block, position, 0, 0) under one key.
struct Random {
  I word[4];
};
inline Random philox(I block, uint32_t position, uint64_t seed) {
  const I zero = iset1(0);
  Random c{{block, iset1(static_cast<int32_t>(position)), zero, zero}};
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Product a = multiply(c.word[0], 0xD2511F53u), b = multiply(c.word[2], 0xCD9E8D57u);
    c.word[0] = b.high ^ c.word[1] ^ iset1(static_cast<int32_t>(key0));
    c.word[2] = a.high ^ c.word[3] ^ iset1(static_cast<int32_t>(key1));
    c.word[1] = b.low;
    c.word[3] = a.low;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// -log(-log(1 - v)) for v = (word + 1/2) / 2^32. Large noise comes from small v, which is kept at
// full relative precision; v is held below 1.
inline F gumbel(I word) {
  const F high = to_float(shift_right(word, 16)), low = to_float(word & iset1(0xffff));
  F v = fma(high, set1(65536.0f), low + set1(0.5f)) * set1(2.3283064365386963e-10f);
  v = vmin(v, set1(0.99999994f));
  const F u = set1(1.0f) - v;
  const F rounding = (set1(1.0f) - u) - v;
  const F exponential = set1(0.0f) - (vlog(u) + rounding / u);
  return set1(0.0f) - vlog(exponential);
}

// No noise is larger: the smallest v is 2^-33, whose noise is 22.9.
constexpr float kMaxGumbel = 23.5f;

// The best so far in each lane.
struct Best {
  F value;
  I id;
};

// The largest of 64 scaled logits, NaN-free, those past the vocabulary left out.
inline float block_max(const float* scaled, int64_t count) {
  F best = set1(-__builtin_inff());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) best = vmax(best, load(scaled + i));
  float result = max_lanes(best);
  for (; i < count; ++i) result = scaled[i] > result ? scaled[i] : result;
  return result;
}

// Adds noise to up to 64 tokens from id `first` and keeps the best that lie within the cutoff.
// Token id i uses word (i / 16) % 4 of counter i / 64 * 16 + i % 16.
inline void draw_block(const float* scaled, int64_t first, int64_t vocab, Cutoff cutoff,
                       uint64_t seed, uint32_t position, Best& best) {
  const int32_t lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const I lane = iload(lanes), end = iset1(static_cast<int32_t>(vocab));
  const F bound = set1(cutoff.scaled), minus_infinity = set1(-__builtin_inff());
  const I ties_end = iset1(static_cast<int32_t>(cutoff.last_tie + 1));
  const Random random = philox(iset1(static_cast<int32_t>(first / 4)) + lane, position, seed);
  for (int part = 0; part < 4 && first + part * kLanes < vocab; ++part) {
    const int64_t at = first + part * kLanes;
    const I id = iset1(static_cast<int32_t>(at)) + lane;
    const F z = load_part(scaled + at, min64(kLanes, vocab - at));
    const I kept = (less(bound, z) | (equal(bound, z) & iless(id, ties_end))) & iless(id, end);
    const F noisy = select(kept, z + gumbel(random.word[part]), minus_infinity);
    const I better = less(best.value, noisy);
    best.value = select(better, noisy, best.value);
    best.id = iselect(better, id, best.id);
  }
}

int64_t gumbel_argmax(const float* scaled, int64_t vocab, Cutoff cutoff, uint64_t seed,
                      uint32_t position) {
  Best best{set1(-__builtin_inff()), iset1(-1)};
  float reached = -__builtin_inff();
  for (int64_t first = 0; first < vocab; first += 4 * kLanes) {
    const float most = block_max(scaled + first, min64(4 * kLanes, vocab - first));
    if (most < cutoff.scaled || most + kMaxGumbel < reached) continue;  // nothing here can win
    draw_block(scaled, first, vocab, cutoff, seed, position, best);
    reached = max_lanes(best.value);
  }
  float values[kLanes];
  int32_t ids[kLanes];
  store(values, best.value);
  std::memcpy(ids, &best.id, sizeof(ids));
  int winner = 0;
  for (int i = 1; i < kLanes; ++i) {
    const bool lower_tie = values[i] == values[winner] && ids[i] >= 0 && ids[i] < ids[winner];
    if (values[i] > values[winner] || lower_tie) winner = i;
  }
  return ids[winner];
}

}  // namespace
}  // namespace slotwise
