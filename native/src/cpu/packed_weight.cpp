#include "slotwise/packed_weight.h"

#include <algorithm>
#include <cstring>

namespace slotwise {
namespace {

int64_t num_panels(int64_t n) { return (n + kPanelWidth - 1) / kPanelWidth; }

// Where column i of a panel row lies in it.
int64_t place(int64_t i, DType dtype) {
  if (dtype == DType::kFloat32) return i;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  return i % 16 * 2 + i / 16;
#else
  return i % 16 * 2 + 1 - i / 16;
#endif
}

template <typename Weight>
void pack_panel(const PackedWeight::Source& source, int64_t panel, Weight* out) {
  const Weight* weight = static_cast<const Weight*>(source.weight);
  for (int64_t i = 0; i < kPanelWidth; ++i) {
    const int64_t n = panel * kPanelWidth + i;
    Weight* column = out + place(i, source.dtype);
    const Weight* row = n < source.n ? weight + n * source.stride : nullptr;
    for (int64_t k = 0; k < source.k; ++k) column[k * kPanelWidth] = row ? row[k] : Weight{};
  }
}

}  // namespace

PackedWeight::PackedWeight(const Source& source, ThreadPool& pool)
    : n_(source.n), k_(source.k), dtype_(source.dtype) {
  const int64_t panels = num_panels(n_);
  const int64_t element = dtype_ == DType::kFloat32 ? 4 : 2;
  panels_ = AlignedBuffer(static_cast<size_t>(panels * k_ * kPanelWidth * element));
  bias_ = AlignedBuffer(static_cast<size_t>(panels * kPanelWidth) * sizeof(float));
  for (int64_t n = 0; n < panels * kPanelWidth; ++n) {
    bias_.floats()[n] = source.bias != nullptr && n < n_ ? source.bias[n] : 0;
  }
  pool.parallel_for(panels, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t offset = panel * k_ * kPanelWidth;
      if (dtype_ == DType::kFloat32) {
        pack_panel(source, panel, panels_.floats() + offset);
      } else {
        pack_panel(source, panel, static_cast<uint16_t*>(panels_.data()) + offset);
      }
    }
  });
}

void PackedWeight::read_row(int64_t n, float* out) const {
  const int64_t offset = n / kPanelWidth * k_ * kPanelWidth + place(n % kPanelWidth, dtype_);
  if (dtype_ == DType::kFloat32) {
    const float* column = panels_.floats() + offset;
    for (int64_t k = 0; k < k_; ++k) out[k] = column[k * kPanelWidth];
    return;
  }
  const uint16_t* column = static_cast<const uint16_t*>(panels_.data()) + offset;
  for (int64_t k = 0; k < k_; ++k) {
    const uint32_t bits = static_cast<uint32_t>(column[k * kPanelWidth]) << 16;
    std::memcpy(out + k, &bits, sizeof(bits));
  }
}

}  // namespace slotwise
