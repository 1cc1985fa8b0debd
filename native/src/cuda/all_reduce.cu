// Sums and gathers between GPUs, see all_reduce.h; how the data travels, see peers.cuh.
#include <algorithm>
#include <cstring>

#include "dispatch.cuh"
#include "norm.cuh"
#include "peers.cuh"

namespace slotwise::cuda {
namespace {

// ---- Kernels ------------------------------------------------------------------------------------

constexpr int kSumThreads = 512;

// Block b sums elements [b * row_size, (b + 1) * row_size) of x [n], in packets.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    sum_rows_kernel(const __grid_constant__ PeerView view, T* x, int64_t n, int64_t row_size,
                    bool aligned) {
  constexpr int kSize = Unit<T>::kSize;
  wait_for_predecessor();
  start_successor();
  x += blockIdx.x * row_size;
  n = min(n - blockIdx.x * row_size, row_size);
  const int64_t num_units = (n + kSize - 1) / kSize;
  const PacketRow row(view, blockIdx.x, num_units);
  for (int64_t u = threadIdx.x; u < num_units; u += kSumThreads) {
    row.send(u, load_unit(x + u * kSize, n - u * kSize, aligned));
  }
  for (int64_t u = threadIdx.x; u < num_units; u += kSumThreads) {
    float total[kSize];
    row.sum(u, load_unit(x + u * kSize, n - u * kSize, aligned), total);
    store_unit(rounded_unit<T>(total), x + u * kSize, n - u * kSize, aligned);
  }
  __syncthreads();
  if (threadIdx.x == 0) row.finish();
}

template <typename T>
struct SumNorm {
  float* residual;
  const T* delta;
  const float* weight;
  float eps;
  int64_t hidden;
  T* out;
};

// rms_norm's kernel with the sum before it, one row for each block; see norm.cuh for who owns what.
template <typename T, int kVectors, bool kAligned>
__global__ void __launch_bounds__(kMaxNormThreads)
    sum_norm_kernel(const __grid_constant__ PeerView view, const SumNorm<T> params) {
  constexpr int kUnitSize = Unit<T>::kSize, kUnits = kVector / kUnitSize;
  const int64_t hidden = params.hidden, begin = blockIdx.x * hidden;
  const int64_t num_vectors = (hidden + kVector - 1) / kVector;
  const auto vector_of = [](int i) -> int64_t { return i * blockDim.x + threadIdx.x; };
  float weight[kVectors][kVector];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t v = vector_of(i), at = v * kVector;
    if (v < num_vectors) load8<kAligned>(params.weight + at, hidden - at, weight[i]);
  }
  wait_for_predecessor();
  start_successor();
  const PacketRow row(view, blockIdx.x, num_vectors * kUnits);
  Unit<T> own[kVectors][kUnits];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t v = vector_of(i);
    if (v >= num_vectors) break;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const int64_t u = v * kUnits + j, at = u * kUnitSize;
      own[i][j] = load_unit(params.delta + begin + at, hidden - at, kAligned);
      row.send(u, own[i][j]);
    }
  }
  float x[kVectors][kVector];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t v = vector_of(i), at = v * kVector;
    if (v < num_vectors) load8<kAligned>(params.residual + begin + at, hidden - at, x[i]);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t v = vector_of(i), at = v * kVector;
    if (v >= num_vectors) break;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      float total[kUnitSize];
      row.sum(v * kUnits + j, own[i][j], total);
#pragma unroll
      for (int k = 0; k < kUnitSize; ++k) {
        float& element = x[i][j * kUnitSize + k];
        element = __fadd_rn(element, to_float(round_to<T>(total[k])));
      }
    }
    store8<kAligned>(params.residual + begin + at, hidden - at, x[i]);
    squares = add_squares(squares, x[i]);
  }
  const float scale = norm_scale(block_sum(squares), hidden, params.eps);
  if (threadIdx.x == 0) row.finish();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t v = vector_of(i), at = v * kVector;
    if (v >= num_vectors) break;
#pragma unroll
    for (int k = 0; k < kVector; ++k) x[i][k] = norm_value(x[i][k], scale, weight[i][k]);
    store8<kAligned>(params.out + begin + at, hidden - at, x[i]);
  }
}

// Sums x [n] in chunks of kChunkBytes; block b takes the chunks b, b + gridDim.x, ...
template <typename T>
__global__ void __launch_bounds__(kChunkThreads)
    sum_chunks_kernel(const __grid_constant__ PeerView view, T* x, int64_t n, bool aligned) {
  constexpr int kSize = Unit<T>::kSize;
  constexpr int64_t kChunk = kChunkBytes / static_cast<int64_t>(sizeof(T));
  wait_for_predecessor();
  start_successor();
  ChunkLane lane(view);
  for (int64_t first = blockIdx.x * kChunk; first < n; first += gridDim.x * kChunk) {
    lane.next();
    Unit<T> own[kChunkUnits];
#pragma unroll
    for (int i = 0; i < kChunkUnits; ++i) {
      const int64_t at = first + (i * kChunkThreads + threadIdx.x) * kSize;
      own[i] = load_unit(x + at, n - at, aligned);
    }
#pragma unroll
    for (int i = 0; i < kChunkUnits; ++i) lane.send(i, own[i]);
    lane.exchange();
#pragma unroll
    for (int i = 0; i < kChunkUnits; ++i) {
      const int64_t at = first + (i * kChunkThreads + threadIdx.x) * kSize;
      store_unit(lane.sum(i, own[i]), x + at, n - at, aligned);
    }
  }
  lane.finish();
}

struct Columns {
  const float* local;
  int64_t local_stride;
  int64_t num_rows;
  int64_t begins[kMaxRanks + 1];
  int64_t pieces;  // chunks of the widest rank's row
  float* out;
  int64_t out_stride;
  bool aligned;
};

// A chunk is one piece of one row, of every rank at once; narrower ranks send less or nothing.
__global__ void __launch_bounds__(kChunkThreads)
    gather_kernel(const __grid_constant__ PeerView view, const __grid_constant__ Columns columns) {
  constexpr int kSize = Unit<float>::kSize;
  constexpr int64_t kChunk = kChunkBytes / static_cast<int64_t>(sizeof(float));
  wait_for_predecessor();
  start_successor();
  ChunkLane lane(view);
  const auto width = [&](int rank) { return columns.begins[rank + 1] - columns.begins[rank]; };
  for (int64_t chunk = blockIdx.x; chunk < columns.num_rows * columns.pieces; chunk += gridDim.x) {
    lane.next();
    const int64_t b = chunk / columns.pieces;
    const int64_t first = chunk % columns.pieces * kChunk + threadIdx.x * kSize;
    const float* local = columns.local + b * columns.local_stride;
    float* out = columns.out + b * columns.out_stride;
    Unit<float> own[kChunkUnits];
#pragma unroll
    for (int i = 0; i < kChunkUnits; ++i) {
      const int64_t at = first + i * kChunkThreads * kSize;
      own[i] = load_unit(local + at, width(view.rank) - at, columns.aligned);
    }
#pragma unroll
    for (int i = 0; i < kChunkUnits; ++i) {
      const int64_t at = first + i * kChunkThreads * kSize;
      if (at >= width(view.rank)) continue;
      lane.send(i, own[i]);
      store_unit(own[i], out + columns.begins[view.rank] + at, width(view.rank) - at,
                 columns.aligned);
    }
    lane.exchange();
    for (int rank = 0; rank < view.world_size; ++rank) {
      if (rank == view.rank) continue;
#pragma unroll
      for (int i = 0; i < kChunkUnits; ++i) {
        const int64_t at = first + i * kChunkThreads * kSize;
        if (at >= width(rank)) continue;
        store_unit(lane.receive<float>(i, rank), out + columns.begins[rank] + at, width(rank) - at,
                   columns.aligned);
      }
    }
  }
  lane.finish();
}

// ---- Launchers ----------------------------------------------------------------------------------

constexpr int64_t kAlignment = 16;

bool at_alignment(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kAlignment == 0;
}

template <typename T>
void sum(const PeerBuffers& peers, T* x, int64_t n, Stream stream) {
  const PeerView& view = peers.view();
  const int64_t row_size = view.row_units * 16 / static_cast<int64_t>(sizeof(float));
  const int64_t num_rows = (n + row_size - 1) / row_size;
  if (num_rows <= view.max_rows) {
    launch("all_reduce", sum_rows_kernel<T>, {dim3(num_rows), kSumThreads}, stream, view, x, n,
           row_size, at_alignment(x));
  } else {
    constexpr int64_t kChunk = kChunkBytes / static_cast<int64_t>(sizeof(T));
    const int64_t lanes = std::min<int64_t>((n + kChunk - 1) / kChunk, kChunkLanes);
    launch("all_reduce", sum_chunks_kernel<T>, {dim3(lanes), kChunkThreads}, stream, view, x, n,
           at_alignment(x));
  }
}

template <typename T, int kVectors>
void sum_norm(const PeerView& view, const NormParams& params, Stream stream) {
  const SumNorm<T> args{params.residual, static_cast<const T*>(params.delta),
                        params.weight,   params.eps,
                        params.hidden,   static_cast<T*>(params.out)};
  const bool aligned = params.hidden % kVector == 0 && at_alignment(args.residual) &&
                       at_alignment(args.delta) && at_alignment(args.weight) &&
                       at_alignment(args.out);
  launch("all_reduce_add_rms_norm",
         aligned ? sum_norm_kernel<T, kVectors, true> : sum_norm_kernel<T, kVectors, false>,
         {dim3(params.num_rows), norm_threads(params.hidden)}, stream, view, args);
}

}  // namespace

void all_reduce_add_rms_norm(const PeerBuffers& peers, const NormParams& params, Stream stream) {
  if (params.num_rows == 0) return;
  if (peers.view().world_size == 1) return rms_norm(params, stream);
  constexpr int64_t kRoundSize = int64_t{kVector} * kMaxNormThreads;
  static_assert(kMaxSumHidden == 2 * kRoundSize);
  for_dtype(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = params.hidden <= kRoundSize ? sum_norm<T, 1> : sum_norm<T, 2>;
    run(peers.view(), params, stream);
  });
}

void all_reduce(const PeerBuffers& peers, const SumParams& params, Stream stream) {
  if (params.n == 0 || peers.view().world_size == 1) return;
  for_dtype(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    sum(peers, static_cast<T*>(params.x), params.n, stream);
  });
}

void gather_columns(const PeerBuffers& peers, const GatherParams& params, Stream stream) {
  if (params.num_rows == 0) return;
  Columns columns{params.local,
                  params.local_stride,
                  params.num_rows,
                  {},
                  0,
                  params.out,
                  params.out_stride,
                  at_alignment(params.local) && at_alignment(params.out)};
  int64_t widest = 0;
  const auto check_alignment = [&](int64_t elements) {
    columns.aligned = columns.aligned && elements % Unit<float>::kSize == 0;
  };
  check_alignment(params.local_stride);
  check_alignment(params.out_stride);
  const int world_size = peers.view().world_size;
  std::copy_n(params.begins, world_size + 1, columns.begins);
  for (int rank = 0; rank < world_size; ++rank) {
    check_alignment(params.begins[rank]);
    widest = std::max(widest, params.begins[rank + 1] - params.begins[rank]);
  }
  constexpr int64_t kChunk = kChunkBytes / static_cast<int64_t>(sizeof(float));
  columns.pieces = (widest + kChunk - 1) / kChunk;
  const int64_t lanes = std::min<int64_t>(params.num_rows * columns.pieces, kChunkLanes);
  launch("gather_columns", gather_kernel, {dim3(lanes), kChunkThreads}, stream, peers.view(),
         columns);
}

// ---- Memory -------------------------------------------------------------------------------------

namespace {

constexpr int kBusIdSize = 32;

struct Handle {
  cudaIpcMemHandle_t memory;
  int64_t num_bytes;
  char bus_id[kBusIdSize];
};

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "finding the current device");
  return device;
}

Handle read_handle(const std::string& bytes, int rank) {
  Handle handle;
  if (bytes.size() != sizeof(handle)) {
    throw std::invalid_argument("the handle of rank " + std::to_string(rank) + " is not one");
  }
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  return handle;
}

// A device that this process does not see is left to the opening of its memory.
void check_access(int device, const Handle& peer) {
  int other = 0;
  if (cudaDeviceGetByPCIBusId(&other, peer.bus_id) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  int possible = 1;
  if (other != device) {
    check(cudaDeviceCanAccessPeer(&possible, device, other), "asking for access between GPUs");
  }
  if (possible == 0) {
    throw std::runtime_error("GPU " + std::to_string(device) + " cannot access the memory of " +
                             peer.bus_id);
  }
}

}  // namespace

PeerBuffers::PeerBuffers(const PeerLimits& limits) : limits_(limits), view_(new PeerView{}) {
  PeerView& view = *view_;
  view.rank = limits.rank;
  view.world_size = limits.world_size;
  view.max_rows = limits.max_rows;
  // Even, so that rows of 16-bit elements begin at a unit as well.
  view.row_units = (limits.row_size + 7) / 8 * 2;
  view.timeout_ns = static_cast<uint64_t>(limits.timeout_s * 1e9);
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, sizeof(int32_t), cudaHostAllocPortable), "allocating host memory");
  failed_.reset(static_cast<int32_t*>(memory));
  *failed_ = 0;
  view.failed_on_host = failed_.get();
  const size_t bytes = static_cast<size_t>(num_bytes());
  check(cudaMalloc(&memory, bytes), "allocating the buffer of sums");
  own_.reset(static_cast<char*>(memory));
  view.buffers[view.rank] = own_.get();
  check(cudaMemset(memory, 0, bytes), "clearing the buffer of sums");
  check(cudaDeviceSynchronize(), "clearing the buffer of sums");
}

PeerBuffers::~PeerBuffers() { close_peers(); }

void PeerBuffers::FreeDevice::operator()(char* memory) const { cudaFree(memory); }

void PeerBuffers::FreeHost::operator()(int32_t* memory) const { cudaFreeHost(memory); }

std::string PeerBuffers::handle() const {
  Handle handle{};
  check(cudaIpcGetMemHandle(&handle.memory, own_.get()), "sharing a buffer");
  check(cudaDeviceGetPCIBusId(handle.bus_id, kBusIdSize, current_device()), "naming the GPU");
  handle.num_bytes = num_bytes();
  return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

void PeerBuffers::open(const std::vector<std::string>& handles) {
  PeerView& view = *view_;
  if (handles.size() != static_cast<size_t>(view.world_size)) {
    throw std::invalid_argument("expected a handle of every rank");
  }
  for (int rank = 0; rank < view.world_size; ++rank) {
    if (rank == view.rank) continue;
    const Handle handle = read_handle(handles[static_cast<size_t>(rank)], rank);
    if (handle.num_bytes != num_bytes()) {
      throw std::invalid_argument("rank " + std::to_string(rank) + " has a buffer of another size");
    }
    check_access(current_device(), handle);
    void* buffer = nullptr;
    check(cudaIpcOpenMemHandle(&buffer, handle.memory, cudaIpcMemLazyEnablePeerAccess),
          "opening a peer's buffer");
    view.buffers[rank] = static_cast<char*>(buffer);
  }
}

void PeerBuffers::close_peers() {
  PeerView& view = *view_;
  for (int rank = 0; rank < view.world_size; ++rank) {
    if (rank == view.rank || view.buffers[rank] == nullptr) continue;
    cudaIpcCloseMemHandle(view.buffers[rank]);
    view.buffers[rank] = nullptr;
  }
}

void PeerBuffers::abandon() { static_cast<void>(own_.release()); }

void PeerBuffers::abort() const { *static_cast<volatile int32_t*>(failed_.get()) = 1; }

bool PeerBuffers::failed() const {
  return *static_cast<const volatile int32_t*>(failed_.get()) != 0;
}

int64_t PeerBuffers::num_bytes() const { return buffer_bytes(*view_); }

}  // namespace slotwise::cuda
