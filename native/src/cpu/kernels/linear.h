// Matrix product over packed panels.
#pragma once

#include "kernels/block.h"

namespace slotwise {
namespace {

// How far ahead of use weights are fetched, in bytes. Two rows or more leave the processor's own
// prefetching behind in bfloat16; in float32 it keeps up by itself (measured on Zen 4).
constexpr int kPrefetchBytes = 4096;
struct PrefetchWeights {
  void operator()(const uint16_t* row) const {
    __builtin_prefetch(reinterpret_cast<const char*>(row) + kPrefetchBytes);
  }
  void operator()(const float*) const {}
};

// Adds the bias and stores the columns that exist.
inline void store_columns(const LinearParams& p, int64_t row, int64_t n, NativeF sums) {
  const int64_t count = min64(kNative, p.n - n);
  float* out = p.out + row * p.out_stride + n;
  const NativeF values = sums + native_load(p.bias + n);
  if (count == kNative) {
    native_store(out, values);
  } else if (count > 0) {
    std::memcpy(out, &values, static_cast<size_t>(count) * sizeof(float));
  }
}

template <int Rows, typename Weight>
inline void linear_rows(const LinearParams& p, const Weight* panel, int64_t first_n, int64_t row) {
  constexpr int kGroups = kGroupsFor<Rows>;
  for (int group = 0; group < kParts; group += kGroups) {
    Sums<Rows, kGroups> sums{};
    multiply<Packed>(p.x + row * p.x_stride, p.x_stride, p.k, panel, kPanelWidth, group, sums,
                     PrefetchWeights{});
    for (int m = 0; m < Rows; ++m) {
      for (int g = 0; g < kGroups; ++g) {
        const int64_t n = first_n + (group + g) * kNative;
        store_columns(p, row + m, n, sums.low[m][g]);
        store_columns(p, row + m, n + 16, sums.high[m][g]);
      }
    }
  }
}

template <typename Weight>
void linear_panels(const LinearParams& p, int64_t panel_begin, int64_t panel_end) {
  for (int64_t index = panel_begin; index < panel_end; ++index) {
    const Weight* panel = static_cast<const Weight*>(p.panels) + index * p.k * kPanelWidth;
    for_row_blocks(p.num_rows, [&](int64_t row, auto rows) {
      linear_rows<decltype(rows)::value>(p, panel, index * kPanelWidth, row);
    });
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
