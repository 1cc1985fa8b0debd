#include "bind.h"
#include "checks.h"

namespace slotwise::bindings {

using namespace nb::literals;

namespace {

template <typename X>
NormParams norm_params(const char* op, const X& x, const Vector& weight, float eps,
                       const OutMatrix& out) {
  if (x.shape(1) == 0) fail(op, "at least one column", shape_text(x));
  check_shape(op, "weight", weight, {x.shape(1)});
  check_shape(op, "out", out, {x.shape(0), x.shape(1)});
  check_eps(op, eps);
  NormParams params{};
  params.x = x.data();
  params.x_stride = x.stride(0);
  params.weight = weight.data();
  params.eps = eps;
  params.hidden = x.shape(1);
  params.out = out.data();
  params.out_stride = out.stride(0);
  return params;
}

void rms_norm(CpuOps& ops, const Array& x_array, const Array& weight, float eps, const Array& out) {
  const char* op = "rms_norm";
  const Matrix x(op, "x", x_array);
  const NormParams params =
      norm_params(op, x, Vector(op, "weight", weight), eps, OutMatrix(op, "out", out));
  nb::gil_scoped_release release;
  ops.rms_norm(params, x.shape(0));
}

void add_rms_norm(CpuOps& ops, const Array& residual_array, const Array& delta_array,
                  const Array& weight, float eps, const Array& out_array) {
  const char* op = "add_rms_norm";
  const OutMatrix residual(op, "residual", residual_array), out(op, "out", out_array);
  const Matrix delta(op, "delta", delta_array);
  NormParams params = norm_params(op, residual, Vector(op, "weight", weight), eps, out);
  check_shape(op, "delta", delta, {residual.shape(0), residual.shape(1)});
  check_apart(op, "residual", residual, "out", out);
  params.residual = residual.data();
  params.delta = delta.data();
  params.delta_stride = delta.stride(0);
  nb::gil_scoped_release release;
  ops.rms_norm(params, residual.shape(0));
}

void silu_mul(CpuOps& ops, const Array& gate_up_array, const Array& out_array) {
  const char* op = "silu_mul";
  const Matrix gate_up(op, "gate_up", gate_up_array);
  const OutMatrix out(op, "out", out_array);
  check_shape(op, "gate_up", gate_up, {out.shape(0), 2 * out.shape(1)});
  check_apart(op, "gate_up", gate_up, "out", out);
  const SiluParams params{gate_up.data(), gate_up.stride(0), out.shape(1), out.data(),
                          out.stride(0)};
  nb::gil_scoped_release release;
  ops.silu_mul(params, out.shape(0));
}

}  // namespace

void bind_elementwise(nb::class_<CpuOps>& ops) {
  ops.def("rms_norm", &rms_norm, "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a,
          "out"_a.noconvert());
  ops.def("add_rms_norm", &add_rms_norm, "residual"_a.noconvert(), "delta"_a.noconvert(),
          "weight"_a.noconvert(), "eps"_a, "out"_a.noconvert());
  ops.def("silu_mul", &silu_mul, "gate_up"_a.noconvert(), "out"_a.noconvert());
}

}  // namespace slotwise::bindings
