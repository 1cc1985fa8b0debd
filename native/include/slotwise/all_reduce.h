// Sums and gathers between the GPUs of one machine. Every rank writes its part into the memory of
// the others; each then adds the parts it received in rank order, in float32, and rounds once. So
// the result has the same bits on every rank, and in whichever way a size is sent.
//
// All ranks make the same calls in the same order. A call only puts a kernel on the stream; nothing
// it is given changes from call to call, so it can be captured in a graph. A rank that waits for a
// peer longer than the time-out, or until abort(), goes on with garbage, and failed() says so.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "slotwise/cuda.h"

namespace slotwise::cuda {

constexpr int kMaxRanks = 8;
constexpr int kMaxSumRows = 64;
constexpr int64_t kMaxSumHidden = 16384;

struct PeerLimits {
  int rank;
  int world_size;    // <= kMaxRanks
  int64_t max_rows;  // of all_reduce_add_rms_norm, <= kMaxSumRows
  int64_t row_size;  // elements of its rows, at most; <= kMaxSumHidden
  double timeout_s;
};

struct PeerView;  // what a kernel is given

// The memory of one rank that the others write to, and theirs as this rank sees it, on the device
// that is current when it is made. The ranks are processes of one machine; the bytes of handle()
// travel between them by other means.
class PeerBuffers {
 public:
  explicit PeerBuffers(const PeerLimits& limits);
  // The rank's own memory is freed: only once the peers have closed it.
  ~PeerBuffers();
  PeerBuffers(const PeerBuffers&) = delete;
  PeerBuffers& operator=(const PeerBuffers&) = delete;

  std::string handle() const;
  // Opens the memory of every other rank; `handles` are in rank order. Throws std::runtime_error
  // where the GPUs cannot reach each other's memory.
  void open(const std::vector<std::string>& handles);
  void close_peers();
  // The own memory is never freed: a peer may still write to it.
  void abandon();

  // Kernels wait for no peer any more; from any thread.
  void abort() const;
  // A peer did not come in time, or abort() was called; results since then are garbage.
  bool failed() const;
  int64_t num_bytes() const;
  const PeerLimits& limits() const { return limits_; }
  const PeerView& view() const { return *view_; }

 private:
  struct FreeDevice {
    void operator()(char* memory) const;
  };
  struct FreeHost {
    void operator()(int32_t* memory) const;
  };

  PeerLimits limits_;
  std::unique_ptr<PeerView> view_;
  std::unique_ptr<char, FreeDevice> own_;
  std::unique_ptr<int32_t, FreeHost> failed_;
};

// x = the sum of all ranks' x.
struct SumParams {
  void* x;  // [n], contiguous
  int64_t n;
  DType dtype;
};
void all_reduce(const PeerBuffers& peers, const SumParams& params, Stream stream);

// rms_norm of cuda.h with the sum of all ranks' delta; at most max_rows rows of row_size.
void all_reduce_add_rms_norm(const PeerBuffers& peers, const NormParams& params, Stream stream);

// out[b, begins[r] + i] = local[b, i] of rank r.
struct GatherParams {
  const float* local;  // [B, begins[rank + 1] - begins[rank]], local[b * local_stride + i]
  int64_t local_stride;
  int64_t num_rows;               // B
  int64_t begins[kMaxRanks + 1];  // [ranks + 1], the columns of every rank
  float* out;                     // [B, begins[ranks]], out[b * out_stride + v]
  int64_t out_stride;
};
void gather_columns(const PeerBuffers& peers, const GatherParams& params, Stream stream);

}  // namespace slotwise::cuda
