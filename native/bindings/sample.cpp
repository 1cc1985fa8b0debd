#include <cmath>

#include "bind.h"
#include "checks.h"

namespace slotwise::bindings {

using namespace nb::literals;

namespace {

constexpr int64_t kMaxVocab = int64_t{1} << 30;

// A parameter of every row.
template <typename View>
View per_row(const char* op, const char* name, const Array& array, int64_t rows) {
  const View view(op, name, array);
  check_shape(op, name, view, {rows});
  return view;
}

template <typename View, typename Accept>
void check_values(const char* name, const View& array, const char* expected, Accept&& accept) {
  for (int64_t i = 0; i < array.shape(0); ++i) {
    if (accept(array.data()[i])) continue;
    fail("sample", std::string(name) + "[" + std::to_string(i) + "] " + expected,
         std::to_string(array.data()[i]));
  }
}

void check_vocab(const char* op, int64_t vocab) {
  if (vocab < 1 || vocab > kMaxVocab) {
    fail(op, "a vocabulary of 1 to 2^30 tokens", std::to_string(vocab));
  }
}

void sample(CpuOps& ops, const Array& logits_array, const Array& temperature_array,
            const Array& top_k_array, const Array& top_p_array, const Array& min_p_array,
            const Array& seeds_array, const Array& positions_array, const Array& out_array) {
  const char* op = "sample";
  const Matrix logits(op, "logits", logits_array);
  const int64_t rows = logits.shape(0), vocab = logits.shape(1);
  check_vocab(op, vocab);
  const auto temperature = per_row<Vector>(op, "temperature", temperature_array, rows);
  const auto top_k = per_row<Ints>(op, "top_k", top_k_array, rows);
  const auto top_p = per_row<Vector>(op, "top_p", top_p_array, rows);
  const auto min_p = per_row<Vector>(op, "min_p", min_p_array, rows);
  const auto seeds = per_row<Longs>(op, "seeds", seeds_array, rows);
  const auto positions = per_row<Ints>(op, "positions", positions_array, rows);
  const auto out = per_row<OutInts>(op, "out", out_array, rows);
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

void logprobs(CpuOps& ops, const Array& logits_array, const Array& token_ids_array,
              const Array& counts_array, const Array& out_array) {
  const char* op = "logprobs";
  const Matrix logits(op, "logits", logits_array);
  const int64_t rows = logits.shape(0), vocab = logits.shape(1);
  check_vocab(op, vocab);
  const auto token_ids = per_row<Ints>(op, "token_ids", token_ids_array, rows);
  const auto counts = per_row<Ints>(op, "counts", counts_array, rows);
  check_range(op, "token_ids", token_ids, vocab);
  check_range(op, "counts", counts, kMaxLogprobs + 1);
  const Tensor<int32_t, 2> out(op, "out", out_array);
  check_shape(op, "out", out, {rows, sizeof(TokenLogprobs) / sizeof(int32_t)});
  check_contiguous(op, "out", out);
  const LogprobsParams params{logits.data(), logits.stride(0),
                              vocab,         token_ids.data(),
                              counts.data(), reinterpret_cast<TokenLogprobs*>(out.data())};
  nb::gil_scoped_release release;
  ops.logprobs(params, rows);
}

}  // namespace

void bind_sample(nb::class_<CpuOps>& ops) {
  ops.def("sample", &sample, "logits"_a.noconvert(), "temperature"_a.noconvert(),
          "top_k"_a.noconvert(), "top_p"_a.noconvert(), "min_p"_a.noconvert(),
          "seeds"_a.noconvert(), "positions"_a.noconvert(), "out"_a.noconvert());
  ops.def("logprobs", &logprobs, "logits"_a.noconvert(), "token_ids"_a.noconvert(),
          "counts"_a.noconvert(), "out"_a.noconvert());
}

}  // namespace slotwise::bindings
