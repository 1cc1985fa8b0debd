#pragma once

#include <cstdint>

#include "slotwise/aligned_buffer.h"
#include "slotwise/params.h"
#include "slotwise/thread_pool.h"

namespace slotwise {

// A matrix [N, K] and a bias [N], laid out for `linear`: panels [ceil(N / 32), K, 32], zeros past
// N.
//
// float32: element (n, k) lies at ((n / 32) * K + k) * 32 + n % 32. bfloat16: a panel row is 16
// words of 32 bits, n % 32 = i in the low half of word i and i + 16 in the high half, so that a
// kernel widens both with one instruction each.
class PackedWeight {
 public:
  struct Source {
    const void* weight;  // [N, K], weight[n * stride + k]
    DType dtype;
    int64_t n;
    int64_t k;
    int64_t stride;
    const float* bias;  // [N] or null
  };

  PackedWeight(const Source& source, ThreadPool& pool);

  int64_t num_rows() const { return n_; }
  int64_t num_cols() const { return k_; }
  DType dtype() const { return dtype_; }
  size_t num_bytes() const { return panels_.num_bytes() + bias_.num_bytes(); }
  const void* panels() const { return panels_.data(); }
  const float* bias() const { return bias_.floats(); }

  // out[k] = weight[n, k]
  void read_row(int64_t n, float* out) const;

 private:
  int64_t n_;
  int64_t k_;
  DType dtype_;
  AlignedBuffer panels_;
  AlignedBuffer bias_;
};

}  // namespace slotwise
