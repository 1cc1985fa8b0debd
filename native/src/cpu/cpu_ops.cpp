#include "slotwise/cpu_ops.h"

#include <algorithm>

namespace slotwise {
namespace {

// Tasks should take some microseconds at least; this is how many elements of an elementwise
// operator or bytes of weights do.
constexpr int64_t kElementsPerTask = 4096;
constexpr int64_t kWeightBytesPerTask = 64 << 10;

int64_t rows_per_task(int64_t row_elements) {
  return std::max(int64_t{1}, kElementsPerTask / std::max(int64_t{1}, row_elements));
}

}  // namespace

CpuOps::CpuOps(int num_threads, const std::string& isa)
    : kernels_(select_kernels(isa)), pool_(num_threads) {}

PackedWeight CpuOps::pack(const PackedWeight::Source& source) {
  std::lock_guard<std::mutex> lock(mutex_);
  return PackedWeight(source, pool_);
}

void CpuOps::linear(const LinearParams& params) {
  if (params.num_rows == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t panels = (params.n + kPanelWidth - 1) / kPanelWidth;
  const int64_t element = params.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t panel_bytes = std::max(int64_t{1}, params.k * kPanelWidth * element);
  const int64_t grain = std::max(int64_t{1}, kWeightBytesPerTask / panel_bytes);
  pool_.parallel_for(panels, grain,
                     [&](int64_t begin, int64_t end, int) { kernels_.linear(params, begin, end); });
}

void CpuOps::embed(const PackedWeight& weight, const EmbedParams& params) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t width = weight.num_cols();
  pool_.parallel_for(params.num_rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t id = params.token_ids[row] - params.first_id;
      float* out = params.out + row * params.out_stride;
      if (id >= 0 && id < weight.num_rows()) {
        weight.read_row(id, out);
      } else {
        std::fill(out, out + width, 0.0f);
      }
    }
  });
}

void CpuOps::rms_norm(const NormParams& params, int64_t num_rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  pool_.parallel_for(num_rows, rows_per_task(params.hidden), [&](int64_t begin, int64_t end, int) {
    kernels_.rms_norm(params, begin, end);
  });
}

void CpuOps::rope_append(const RopeParams& params, int64_t num_rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t heads = params.num_q_heads + 2 * params.cache.num_kv_heads;
  pool_.parallel_for(
      num_rows, rows_per_task(heads * params.cache.head_dim),
      [&](int64_t begin, int64_t end, int) { kernels_.rope_append(params, begin, end); });
}

void CpuOps::silu_mul(const SiluParams& params, int64_t num_rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  pool_.parallel_for(num_rows, rows_per_task(params.inner), [&](int64_t begin, int64_t end, int) {
    kernels_.silu_mul(params, begin, end);
  });
}

}  // namespace slotwise
