// The one inner loop of matrix products and attention: a few rows of x against rows of 32 columns.
// Every sum is one chain of fused multiply-adds in the order of k, so its bits do not depend on how
// many rows or columns share the loop.
#pragma once

#include "kernels/vec.h"

namespace slotwise {
namespace {

// Rows of x that share one pass: as many as there are registers for their sums.
constexpr int kMaxRows = kNative == 16 ? 8 : kNative == 8 ? 6 : 4;

// Columns are handled in pairs (i, i + 16) of native vectors; `group` counts them from the left.
struct Pair {
  NativeF low;
  NativeF high;
};

// Columns as they are.
struct Plain {
  template <typename T>
  static Pair load(const T* row, int group) {
    return {native_load(row + group * kNative), native_load(row + 16 + group * kNative)};
  }
};

// Columns of a packed weight: in bfloat16 a row is 16 words of 32 bits with column i in the low
// half and i + 16 in the high one, so that widening is one shift or one mask.
struct Packed {
  static Pair load(const float* row, int group) { return Plain::load(row, group); }
  static Pair load(const uint16_t* row, int group) {
    NativeU words;
    std::memcpy(&words, row + 2 * group * kNative, sizeof(words));
    return {bits<NativeF>(words << 16), bits<NativeF>(words & 0xffff0000u)};
  }
};

// Few rows leave registers for whole rows of 32 columns, which are then read once.
template <int Rows>
constexpr int kGroupsFor = Rows * kParts <= 4 ? kParts : 1;

template <int Rows, int Groups>
struct Sums {
  NativeF low[Rows][Groups];
  NativeF high[Rows][Groups];
};

struct NoPrefetch {
  template <typename T>
  void operator()(const T*) const {}
};

// sums[m] += x[m * x_stride + k] * rows[k * row_stride + column], k ascending from 0.
template <typename Layout, int Rows, int Groups, typename T, typename Prefetch = NoPrefetch>
inline void multiply(const float* x, int64_t x_stride, int64_t count, const T* rows,
                     int64_t row_stride, int group, Sums<Rows, Groups>& sums,
                     Prefetch prefetch = {}) {
  for (int64_t k = 0; k < count; ++k) {
    const T* row = rows + k * row_stride;
    prefetch(row);
    Pair pair[Groups];
    for (int g = 0; g < Groups; ++g) pair[g] = Layout::load(row, group + g);
    for (int m = 0; m < Rows; ++m) {
      const NativeF value = native_set1(x[m * x_stride + k]);
      for (int g = 0; g < Groups; ++g) {
        sums.low[m][g] = native_fma(value, pair[g].low, sums.low[m][g]);
        sums.high[m][g] = native_fma(value, pair[g].high, sums.high[m][g]);
      }
    }
  }
}

template <int Value>
struct Constant {
  static constexpr int value = Value;
};

// Calls body(Constant<rows>) for rows in [1, Max].
template <int Max, typename Body>
inline void with_rows(int64_t rows, const Body& body) {
  if constexpr (Max > 1) {
    if (rows < Max) return with_rows<Max - 1>(rows, body);
  }
  body(Constant<Max>{});
}

// Calls body(first, Constant<rows>) for blocks of at most kMaxRows rows that cover [0, count), as
// even as can be.
template <typename Body>
inline void for_row_blocks(int64_t count, const Body& body) {
  const int64_t blocks = (count + kMaxRows - 1) / kMaxRows;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = count * block / blocks;
    const int64_t rows = count * (block + 1) / blocks - first;
    with_rows<kMaxRows>(rows, [&](auto constant) { body(first, constant); });
  }
}

}  // namespace
}  // namespace slotwise
