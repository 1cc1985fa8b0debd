#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "slotwise/aligned_buffer.h"
#include "slotwise/kernels.h"
#include "slotwise/packed_weight.h"
#include "slotwise/params.h"
#include "slotwise/thread_pool.h"

namespace slotwise {

struct EmbedParams {
  const int32_t* token_ids;  // [T]
  int64_t num_rows;
  int64_t first_id;
  float* out;  // [T, K]
  int64_t out_stride;
};

// The operators on the CPU: cuts the work of each into tasks for the pool. Operators of one object
// run one after the other, whichever threads call them. Arguments must have been checked.
class CpuOps {
 public:
  CpuOps(int num_threads, const std::string& isa);

  int num_threads() const { return pool_.num_threads(); }
  const char* isa() const { return kernels_.isa; }

  PackedWeight pack(const PackedWeight::Source& source);
  void linear(const LinearParams& params);
  void embed(const PackedWeight& weight, const EmbedParams& params);
  void rms_norm(const NormParams& params, int64_t num_rows);
  void rope_append(const RopeParams& params, int64_t num_rows);
  void silu_mul(const SiluParams& params, int64_t num_rows);
  // Rows of many slots, one each.
  void decode_attention(const AttentionParams& params, int64_t num_rows, const int32_t* slots,
                        const int32_t* positions);
  // Rows at consecutive positions of one slot.
  void prefill_attention(const AttentionParams& params, int64_t num_rows, int64_t slot,
                         int64_t start);
  void sample(const SampleParams& params, int64_t num_rows);
  void logprobs(const LogprobsParams& params, int64_t num_rows);

 private:
  // Splits [first, first + count) whose states are held at once, split_size floats each.
  struct SplitWave {
    int64_t first;
    int64_t count;
    int64_t split_size;
  };

  // Over blocks_.
  void attention(const AttentionParams& params, int64_t num_rows);
  void attend(const AttentionParams& params, const SplitWave& wave, int64_t scratch_size);
  void fold(const AttentionParams& params, const SplitWave& wave);

  std::mutex mutex_;
  const Kernels& kernels_;
  ThreadPool pool_;
  std::vector<RowBlock> blocks_;
  AlignedBuffer states_;
  AlignedBuffer scratch_;
};

}  // namespace slotwise
