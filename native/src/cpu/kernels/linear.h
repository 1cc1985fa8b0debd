// Matrix product over packed panels. Each output is one chain of fused multiply-adds along k from
// 0, so its bits do not depend on how many rows share a pass over the weights.
#pragma once

#include "kernels/vec.h"

namespace slotwise {
namespace {

constexpr int kMaxRows = kNative == 16 ? 8 : kNative == 8 ? 6 : 4;

// Columns of a panel row come in pairs (n, n + 16): a bfloat16 panel row is 16 words of 32 bits, n
// in the low half and n + 16 in the high one, so that widening is one shift or one mask.
struct Pair {
  NativeF low;
  NativeF high;
};
inline Pair load_pair(const float* row, int group) {
  return {native_load(row + group * kNative), native_load(row + 16 + group * kNative)};
}
inline Pair load_pair(const uint16_t* row, int group) {
  NativeU words;
  std::memcpy(&words, row + 2 * group * kNative, sizeof(words));
  return {bits<NativeF>(words << 16), bits<NativeF>(words & 0xffff0000u)};
}

// Rows [row, row + Rows) of one panel, columns of the native vectors [group, group + Groups).
template <int Rows, int Groups, typename Weight>
inline void linear_block(const LinearParams& p, const Weight* panel, int64_t first_n, int64_t row,
                         int group) {
  const float* x = p.x + row * p.x_stride;
  NativeF low[Rows][Groups] = {};
  NativeF high[Rows][Groups] = {};
  for (int64_t k = 0; k < p.k; ++k) {
    const Weight* weights = panel + k * kPanelWidth;
    Pair pair[Groups];
    for (int g = 0; g < Groups; ++g) pair[g] = load_pair(weights, group + g);
    for (int m = 0; m < Rows; ++m) {
      const NativeF value = native_set1(x[m * p.x_stride + k]);
      for (int g = 0; g < Groups; ++g) {
        low[m][g] = native_fma(value, pair[g].low, low[m][g]);
        high[m][g] = native_fma(value, pair[g].high, high[m][g]);
      }
    }
  }
  const int64_t width = min64(kPanelWidth, p.n - first_n);
  for (int m = 0; m < Rows; ++m) {
    float* out = p.out + (row + m) * p.out_stride + first_n;
    for (int g = 0; g < Groups; ++g) {
      const int at = (group + g) * kNative;
      float values[2][kNative];
      native_store(values[0], low[m][g] + native_load(p.bias + first_n + at));
      native_store(values[1], high[m][g] + native_load(p.bias + first_n + 16 + at));
      for (int half = 0; half < 2; ++half) {
        const int64_t first = at + 16 * half;
        const int64_t count = min64(kNative, width - first);
        if (count > 0) {
          std::memcpy(out + first, values[half], static_cast<size_t>(count) * sizeof(float));
        }
      }
    }
  }
}

template <int Rows, typename Weight>
inline void linear_rows(const LinearParams& p, const Weight* panel, int64_t first_n, int64_t row) {
  for (int group = 0; group < kParts; ++group) {
    linear_block<Rows, 1>(p, panel, first_n, row, group);
  }
}

template <typename Weight, int Rows>
struct RowDispatch {
  static void run(const LinearParams& p, const Weight* panel, int64_t first_n, int64_t row,
                  int64_t rows) {
    if (rows == Rows) {
      linear_rows<Rows>(p, panel, first_n, row);
    } else {
      RowDispatch<Weight, Rows - 1>::run(p, panel, first_n, row, rows);
    }
  }
};
template <typename Weight>
struct RowDispatch<Weight, 0> {
  static void run(const LinearParams&, const Weight*, int64_t, int64_t, int64_t) {}
};

template <typename Weight>
void linear_panels(const LinearParams& p, int64_t panel_begin, int64_t panel_end) {
  const int64_t blocks = (p.num_rows + kMaxRows - 1) / kMaxRows;
  for (int64_t index = panel_begin; index < panel_end; ++index) {
    const Weight* panel = static_cast<const Weight*>(p.panels) + index * p.k * kPanelWidth;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = p.num_rows * block / blocks;
      const int64_t rows = p.num_rows * (block + 1) / blocks - row;
      RowDispatch<Weight, kMaxRows>::run(p, panel, index * kPanelWidth, row, rows);
    }
  }
}

void linear(const LinearParams& p, int64_t panel_begin, int64_t panel_end) {
  if (p.dtype == DType::kFloat32) {
    linear_panels<float>(p, panel_begin, panel_end);
  } else {
    linear_panels<uint16_t>(p, panel_begin, panel_end);
  }
}

}  // namespace
}  // namespace slotwise
