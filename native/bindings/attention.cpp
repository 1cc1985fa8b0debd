#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "bind.h"
#include "checks.h"

namespace slotwise::bindings {

using namespace nb::literals;

namespace {

CacheParams cache_params(const char* op, const Array& k_array, const Array& v_array) {
  const Cache k(op, "k_cache", k_array), v(op, "v_cache", v_array);
  if (dtype_of(v) != dtype_of(k)) fail(op, "k_cache and v_cache of one type", "two types");
  const CacheParams params = cache_layout(op, k, v, dtype_of(k));
  if (k.size() > 0 && k.data() == v.data())
    fail(op, "k_cache apart from v_cache", "one array twice");
  if (params.num_kv_heads < 1) fail(op, "at least one KV head", shape_text(k));
  if (params.head_dim < 2 || params.head_dim % 2 != 0 || params.head_dim > kMaxHeadDim) {
    fail(op, "an even head dimension of at most " + std::to_string(kMaxHeadDim),
         std::to_string(params.head_dim));
  }
  return params;
}

// The query heads of qkv [T, (H_q + 2 H_kv) D].
template <typename Qkv>
int64_t query_heads(const char* op, const Qkv& qkv, const CacheParams& cache) {
  const int64_t width = qkv.shape(1), heads = width / cache.head_dim - 2 * cache.num_kv_heads;
  if (width % cache.head_dim != 0 || heads < 1 || heads % cache.num_kv_heads != 0) {
    fail(op,
         "qkv of (H_q + 2 * " + std::to_string(cache.num_kv_heads) + ") * " +
             std::to_string(cache.head_dim) + " columns, H_q a multiple of " +
             std::to_string(cache.num_kv_heads),
         shape_text(qkv));
  }
  return heads;
}

void check_rows(const char* op, const Ints& slots, const Ints& positions, int64_t rows,
                const CacheParams& cache) {
  check_shape(op, "slots", slots, {rows});
  check_shape(op, "positions", positions, {rows});
  check_range(op, "slots", slots, cache.num_slots);
  check_range(op, "positions", positions, cache.num_positions);
}

// No two rows may append to one place.
void check_places(const char* op, const Ints& slots, const Ints& positions) {
  using Place = std::tuple<int32_t, int32_t, int64_t>;
  std::vector<Place> places;
  for (int64_t row = 0; row < slots.shape(0); ++row) {
    places.emplace_back(slots.data()[row], positions.data()[row], row);
  }
  if (!std::is_sorted(places.begin(), places.end())) std::sort(places.begin(), places.end());
  for (size_t i = 1; i < places.size(); ++i) {
    const auto [slot, position, row] = places[i];
    const auto [other_slot, other_position, other_row] = places[i - 1];
    if (slot != other_slot || position != other_position) continue;
    fail(op, "every row at a place of its own",
         "rows " + std::to_string(other_row) + " and " + std::to_string(row) + " at slot " +
             std::to_string(slot) + ", position " + std::to_string(position));
  }
}

AttentionParams attention_params(const char* op, const Matrix& qkv, const Array& k_cache,
                                 const Array& v_cache, float scale, const Array& out_array) {
  const OutMatrix out(op, "out", out_array);
  AttentionParams params{};
  params.cache = cache_params(op, k_cache, v_cache);
  params.num_q_heads = query_heads(op, qkv, params.cache);
  check_shape(op, "out", out, {qkv.shape(0), params.num_q_heads * params.cache.head_dim});
  check_apart(op, "qkv", qkv, "out", out);
  if (!std::isfinite(scale)) fail(op, "a finite scale", std::to_string(scale));
  params.q = qkv.data();
  params.q_stride = qkv.stride(0);
  params.scale = scale;
  params.out = out.data();
  params.out_stride = out.stride(0);
  return params;
}

void set_head_norms(const char* op, const std::optional<Array>& q_array,
                    const std::optional<Array>& k_array, RopeParams& params) {
  if (q_array.has_value() != k_array.has_value()) {
    fail(op, "both of q_norm and k_norm or none", "one");
  }
  if (!q_array) return;
  const Vector q_norm(op, "q_norm", *q_array), k_norm(op, "k_norm", *k_array);
  check_shape(op, "q_norm", q_norm, {params.cache.head_dim});
  check_shape(op, "k_norm", k_norm, {params.cache.head_dim});
  params.q_norm = q_norm.data();
  params.k_norm = k_norm.data();
}

void rope_append(CpuOps& ops, const Array& qkv_array, const std::optional<Array>& q_norm,
                 const std::optional<Array>& k_norm, float eps, const Array& cos_array,
                 const Array& sin_array, const Array& slots_array, const Array& positions_array,
                 const Array& k_cache, const Array& v_cache) {
  const char* op = "rope_append";
  const OutMatrix qkv(op, "qkv", qkv_array);
  const Matrix cos(op, "cos", cos_array), sin(op, "sin", sin_array);
  const Ints slots(op, "slots", slots_array), positions(op, "positions", positions_array);
  RopeParams params{};
  params.cache = cache_params(op, k_cache, v_cache);
  params.num_q_heads = query_heads(op, qkv, params.cache);
  set_head_norms(op, q_norm, k_norm, params);
  check_eps(op, eps);
  check_shape(op, "cos", cos, {cos.shape(0), params.cache.head_dim / 2});
  check_shape(op, "sin", sin, {cos.shape(0), params.cache.head_dim / 2});
  check_rows(op, slots, positions, qkv.shape(0), params.cache);
  check_range(op, "positions", positions, cos.shape(0));
  check_places(op, slots, positions);
  params.qkv = qkv.data();
  params.qkv_stride = qkv.stride(0);
  params.eps = eps;
  params.cos = cos.data();
  params.cos_stride = cos.stride(0);
  params.sin = sin.data();
  params.sin_stride = sin.stride(0);
  params.slots = slots.data();
  params.positions = positions.data();
  nb::gil_scoped_release release;
  ops.rope_append(params, qkv.shape(0));
}

void decode_attention(CpuOps& ops, const Array& qkv_array, const Array& k_cache,
                      const Array& v_cache, const Array& slots_array, const Array& positions_array,
                      float scale, const Array& out) {
  const char* op = "decode_attention";
  const Matrix qkv(op, "qkv", qkv_array);
  const Ints slots(op, "slots", slots_array), positions(op, "positions", positions_array);
  const AttentionParams params = attention_params(op, qkv, k_cache, v_cache, scale, out);
  check_rows(op, slots, positions, qkv.shape(0), params.cache);
  nb::gil_scoped_release release;
  ops.decode_attention(params, qkv.shape(0), slots.data(), positions.data());
}

void prefill_attention(CpuOps& ops, const Array& qkv_array, const Array& k_cache,
                       const Array& v_cache, int64_t slot, int64_t start, float scale,
                       const Array& out) {
  const char* op = "prefill_attention";
  const Matrix qkv(op, "qkv", qkv_array);
  const AttentionParams params = attention_params(op, qkv, k_cache, v_cache, scale, out);
  const int64_t rows = qkv.shape(0), positions = params.cache.num_positions;
  if (slot < 0 || slot >= params.cache.num_slots) {
    fail(op, "slot in [0, " + std::to_string(params.cache.num_slots) + ")", std::to_string(slot));
  }
  if (start < 0 || start > positions - rows) {
    fail(op,
         "start in [0, " + std::to_string(positions - rows) + "] for " + std::to_string(rows) +
             " rows of " + std::to_string(positions) + " positions",
         std::to_string(start));
  }
  nb::gil_scoped_release release;
  ops.prefill_attention(params, rows, slot, start);
}

}  // namespace

void bind_attention(nb::class_<CpuOps>& ops) {
  ops.def("rope_append", &rope_append, "qkv"_a.noconvert(), "q_norm"_a.noconvert().none(),
          "k_norm"_a.noconvert().none(), "eps"_a, "cos"_a.noconvert(), "sin"_a.noconvert(),
          "slots"_a.noconvert(), "positions"_a.noconvert(), "k_cache"_a.noconvert(),
          "v_cache"_a.noconvert());
  ops.def("decode_attention", &decode_attention, "qkv"_a.noconvert(), "k_cache"_a.noconvert(),
          "v_cache"_a.noconvert(), "slots"_a.noconvert(), "positions"_a.noconvert(), "scale"_a,
          "out"_a.noconvert());
  ops.def("prefill_attention", &prefill_attention, "qkv"_a.noconvert(), "k_cache"_a.noconvert(),
          "v_cache"_a.noconvert(), "slot"_a, "start"_a, "scale"_a, "out"_a.noconvert());
}

}  // namespace slotwise::bindings
