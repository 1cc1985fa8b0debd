// A prefix from one slot to another, in all layers by one launch.
#include "launch.cuh"

namespace slotwise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 8;  // of 16 bytes, of a thread: all are asked for before one is stored

// Grid: pieces of a head's positions, heads, slots' tensors.
__global__ void __launch_bounds__(kThreads) copy_prefix_kernel(CopyPrefixParams params) {
  wait_for_predecessor();
  const int64_t head = (blockIdx.z * params.num_slots * params.num_heads + blockIdx.y);
  const int64_t source = (head + params.source * params.num_heads) * params.head_bytes;
  const int64_t target = (head + params.target * params.num_heads) * params.head_bytes;
  const auto from = reinterpret_cast<const uint4*>(static_cast<const char*>(params.cache) + source);
  const auto to = reinterpret_cast<uint4*>(static_cast<char*>(params.cache) + target);
  const int64_t count = params.prefix_bytes / sizeof(uint4);
  const int64_t first = int64_t{blockIdx.x} * kThreads * kVectors + threadIdx.x;
  uint4 held[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = first + i * kThreads;
    if (at < count) held[i] = __ldcs(from + at);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = first + i * kThreads;
    if (at < count) __stcs(to + at, held[i]);
  }
}

}  // namespace

void copy_prefix(const CopyPrefixParams& params, Stream stream) {
  constexpr int64_t kBlockBytes = int64_t{kThreads} * kVectors * sizeof(uint4);
  const int64_t pieces = (params.prefix_bytes + kBlockBytes - 1) / kBlockBytes;
  if (pieces == 0) return;
  launch("copy_prefix", copy_prefix_kernel,
         {dim3(static_cast<unsigned>(pieces), static_cast<unsigned>(params.num_heads),
               static_cast<unsigned>(params.num_tensors)),
          kThreads},
         stream, params);
}

}  // namespace slotwise::cuda
