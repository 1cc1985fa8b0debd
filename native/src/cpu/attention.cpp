// How attention is cut into tasks. The arithmetic of a row does not depend on any of it: states of
// splits are folded in index order whatever computes them.
#include <algorithm>

#include "slotwise/cpu_ops.h"

namespace slotwise {
namespace {

constexpr int64_t kBlockRows = 16;
constexpr size_t kMaxStateBytes = size_t{16} << 20;

int64_t num_splits(const RowBlock& block) {
  return (block.first_position + block.num_rows - 1) / kSplitPositions + 1;
}

}  // namespace

void CpuOps::decode_attention(const AttentionParams& params, int64_t num_rows, const int32_t* slots,
                              const int32_t* positions) {
  std::lock_guard<std::mutex> lock(mutex_);
  blocks_.clear();
  for (int64_t row = 0; row < num_rows; ++row) {
    blocks_.push_back({row, 1, slots[row], positions[row]});
  }
  attention(params, num_rows);
}

void CpuOps::prefill_attention(const AttentionParams& params, int64_t num_rows, int64_t slot,
                               int64_t start) {
  std::lock_guard<std::mutex> lock(mutex_);
  blocks_.clear();
  for (int64_t row = 0; row < num_rows; row += kBlockRows) {
    blocks_.push_back({row, std::min(kBlockRows, num_rows - row), slot, start + row});
  }
  attention(params, num_rows);
}

void CpuOps::attention(const AttentionParams& params, int64_t num_rows) {
  if (num_rows == 0) return;
  int64_t splits = 0, block_rows = 0;
  for (const RowBlock& block : blocks_) {
    splits = std::max(splits, num_splits(block));
    block_rows = std::max(block_rows, block.num_rows);
  }
  // States of as many splits as fit are held at once, behind the totals.
  const int64_t split_size =
      num_rows * params.num_q_heads * attention_state_size(params.cache.head_dim);
  const int64_t fitting = static_cast<int64_t>(kMaxStateBytes / sizeof(float)) / split_size;
  const int64_t wave = std::clamp(fitting, int64_t{1}, splits);
  states_.reserve(static_cast<size_t>((wave + 1) * split_size) * sizeof(float));
  const int64_t scratch_size = kernels_.attention_scratch(params, block_rows);
  scratch_.reserve(static_cast<size_t>(scratch_size * pool_.num_threads()) * sizeof(float));
  for (int64_t first = 0; first < splits; first += wave) {
    const SplitWave splits_now{first, std::min(wave, splits - first), split_size};
    attend(params, splits_now, scratch_size);
    fold(params, splits_now);
  }
}

// The states of all blocks, splits of the wave and KV heads; the heads of a position, which are
// neighbours in memory, one after the other.
void CpuOps::attend(const AttentionParams& params, const SplitWave& wave, int64_t scratch_size) {
  const int64_t kv_heads = params.cache.num_kv_heads;
  const int64_t row_size = params.num_q_heads * attention_state_size(params.cache.head_dim);
  const int64_t tasks = static_cast<int64_t>(blocks_.size()) * kv_heads * wave.count;
  float* const parts = states_.floats() + wave.split_size;
  pool_.parallel_for(tasks, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t task = begin; task < end; ++task) {
      const RowBlock& block = blocks_[static_cast<size_t>(task / kv_heads / wave.count)];
      const int64_t split = task / kv_heads % wave.count;
      if (wave.first + split >= num_splits(block)) continue;
      kernels_.attention_split(params, block, task % kv_heads, wave.first + split,
                               parts + split * wave.split_size + block.first_row * row_size,
                               scratch_.floats() + thread * scratch_size);
    }
  });
}

// Adds the wave's states to the totals in index order; writes the rows that are complete.
void CpuOps::fold(const AttentionParams& params, const SplitWave& wave) {
  const int64_t heads = params.num_q_heads, dim = params.cache.head_dim;
  const int64_t state_size = attention_state_size(dim);
  const auto fold_head = [&](const RowBlock& block, int64_t row, int64_t head) {
    float* total = states_.floats() + (row * heads + head) * state_size;
    if (wave.first == 0) total[1] = 0.0f;
    const int64_t last = std::min(wave.first + wave.count, num_splits(block));
    for (int64_t split = wave.first; split < last; ++split) {
      kernels_.attention_fold(total, total + (split - wave.first + 1) * wave.split_size, dim);
    }
    if (last == num_splits(block)) {
      kernels_.attention_finish(total, params.out + row * params.out_stride + head * dim, dim);
    }
  };
  const int64_t num_blocks = static_cast<int64_t>(blocks_.size());
  pool_.parallel_for(num_blocks, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t index = begin; index < end; ++index) {
      const RowBlock& block = blocks_[static_cast<size_t>(index)];
      for (int64_t row = block.first_row; row < block.first_row + block.num_rows; ++row) {
        for (int64_t head = 0; head < heads; ++head) fold_head(block, row, head);
      }
    }
  });
}

}  // namespace slotwise
