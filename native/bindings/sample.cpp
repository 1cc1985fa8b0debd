#include <cmath>

#include "bind.h"
#include "checks.h"

namespace slotwise::bindings {

using namespace nb::literals;

namespace {

template <typename Array>
void check_row_array(const char* name, const Array& array, int64_t rows) {
  check_shape("sample", name, array, {rows});
  check_layout("sample", name, array);
}

template <typename Array, typename Accept>
void check_values(const char* name, const Array& array, const char* expected, Accept&& accept) {
  for (int64_t i = 0; i < array.shape(0); ++i) {
    if (accept(array.data()[i])) continue;
    fail("sample", std::string(name) + "[" + std::to_string(i) + "] " + expected,
         std::to_string(array.data()[i]));
  }
}

void sample(CpuOps& ops, const Matrix& logits, const Vector& temperature, const Ints& top_k,
            const Vector& top_p, const Vector& min_p, const Longs& seeds, const Ints& positions,
            const OutInts& out) {
  const int64_t rows = logits.shape(0), vocab = logits.shape(1);
  if (vocab < 1 || vocab > INT32_MAX / 2) {
    fail("sample", "a vocabulary of 1 to 2^30 tokens", std::to_string(vocab));
  }
  check_layout("sample", "logits", logits);
  check_row_array("temperature", temperature, rows);
  check_row_array("top_k", top_k, rows);
  check_row_array("top_p", top_p, rows);
  check_row_array("min_p", min_p, rows);
  check_row_array("seeds", seeds, rows);
  check_row_array("positions", positions, rows);
  check_row_array("out", out, rows);
  const auto in_unit = [](float x) { return x >= 0.0f && x <= 1.0f; };
  check_values("temperature", temperature, "finite and at least 0",
               [](float x) { return x >= 0.0f && std::isfinite(x); });
  check_values("top_k", top_k, "at least 0", [](int32_t x) { return x >= 0; });
  check_values("top_p", top_p, "in [0, 1]", in_unit);
  check_values("min_p", min_p, "in [0, 1]", in_unit);
  SampleParams params{};
  params.logits = logits.data();
  params.logits_stride = logits.stride(0);
  params.vocab = vocab;
  params.temperature = temperature.data();
  params.top_k = top_k.data();
  params.top_p = top_p.data();
  params.min_p = min_p.data();
  params.seeds = seeds.data();
  params.positions = positions.data();
  params.out = out.data();
  nb::gil_scoped_release release;
  ops.sample(params, rows);
}

}  // namespace

void bind_sample(nb::class_<CpuOps>& ops) {
  ops.def("sample", &sample, "logits"_a.noconvert(), "temperature"_a.noconvert(),
          "top_k"_a.noconvert(), "top_p"_a.noconvert(), "min_p"_a.noconvert(),
          "seeds"_a.noconvert(), "positions"_a.noconvert(), "out"_a.noconvert());
}

}  // namespace slotwise::bindings
