// The inner loops of the CPU operators, built once for each instruction set.
//
// A kernel works on the range of rows, panels or blocks it is told, allocates nothing and knows no
// threads. How the work is cut never changes a result.
#pragma once

#include <string>

#include "slotwise/params.h"

namespace slotwise {

// What one pass over a row of logits finds.
struct LogitScan {
  float max;       // the largest logit
  int64_t argmax;  // its lowest index
  bool valid;      // no NaN, no +inf, at least one finite value
};

// Tokens that may be drawn: scaled > cutoff, or equal to it with an id up to last_tie.
struct Cutoff {
  float scaled;
  int64_t last_tie;
};

struct Kernels {
  const char* isa;

  void (*linear)(const LinearParams& params, int64_t panel_begin, int64_t panel_end);
  void (*rms_norm)(const NormParams& params, int64_t row_begin, int64_t row_end);
  void (*rope_append)(const RopeParams& params, int64_t row_begin, int64_t row_end);
  void (*silu_mul)(const SiluParams& params, int64_t row_begin, int64_t row_end);

  // Floats of scratch that attention_split needs for blocks of num_rows rows.
  int64_t (*attention_scratch)(const AttentionParams& params, int64_t num_rows);
  // The state of every row of the block and every query head of kv_head over the positions of one
  // split, written to states[(row in block * H_q + q head) * attention_state_size(D)].
  void (*attention_split)(const AttentionParams& params, const RowBlock& block, int64_t kv_head,
                          int64_t split, float* states, float* scratch);
  // Folds part into total; total over no positions yet has sum 0.
  void (*attention_fold)(float* total, const float* part, int64_t head_dim);
  // out[d] = acc[d] / sum.
  void (*attention_finish)(const float* total, float* out, int64_t head_dim);

  LogitScan (*scan_logits)(const float* logits, int64_t vocab);
  // scaled = (logits - max) / temperature and weights = exp(scaled).
  void (*scale_logits)(const float* logits, int64_t vocab, float max, float temperature,
                       float* scaled, float* weights);
  // The index of the largest scaled + Gumbel noise(seed, position, index) within the cutoff, ties
  // to the lowest.
  int64_t (*gumbel_argmax)(const float* scaled, int64_t vocab, Cutoff cutoff, uint64_t seed,
                           uint32_t position);
};

// The kernels for "avx512", "avx2" or "portable", or the best that runs here for "auto".
// Throws std::invalid_argument for an unknown name or one that this CPU cannot run.
const Kernels& select_kernels(const std::string& isa);

}  // namespace slotwise
