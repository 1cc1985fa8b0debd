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
  attention(params, num_rows, blocks_);
}

void CpuOps::prefill_attention(const AttentionParams& params, int64_t num_rows, int64_t slot,
                               int64_t start) {
  std::lock_guard<std::mutex> lock(mutex_);
  blocks_.clear();
  for (int64_t row = 0; row < num_rows; row += kBlockRows) {
    blocks_.push_back({row, std::min(kBlockRows, num_rows - row), slot, start + row});
  }
  attention(params, num_rows, blocks_);
}

void CpuOps::attention(const AttentionParams& params, int64_t num_rows,
                       const std::vector<RowBlock>& blocks) {
  if (num_rows == 0) return;
  const int64_t heads = params.num_q_heads, kv_heads = params.cache.num_kv_heads;
  const int64_t dim = params.cache.head_dim, state_size = attention_state_size(dim);
  const int64_t split_size = num_rows * heads * state_size;
  int64_t splits = 0, block_rows = 0;
  for (const RowBlock& block : blocks) {
    splits = std::max(splits, num_splits(block));
    block_rows = std::max(block_rows, block.num_rows);
  }
  // States of as many splits as fit are held at once, behind the totals.
  const int64_t fitting = static_cast<int64_t>(kMaxStateBytes / sizeof(float)) / split_size;
  const int64_t wave = std::clamp(fitting, int64_t{1}, splits);
  states_.reserve(static_cast<size_t>((wave + 1) * split_size) * sizeof(float));
  const int64_t scratch_size = kernels_.attention_scratch(params, block_rows);
  scratch_.reserve(static_cast<size_t>(scratch_size * pool_.num_threads()) * sizeof(float));
  float* const totals = states_.floats();
  float* const parts = totals + split_size;
  const int64_t num_blocks = static_cast<int64_t>(blocks.size());

  for (int64_t first = 0; first < splits; first += wave) {
    const int64_t count = std::min(wave, splits - first);
    pool_.parallel_for(
        num_blocks * kv_heads * count, 1, [&](int64_t begin, int64_t end, int thread) {
          for (int64_t task = begin; task < end; ++task) {
            const RowBlock& block = blocks[static_cast<size_t>(task / count / kv_heads)];
            const int64_t split = task % count;
            if (first + split >= num_splits(block)) continue;
            kernels_.attention_split(
                params, block, task / count % kv_heads, first + split,
                parts + split * split_size + block.first_row * heads * state_size,
                scratch_.floats() + thread * scratch_size);
          }
        });
    pool_.parallel_for(num_blocks, 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t index = begin; index < end; ++index) {
        const RowBlock& block = blocks[static_cast<size_t>(index)];
        const int64_t last = std::min(first + count, num_splits(block));
        const int64_t head_begin = block.first_row * heads;
        const int64_t head_end = head_begin + block.num_rows * heads;
        for (int64_t head = head_begin; head < head_end; ++head) {
          float* total = totals + head * state_size;
          if (first == 0) total[1] = 0.0f;
          for (int64_t split = first; split < last; ++split) {
            const float* part = parts + (split - first) * split_size + head * state_size;
            kernels_.attention_fold(total, part, dim);
          }
          if (last == num_splits(block)) {
            float* out = params.out + head / heads * params.out_stride + head % heads * dim;
            kernels_.attention_finish(total, out, dim);
          }
        }
      }
    });
  }
}

}  // namespace slotwise
