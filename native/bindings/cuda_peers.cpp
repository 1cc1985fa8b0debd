#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "bind.h"
#include "cuda_array.h"
#include "cuda_ops.h"
#include "slotwise/all_reduce.h"

namespace slotwise::bindings {

using namespace nb::literals;

namespace {

using Rows = DeviceTensor<void, 2>;
using ConstRows = DeviceTensor<const void, 2>;
using FloatRows = DeviceTensor<float, 2>;
using ConstFloatRows = DeviceTensor<const float, 2>;
using Row = DeviceTensor<const float, 1>;

// The buffers of a rank with the stream its sums are put on.
class CudaPeers {
 public:
  CudaPeers(const CudaOps& place, const cuda::PeerLimits& limits) : place_(place) {
    place.enter();
    buffers_ = std::make_unique<cuda::PeerBuffers>(limits);
  }
  ~CudaPeers() {
    if (!buffers_) return;
    try {
      place_.enter();
    } catch (const std::runtime_error&) {  // a device that has failed takes no memory back
    }
  }

  const cuda::PeerBuffers& buffers() const { return *enter(); }
  cuda::Stream stream() const { return place_.stream; }

  nb::bytes handle() const {
    const std::string bytes = buffers().handle();
    return nb::bytes(bytes.data(), bytes.size());
  }

  void open(const std::vector<nb::bytes>& handles) {
    std::vector<std::string> copies;
    for (const nb::bytes& bytes : handles) copies.emplace_back(bytes.c_str(), bytes.size());
    nb::gil_scoped_release release;
    enter()->open(copies);
  }

  void close_peers() {
    nb::gil_scoped_release release;
    enter()->close_peers();
  }

  void release(bool peers_have_closed) {
    nb::gil_scoped_release release;
    if (!peers_have_closed) enter()->abandon();
    enter();
    buffers_.reset();
  }

  // Of no device, so that it can be called while another thread waits for one.
  void abort() const {
    if (buffers_) buffers_->abort();
  }
  bool failed() const { return buffers().failed(); }
  int64_t num_bytes() const { return buffers().num_bytes(); }

 private:
  cuda::PeerBuffers* enter() const {
    if (!buffers_) throw std::runtime_error("[CudaPeers] the buffers were released");
    place_.enter();
    return buffers_.get();
  }

  CudaOps place_;
  std::unique_ptr<cuda::PeerBuffers> buffers_;
};

void make_peers(CudaPeers* self, int device, uintptr_t stream, int rank, int world_size,
                int64_t max_rows, int64_t row_size, double timeout_s) {
  const char* op = "CudaPeers";
  const auto check_range = [&](const char* name, int64_t value, int64_t first, int64_t last) {
    if (value >= first && value <= last) return;
    fail(op,
         std::string(name) + " in [" + std::to_string(first) + ", " + std::to_string(last) + "]",
         std::to_string(value));
  };
  check_range("device", device, 0, cuda_device_count() - 1);
  check_range("world_size", world_size, 1, cuda::kMaxRanks);
  check_range("rank", rank, 0, world_size - 1);
  check_range("max_rows", max_rows, 1, cuda::kMaxSumRows);
  check_range("row_size", row_size, 1, cuda::kMaxSumHidden);
  if (!(timeout_s > 0 && timeout_s < 1e6)) {
    fail(op, "timeout_s in (0, 1e6)", std::to_string(timeout_s));
  }
  new (self) CudaPeers({device, reinterpret_cast<cuda::Stream>(stream)},
                       {rank, world_size, max_rows, row_size, timeout_s});
}

void all_reduce(CudaPeers& peers, const Array& x_array) {
  const Rows x("all_reduce", "x", x_array);
  check_contiguous("all_reduce", "x", x);
  cuda::all_reduce(peers.buffers(), {x.data(), x.shape(0) * x.shape(1), x.dtype()}, peers.stream());
}

bool fuses_norm(const CudaPeers& peers, int64_t num_rows, int64_t hidden) {
  const cuda::PeerLimits& limits = peers.buffers().limits();
  return num_rows <= limits.max_rows && hidden > 0 && hidden <= limits.row_size;
}

void all_reduce_add_rms_norm(CudaPeers& peers, const Array& residual_array,
                             const Array& delta_array, const Array& weight_array, float eps,
                             const Array& out_array) {
  const char* op = "all_reduce_add_rms_norm";
  const FloatRows residual(op, "residual", residual_array);
  const ConstRows delta(op, "delta", delta_array);
  const Row weight(op, "weight", weight_array);
  const Rows out(op, "out", out_array);
  const int64_t rows = residual.shape(0), hidden = residual.shape(1);
  if (!fuses_norm(peers, rows, hidden)) {
    const cuda::PeerLimits& limits = peers.buffers().limits();
    fail(op,
         "at most " + std::to_string(limits.max_rows) + " rows of at most " +
             std::to_string(limits.row_size) + " elements",
         shape_text(residual));
  }
  check_contiguous(op, "residual", residual);
  check_contiguous(op, "delta", delta);
  check_contiguous(op, "out", out);
  check_shape(op, "delta", delta, {rows, hidden});
  check_shape(op, "weight", weight, {hidden});
  check_shape(op, "out", out, {rows, hidden});
  check_eps(op, eps);
  const DType dtype = common_dtype(op, "delta", delta, "out", out);
  cuda::all_reduce_add_rms_norm(
      peers.buffers(),
      {residual.data(), delta.data(), weight.data(), eps, rows, hidden, dtype, out.data()},
      peers.stream());
}

void gather_columns(CudaPeers& peers, const Array& local_array, const std::vector<int64_t>& begins,
                    const Array& out_array) {
  const char* op = "gather_columns";
  const ConstFloatRows local(op, "local", local_array);
  const FloatRows out(op, "out", out_array);
  const cuda::PeerLimits& limits = peers.buffers().limits();
  const auto ranks = static_cast<size_t>(limits.world_size);
  if (begins.size() != ranks + 1 || begins[0] != 0 ||
      !std::is_sorted(begins.begin(), begins.end())) {
    fail(op, "begins of " + std::to_string(ranks) + " parts, rising from 0", "others");
  }
  const auto rank = static_cast<size_t>(limits.rank);
  check_shape(op, "local", local, {local.shape(0), begins[rank + 1] - begins[rank]});
  check_shape(op, "out", out, {local.shape(0), begins[ranks]});
  cuda::GatherParams params{local.data(), local.stride(0), local.shape(0),
                            {},           out.data(),      out.stride(0)};
  std::copy(begins.begin(), begins.end(), params.begins);
  cuda::gather_columns(peers.buffers(), params, peers.stream());
}

}  // namespace

void bind_cuda_peers(nb::module_& module) {
  nb::class_<CudaPeers> peers(module, "CudaPeers");
  peers.def("__init__", &make_peers, "device"_a, "stream"_a, "rank"_a, "world_size"_a, "max_rows"_a,
            "row_size"_a, "timeout_s"_a);
  peers.def_ro_static("MAX_RANKS", &cuda::kMaxRanks);
  peers.def_ro_static("MAX_ROWS", &cuda::kMaxSumRows);
  peers.def_prop_ro("num_bytes", &CudaPeers::num_bytes);
  peers.def("handle", &CudaPeers::handle);
  peers.def("open", &CudaPeers::open, "handles"_a);
  peers.def("close_peers", &CudaPeers::close_peers);
  peers.def("release", &CudaPeers::release, "peers_have_closed"_a);
  peers.def("abort", &CudaPeers::abort);
  peers.def("failed", &CudaPeers::failed);
  peers.def("all_reduce", &all_reduce, "x"_a);
  peers.def("fuses_norm", &fuses_norm, "num_rows"_a, "hidden"_a);
  peers.def("all_reduce_add_rms_norm", &all_reduce_add_rms_norm, "residual"_a, "delta"_a,
            "weight"_a, "eps"_a, "out"_a);
  peers.def("gather_columns", &gather_columns, "local"_a, "begins"_a, "out"_a);
}

}  // namespace slotwise::bindings
