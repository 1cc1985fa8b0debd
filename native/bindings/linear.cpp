#include <nanobind/stl/optional.h>

#include <optional>

#include "bind.h"
#include "checks.h"

namespace slotwise::bindings {

using namespace nb::literals;

namespace {

PackedWeight pack(CpuOps& ops, const Array& weight_array, const std::optional<Array>& bias_array) {
  const char* op = "pack";
  const AnyMatrix weight(op, "weight", weight_array);
  PackedWeight::Source source{};
  source.weight = weight.data();
  source.dtype = dtype_of(weight);
  source.n = weight.shape(0);
  source.k = weight.shape(1);
  source.stride = weight.stride(0);
  if (source.n == 0 || source.k == 0) fail(op, "weight [N, K] of at least 1", shape_text(weight));
  if (bias_array) {
    const Vector bias(op, "bias", *bias_array);
    check_shape(op, "bias", bias, {source.n});
    source.bias = bias.data();
  }
  nb::gil_scoped_release release;
  return ops.pack(source);
}

void linear(CpuOps& ops, const Array& x_array, const PackedWeight& weight, const Array& out_array) {
  const char* op = "linear";
  const Matrix x(op, "x", x_array);
  const OutMatrix out(op, "out", out_array);
  check_shape(op, "x", x, {x.shape(0), weight.num_cols()});
  check_shape(op, "out", out, {x.shape(0), weight.num_rows()});
  check_apart(op, "x", x, "out", out);
  LinearParams params{};
  params.x = x.data();
  params.x_stride = x.stride(0);
  params.num_rows = x.shape(0);
  params.panels = weight.panels();
  params.dtype = weight.dtype();
  params.bias = weight.bias();
  params.n = weight.num_rows();
  params.k = weight.num_cols();
  params.out = out.data();
  params.out_stride = out.stride(0);
  nb::gil_scoped_release release;
  ops.linear(params);
}

void embed(CpuOps& ops, const Array& ids_array, const PackedWeight& weight, int64_t first_id,
           const Array& out_array) {
  const char* op = "embed";
  const Ints token_ids(op, "token_ids", ids_array);
  const OutMatrix out(op, "out", out_array);
  check_shape(op, "out", out, {token_ids.shape(0), weight.num_cols()});
  const EmbedParams params{token_ids.data(), token_ids.shape(0), first_id, out.data(),
                           out.stride(0)};
  nb::gil_scoped_release release;
  ops.embed(weight, params);
}

}  // namespace

void bind_packed_weight(nb::module_& module) {
  nb::class_<PackedWeight>(module, "PackedWeight")
      .def_prop_ro("num_rows", &PackedWeight::num_rows)
      .def_prop_ro("num_cols", &PackedWeight::num_cols)
      .def_prop_ro("num_bytes", &PackedWeight::num_bytes)
      .def_prop_ro("dtype", [](const PackedWeight& weight) {
        return weight.dtype() == DType::kFloat32 ? "float32" : "bfloat16";
      });
}

void bind_linear(nb::class_<CpuOps>& ops) {
  ops.def("pack", &pack, "weight"_a.noconvert(), "bias"_a.noconvert() = nb::none());
  ops.def("linear", &linear, "x"_a.noconvert(), "weight"_a, "out"_a.noconvert());
  ops.def("embed", &embed, "token_ids"_a.noconvert(), "weight"_a, "first_id"_a,
          "out"_a.noconvert());
}

}  // namespace slotwise::bindings
