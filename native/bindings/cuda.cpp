#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <optional>

#include "bind.h"
#include "cuda_array.h"
#include "cuda_ops.h"

namespace slotwise::bindings {

using namespace nb::literals;

namespace {

using Row = DeviceTensor<const float, 1>;
using FloatRows = DeviceTensor<float, 2>;
using ConstFloatRows = DeviceTensor<const float, 2>;
using Rows = DeviceTensor<void, 2>;
using ConstRows = DeviceTensor<const void, 2>;
using DeviceInts = DeviceTensor<const int32_t, 1>;
using DeviceOutInts = DeviceTensor<int32_t, 1>;
using DeviceCache = DeviceTensor<void, 4>;
using Optional = std::optional<Array>;

cuda::EmbedParams embed_params(const char* op, const int32_t* token_ids, int64_t num_rows,
                               const Array& weight_array, int64_t first_id,
                               const Array& out_array) {
  const ConstRows weight(op, "weight", weight_array);
  const FloatRows out(op, "out", out_array);
  check_contiguous(op, "weight", weight);
  check_contiguous(op, "out", out);
  check_shape(op, "out", out, {num_rows, weight.shape(1)});
  return {token_ids,       num_rows, weight.data(),   weight.dtype(),
          weight.shape(0), first_id, weight.shape(1), out.data()};
}

void embed(CudaOps& ops, const Array& ids_array, const Array& weight, int64_t first_id,
           const Array& out) {
  const char* op = "embed";
  const DeviceInts ids(op, "token_ids", ids_array);
  const auto params = embed_params(op, ids.data(), ids.shape(0), weight, first_id, out);
  ops.enter();
  cuda::embed(params, ops.stream);
}

void normalise(CudaOps& ops, const char* op, const Array& residual_array, const Optional& delta,
               const Array& weight_array, float eps, const Array& out_array) {
  const FloatRows residual(op, "residual", residual_array);
  const Row weight(op, "weight", weight_array);
  const Rows out(op, "out", out_array);
  const int64_t rows = residual.shape(0), hidden = residual.shape(1);
  check_contiguous(op, "residual", residual);
  check_contiguous(op, "out", out);
  check_shape(op, "weight", weight, {hidden});
  check_shape(op, "out", out, {rows, hidden});
  check_eps(op, eps);
  cuda::NormParams params{residual.data(), nullptr,     weight.data(), eps, rows,
                          hidden,          out.dtype(), out.data()};
  if (delta) {
    const ConstRows added(op, "delta", *delta);
    check_contiguous(op, "delta", added);
    check_shape(op, "delta", added, {rows, hidden});
    common_dtype(op, "delta", added, "out", out);
    params.delta = added.data();
  }
  ops.enter();
  cuda::rms_norm(params, ops.stream);
}

void rms_norm(CudaOps& ops, const Array& x, const Array& weight, float eps, const Array& out) {
  normalise(ops, "rms_norm", x, std::nullopt, weight, eps, out);
}

void add_rms_norm(CudaOps& ops, const Array& residual, const Array& delta, const Array& weight,
                  float eps, const Array& out) {
  normalise(ops, "add_rms_norm", residual, delta, weight, eps, out);
}

void silu_mul(CudaOps& ops, const Array& gate_up_array, const Array& out_array) {
  const char* op = "silu_mul";
  const ConstRows gate_up(op, "gate_up", gate_up_array);
  const Rows out(op, "out", out_array);
  check_contiguous(op, "gate_up", gate_up);
  check_contiguous(op, "out", out);
  check_shape(op, "gate_up", gate_up, {out.shape(0), 2 * out.shape(1)});
  const DType dtype = common_dtype(op, "gate_up", gate_up, "out", out);
  ops.enter();
  cuda::silu_mul({gate_up.data(), out.shape(0), out.shape(1), dtype, out.data()}, ops.stream);
}

void add_bias(CudaOps& ops, const Array& x_array, const Array& bias_array) {
  const char* op = "add_bias";
  const Rows x(op, "x", x_array);
  const Row bias(op, "bias", bias_array);
  check_contiguous(op, "x", x);
  check_shape(op, "bias", bias, {x.shape(1)});
  ops.enter();
  cuda::add_bias({x.data(), bias.data(), x.shape(0), x.shape(1), x.dtype()}, ops.stream);
}

bool linear_supported(CudaOps& ops, int64_t num_rows, const Array& weight_array) {
  const ConstRows weight("linear_supported", "weight", weight_array);
  ops.enter();
  return cuda::linear_supported(num_rows, weight.shape(0), weight.shape(1), weight.dtype());
}

bool linear_fills(CudaOps& ops, int64_t num_rows, const Array& weight_array) {
  const ConstRows weight("linear_fills", "weight", weight_array);
  const int64_t n = weight.shape(0), k = weight.shape(1);
  ops.enter();
  return cuda::linear_supported(num_rows, n, k, weight.dtype()) && cuda::linear_fills(num_rows, n);
}

void linear(CudaOps& ops, const Array& x_array, const Array& weight_array, const Array& out_array,
            bool gated) {
  const char* op = "linear";
  const ConstRows x(op, "x", x_array), weight(op, "weight", weight_array);
  const Rows out(op, "out", out_array);
  const int64_t rows = x.shape(0), n = weight.shape(0), k = weight.shape(1);
  check_shape(op, "x", x, {rows, k});
  check_shape(op, "out", out, {rows, gated ? n / 2 : n});
  const DType dtype = common_dtype(op, "x", x, "weight", weight);
  const bool float32_out = out.dtype() == DType::kFloat32;
  if (!float32_out) common_dtype(op, "x", x, "out", out);
  if (gated && float32_out) fail(op, "out of the inputs' type when gated", "float32");
  if (rows > cuda::kStreamedRows) {
    if (float32_out) {
      fail(op, "at most " + std::to_string(cuda::kStreamedRows) + " rows where out is float32",
           std::to_string(rows));
    }
    check_vectors(op, "out", out);
  }
  ops.enter();
  if (!cuda::linear_supported(rows, n, k, dtype)) {
    fail(op, "a size that linear_supported",
         std::to_string(rows) + " rows of [" + std::to_string(n) + ", " + std::to_string(k) + "]");
  }
  check_vectors(op, "x", x);
  check_vectors(op, "weight", weight);
  cuda::linear({x.data(), x.stride(0), rows, weight.data(), weight.stride(0), n, k, dtype,
                out.data(), out.stride(0), float32_out, gated},
               ops.stream);
}

CacheParams device_cache(const char* op, const Array& k_array, const Array& v_array) {
  const DeviceCache k(op, "k_cache", k_array), v(op, "v_cache", v_array);
  const CacheParams params = cache_layout(op, k, v, common_dtype(op, "k_cache", k, "v_cache", v));
  check_vectors(op, "k_cache", k);
  check_vectors(op, "v_cache", v);
  for (const int64_t dim : {64, 96, 128, 256}) {
    if (params.head_dim == dim) return params;
  }
  fail(op, "a head dimension of 64, 96, 128 or 256", std::to_string(params.head_dim));
}

cuda::AttentionInput attention_input(const char* op, const Array& qkv_array, const Array& k_cache,
                                     const Array& v_cache) {
  const Rows qkv(op, "qkv", qkv_array);
  check_contiguous(op, "qkv", qkv);
  cuda::AttentionInput input{};
  input.cache = device_cache(op, k_cache, v_cache);
  const CacheParams& cache = input.cache;
  if (qkv.dtype() != cache.dtype) fail(op, "qkv and the cache of one type", "two types");
  const int64_t heads = qkv.shape(1) / cache.head_dim - 2 * cache.num_kv_heads;
  if (qkv.shape(1) % cache.head_dim != 0 || heads < 1 || heads % cache.num_kv_heads != 0) {
    fail(op, "qkv of (H_q + 2 H_kv) D columns, H_q a multiple of H_kv", shape_text(qkv));
  }
  input.qkv = qkv.data();
  input.num_rows = qkv.shape(0);
  input.num_q_heads = heads;
  return input;
}

void set_rope(const char* op, const Optional& q_array, const Optional& k_array, float eps,
              const Array& cos_array, const Array& sin_array, cuda::AttentionInput& input) {
  if (q_array.has_value() != k_array.has_value()) fail(op, "both of q_norm and k_norm", "one");
  const int64_t dim = input.cache.head_dim;
  if (q_array) {
    const Row q_norm(op, "q_norm", *q_array), k_norm(op, "k_norm", *k_array);
    check_shape(op, "q_norm", q_norm, {dim});
    check_shape(op, "k_norm", k_norm, {dim});
    input.q_norm = q_norm.data();
    input.k_norm = k_norm.data();
  }
  check_eps(op, eps);
  const ConstFloatRows cos(op, "cos", cos_array), sin(op, "sin", sin_array);
  check_contiguous(op, "cos", cos);
  check_contiguous(op, "sin", sin);
  check_shape(op, "cos", cos, {cos.shape(0), dim / 2});
  check_shape(op, "sin", sin, {cos.shape(0), dim / 2});
  if (cos.shape(0) < input.cache.num_positions) {
    fail(op, "cos of at least " + std::to_string(input.cache.num_positions) + " positions",
         shape_text(cos));
  }
  input.eps = eps;
  input.cos = cos.data();
  input.sin = sin.data();
}

void set_out(const char* op, float scale, const Array& out_array, cuda::AttentionInput& input) {
  const Rows out(op, "out", out_array);
  check_contiguous(op, "out", out);
  check_shape(op, "out", out, {input.num_rows, input.num_q_heads * input.cache.head_dim});
  if (out.dtype() != input.cache.dtype) fail(op, "out of the cache's type", "another");
  if (!std::isfinite(scale)) fail(op, "a finite scale", std::to_string(scale));
  input.scale = scale;
  input.out = out.data();
}

cuda::ChunkParams chunk_params(const char* op, const cuda::AttentionInput& input, int64_t slot,
                               int64_t start, const Optional& place_array) {
  cuda::ChunkParams params{input, slot, start, nullptr};
  if (place_array) {
    const DeviceInts place(op, "place", *place_array);
    check_shape(op, "place", place, {sizeof(cuda::ChunkPlace) / sizeof(int32_t)});
    params.place = reinterpret_cast<const cuda::ChunkPlace*>(place.data());
  }
  if (slot < 0 || slot >= input.cache.num_slots) {
    fail(op, "slot in [0, " + std::to_string(input.cache.num_slots) + ")", std::to_string(slot));
  }
  const int64_t last = input.cache.num_positions - input.num_rows;
  if (start < 0 || start > last) {
    fail(op, "start in [0, " + std::to_string(last) + "]", std::to_string(start));
  }
  return params;
}

void decode_attention(CudaOps& ops, const Array& qkv, const Optional& q_norm,
                      const Optional& k_norm, float eps, const Array& cos, const Array& sin,
                      const Array& k_cache, const Array& v_cache, const Array& positions_array,
                      const Array& slots_array, float scale, const Array& states_array,
                      const Array& counters_array, const Array& out) {
  const char* op = "decode_attention";
  cuda::DecodeAttentionParams params{};
  params.input = attention_input(op, qkv, k_cache, v_cache);
  set_rope(op, q_norm, k_norm, eps, cos, sin, params.input);
  set_out(op, scale, out, params.input);
  const CacheParams& cache = params.input.cache;
  const DeviceInts positions(op, "positions", positions_array), slots(op, "slots", slots_array);
  const DeviceOutInts counters(op, "counters", counters_array);
  const DeviceTensor<float, 1> states(op, "states", states_array);
  const int64_t rows = params.input.num_rows;
  check_shape(op, "positions", positions, {rows});
  check_shape(op, "slots", slots, {rows});
  if (rows > cache.num_slots) {
    fail(op, "at most one row per slot", std::to_string(rows) + " rows");
  }
  check_shape(op, "counters", counters, {rows * cache.num_kv_heads});
  const int64_t bytes = cuda::decode_attention_workspace(rows, cache.num_positions,
                                                         params.input.num_q_heads, cache.head_dim);
  if (states.shape(0) * 4 < bytes) {
    fail(op, "states of at least " + std::to_string(bytes / 4) + " floats", shape_text(states));
  }
  params.positions = positions.data();
  params.slots = slots.data();
  params.states = states.data();
  params.counters = counters.data();
  ops.enter();
  cuda::decode_attention(params, ops.stream);
}

void rope_append(CudaOps& ops, const Array& qkv, const Optional& q_norm, const Optional& k_norm,
                 float eps, const Array& cos, const Array& sin, const Array& k_cache,
                 const Array& v_cache, int64_t slot, int64_t start, const Optional& place) {
  const char* op = "rope_append";
  cuda::AttentionInput input = attention_input(op, qkv, k_cache, v_cache);
  set_rope(op, q_norm, k_norm, eps, cos, sin, input);
  const cuda::ChunkParams params = chunk_params(op, input, slot, start, place);
  ops.enter();
  cuda::rope_append(params, ops.stream);
}

void prefill_attention(CudaOps& ops, const Array& qkv, const Array& k_cache, const Array& v_cache,
                       int64_t slot, int64_t start, float scale, const Array& out,
                       const Optional& place) {
  const char* op = "prefill_attention";
  cuda::AttentionInput input = attention_input(op, qkv, k_cache, v_cache);
  set_out(op, scale, out, input);
  const cuda::ChunkParams params = chunk_params(op, input, slot, start, place);
  ops.enter();
  cuda::prefill_attention(params, ops.stream);
}

void copy_prefix(CudaOps& ops, const Array& cache_array, int64_t source, int64_t target,
                 int64_t length) {
  const char* op = "copy_prefix";
  const DeviceTensor<void, 5> cache(op, "cache", cache_array);
  check_contiguous(op, "cache", cache);
  check_vectors(op, "cache", cache);
  const int64_t slots = cache.shape(1), positions = cache.shape(3);
  for (const int64_t slot : {source, target}) {
    if (slot < 0 || slot >= slots) {
      fail(op, "slots in [0, " + std::to_string(slots) + ")", std::to_string(slot));
    }
  }
  if (source == target) fail(op, "two slots", std::to_string(source) + " twice");
  if (length < 0 || length > positions) {
    fail(op, "length in [0, " + std::to_string(positions) + "]", std::to_string(length));
  }
  const int64_t row_bytes = cache.shape(4) * (cache.dtype() == DType::kFloat32 ? 4 : 2);
  ops.enter();
  cuda::copy_prefix({cache.data(), cache.shape(0), slots, cache.shape(2), positions * row_bytes,
                     length * row_bytes, source, target},
                    ops.stream);
}

void make_ops(CudaOps* self, int device, uintptr_t stream, bool portable) {
  if (device < 0 || device >= cuda_device_count()) {
    fail("CudaOps", "a device in [0, " + std::to_string(cuda_device_count()) + ")",
         std::to_string(device));
  }
  new (self) CudaOps{device, reinterpret_cast<cuda::Stream>(stream), portable};
}

}  // namespace

void bind_cuda(nb::module_& module) {
  nb::class_<CudaOps> ops(module, "CudaOps");
  ops.def("__init__", &make_ops, "device"_a, "stream"_a, "portable"_a = false);
  ops.def("embed", &embed, "token_ids"_a, "weight"_a, "first_id"_a, "out"_a);
  ops.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "eps"_a, "out"_a);
  ops.def("add_rms_norm", &add_rms_norm, "residual"_a, "delta"_a, "weight"_a, "eps"_a, "out"_a);
  ops.def("silu_mul", &silu_mul, "gate_up"_a, "out"_a);
  ops.def("add_bias", &add_bias, "x"_a, "bias"_a);
  ops.def("linear_supported", &linear_supported, "num_rows"_a, "weight"_a);
  ops.def("linear_fills", &linear_fills, "num_rows"_a, "weight"_a);
  ops.def("linear", &linear, "x"_a, "weight"_a, "out"_a, "gated"_a = false);
  ops.def("decode_attention", &decode_attention, "qkv"_a, "q_norm"_a.none(), "k_norm"_a.none(),
          "eps"_a, "cos"_a, "sin"_a, "k_cache"_a, "v_cache"_a, "positions"_a, "slots"_a, "scale"_a,
          "states"_a, "counters"_a, "out"_a);
  ops.def("rope_append", &rope_append, "qkv"_a, "q_norm"_a.none(), "k_norm"_a.none(), "eps"_a,
          "cos"_a, "sin"_a, "k_cache"_a, "v_cache"_a, "slot"_a, "start"_a, "place"_a = nb::none());
  ops.def("prefill_attention", &prefill_attention, "qkv"_a, "k_cache"_a, "v_cache"_a, "slot"_a,
          "start"_a, "scale"_a, "out"_a, "place"_a = nb::none());
  ops.def("copy_prefix", &copy_prefix, "cache"_a, "source"_a, "target"_a, "length"_a);
  ops.def_static("decode_attention_workspace", &cuda::decode_attention_workspace, "num_rows"_a,
                 "num_positions"_a, "num_q_heads"_a, "head_dim"_a);
  bind_cuda_slots(module, ops);
}

}  // namespace slotwise::bindings
