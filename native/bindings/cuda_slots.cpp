#include <nanobind/stl/optional.h>

#include <optional>

#include "bind.h"
#include "cuda_array.h"
#include "cuda_ops.h"

namespace slotwise::bindings {

using namespace nb::literals;

namespace {

using RowInts = DeviceTensor<int32_t, 1>;
using RowFloats = DeviceTensor<float, 1>;

template <typename View>
auto* field(const char* op, const char* name, const Array& array, int64_t num_rows) {
  const View view(op, name, array);
  check_shape(op, name, view, {num_rows});
  return view.data();
}

// [R, columns], rows one after another.
template <typename View>
auto* matrix(const char* op, const char* name, const Array& array, int64_t num_rows,
             int64_t columns) {
  const View view(op, name, array);
  check_shape(op, name, view, {num_rows, columns});
  check_contiguous(op, name, view);
  return view.data();
}

constexpr int64_t kLogprobsWords = sizeof(TokenLogprobs) / sizeof(int32_t);

int64_t words_of(int64_t vocab) { return (vocab + 31) / 32; }

// The arrays stay the caller's, who keeps them as long as the table.
void make_table(cuda::SlotTable* self, int32_t vocab, const Array& last_token, const Array& length,
                const Array& active, const Array& scheduled, const Array& row_token,
                const Array& row_position, const Array& max_len, const Array& end_ids,
                const Array& temperature, const Array& top_k, const Array& top_p,
                const Array& min_p, const Array& seed, const Array& counter, uintptr_t ring,
                uintptr_t stamps, int32_t ring_rows) {
  const char* op = "SlotTable";
  const int64_t rows = RowInts(op, "last_token", last_token).shape(0);
  const auto ints = [&](const char* name, const Array& array) {
    return field<RowInts>(op, name, array, rows);
  };
  const auto floats = [&](const char* name, const Array& array) {
    return field<RowFloats>(op, name, array, rows);
  };
  cuda::SlotTable table{};
  table.num_rows = static_cast<int32_t>(rows);
  table.vocab = vocab;
  table.last_token = ints("last_token", last_token);
  table.length = ints("length", length);
  table.active = ints("active", active);
  table.scheduled = ints("scheduled", scheduled);
  table.row_token = ints("row_token", row_token);
  table.row_position = ints("row_position", row_position);
  table.max_len = ints("max_len", max_len);
  table.end_ids = reinterpret_cast<uint32_t*>(
      matrix<DeviceTensor<int32_t, 2>>(op, "end_ids", end_ids, rows, words_of(vocab)));
  table.temperature = floats("temperature", temperature);
  table.top_k = ints("top_k", top_k);
  table.top_p = floats("top_p", top_p);
  table.min_p = floats("min_p", min_p);
  table.seed = field<DeviceTensor<int64_t, 1>>(op, "seed", seed, rows);
  table.counter = reinterpret_cast<uint32_t*>(field<RowInts>(op, "counter", counter, 1));
  table.ring = reinterpret_cast<int32_t*>(ring);
  table.stamps = reinterpret_cast<uint64_t*>(stamps);
  table.ring_rows = ring_rows;
  new (self) cuda::SlotTable(table);
}

// The arrays stay the caller's here too.
void make_adjust_table(cuda::AdjustTable* self, const Array& flags, const Array& min_len,
                       const Array& frequency_penalty, const Array& presence_penalty,
                       const Array& repetition_penalty, const Array& counts, const Array& bias,
                       const Array& mask) {
  const char* op = "AdjustTable";
  const DeviceTensor<int32_t, 2> shape(op, "counts", counts);
  const int64_t rows = shape.shape(0), vocab = shape.shape(1);
  cuda::AdjustTable table{};
  table.num_rows = static_cast<int32_t>(rows);
  table.vocab = static_cast<int32_t>(vocab);
  table.flags = field<RowInts>(op, "flags", flags, rows);
  table.min_len = field<RowInts>(op, "min_len", min_len, rows);
  table.frequency_penalty = field<RowFloats>(op, "frequency_penalty", frequency_penalty, rows);
  table.presence_penalty = field<RowFloats>(op, "presence_penalty", presence_penalty, rows);
  table.repetition_penalty = field<RowFloats>(op, "repetition_penalty", repetition_penalty, rows);
  table.counts = matrix<DeviceTensor<int32_t, 2>>(op, "counts", counts, rows, vocab);
  table.bias = matrix<DeviceTensor<float, 2>>(op, "bias", bias, rows, vocab);
  table.mask = reinterpret_cast<uint32_t*>(
      matrix<DeviceTensor<int32_t, 2>>(op, "mask", mask, rows, words_of(vocab)));
  new (self) cuda::AdjustTable(table);
}

void begin_command(CudaOps& ops, const cuda::SlotTable& table) {
  ops.enter();
  cuda::begin_command(table, ops.stream);
}

void embed_slots(CudaOps& ops, const cuda::SlotTable& table, const Array& weight_array,
                 int64_t first_id, const Array& out_array) {
  const char* op = "embed_slots";
  const DeviceTensor<const void, 2> weight(op, "weight", weight_array);
  const DeviceTensor<float, 2> out(op, "out", out_array);
  check_contiguous(op, "weight", weight);
  check_contiguous(op, "out", out);
  check_shape(op, "out", out, {table.num_rows, weight.shape(1)});
  ops.enter();
  cuda::embed_slots(table,
                    {table.row_token, table.num_rows, weight.data(), weight.dtype(),
                     weight.shape(0), first_id, weight.shape(1), out.data()},
                    ops.stream);
}

// The table's rows whose prompts end; null where they are all of them in order.
const int32_t* rows_of_prompts(const char* op, const std::optional<Array>& array, int64_t count,
                               const cuda::SlotTable& table) {
  if (array) {
    const DeviceTensor<const int32_t, 1> rows(op, "rows", *array);
    check_shape(op, "rows", rows, {count});
    return rows.data();
  }
  if (count != table.num_rows) fail(op, "all rows of the table", std::to_string(count) + " rows");
  return nullptr;
}

void adjust_logits(CudaOps& ops, const cuda::SlotTable& table, const cuda::AdjustTable& adjust,
                   const Array& logits_array, const std::optional<Array>& rows_array,
                   const Array& out_array) {
  const char* op = "adjust_logits";
  const DeviceTensor<const float, 2> logits(op, "logits", logits_array);
  const DeviceTensor<float, 2> out(op, "out", out_array);
  const int64_t count = logits.shape(0);
  check_shape(op, "logits", logits, {count, table.vocab});
  check_shape(op, "out", out, {count, table.vocab});
  if (adjust.num_rows != table.num_rows || adjust.vocab != table.vocab) {
    fail(op, "two tables of as many rows and tokens", "others");
  }
  const cuda::AdjustParams params{logits.data(), logits.stride(0),
                                  count,         rows_of_prompts(op, rows_array, count, table),
                                  out.data(),    out.stride(0)};
  ops.enter();
  cuda::adjust_logits(table, adjust, params, ops.stream);
}

void sample(CudaOps& ops, const cuda::SlotTable& table, const Array& logits_array,
            const std::optional<Array>& rows_array, const Array& workspace_array) {
  const char* op = "sample";
  const DeviceTensor<const float, 2> logits(op, "logits", logits_array);
  const DeviceTensor<uint8_t, 1> workspace(op, "workspace", workspace_array);
  const int64_t count = logits.shape(0);
  check_shape(op, "logits", logits, {count, table.vocab});
  const int64_t bytes = cuda::sample_workspace(count, table.vocab);
  if (workspace.shape(0) < bytes) {
    fail(op, "workspace of at least " + std::to_string(bytes) + " bytes", shape_text(workspace));
  }
  const int32_t* rows = rows_of_prompts(op, rows_array, count, table);
  ops.enter();
  cuda::sample(table, {logits.data(), logits.stride(0), count, rows, workspace.data()}, ops.stream);
}

void logprobs(CudaOps& ops, const cuda::SlotTable& table, const Array& logits_array,
              const std::optional<Array>& rows_array, const Array& counts_array,
              const Array& out_array) {
  const char* op = "logprobs";
  const DeviceTensor<const float, 2> logits(op, "logits", logits_array);
  const int64_t count = logits.shape(0);
  check_shape(op, "logits", logits, {count, table.vocab});
  const RowInts counts(op, "counts", counts_array);
  check_shape(op, "counts", counts, {table.num_rows});
  // Pinned: the device writes it.
  const Tensor<int32_t, 3> out(op, "out", out_array);
  check_shape(op, "out", out, {out.shape(0), table.num_rows, kLogprobsWords});
  check_contiguous(op, "out", out);
  if (out.shape(0) < 1) fail(op, "out of at least one row", shape_text(out));
  const cuda::LogprobsParams params{logits.data(),
                                    logits.stride(0),
                                    count,
                                    rows_of_prompts(op, rows_array, count, table),
                                    counts.data(),
                                    reinterpret_cast<TokenLogprobs*>(out.data()),
                                    static_cast<int32_t>(out.shape(0))};
  ops.enter();
  cuda::logprobs(table, params, ops.stream);
}

void token_logprobs(CudaOps& ops, const Array& logits_array, const Array& ids_array, int32_t best,
                    const Array& out_array) {
  const char* op = "token_logprobs";
  const DeviceTensor<const float, 2> logits(op, "logits", logits_array);
  const DeviceTensor<const int32_t, 1> token_ids(op, "token_ids", ids_array);
  const int64_t count = logits.shape(0);
  check_shape(op, "token_ids", token_ids, {count});
  if (logits.shape(1) < 1) fail(op, "logits of at least one token", shape_text(logits));
  if (best < 0 || best > kMaxLogprobs) {
    fail(op, "count in [0, " + std::to_string(kMaxLogprobs) + "]", std::to_string(best));
  }
  // Pinned: the device writes it.
  const Tensor<int32_t, 2> out(op, "out", out_array);
  check_shape(op, "out", out, {count, kLogprobsWords});
  check_contiguous(op, "out", out);
  const cuda::TokenLogprobsParams params{logits.data(),
                                         logits.stride(0),
                                         count,
                                         static_cast<int32_t>(logits.shape(1)),
                                         token_ids.data(),
                                         best,
                                         reinterpret_cast<TokenLogprobs*>(out.data())};
  ops.enter();
  cuda::token_logprobs(params, ops.stream);
}

}  // namespace

void bind_cuda_slots(nb::module_& module, nb::class_<CudaOps>& ops) {
  nb::class_<cuda::SlotTable>(module, "SlotTable")
      .def("__init__", &make_table, nb::kw_only(), "vocab"_a, "last_token"_a, "length"_a,
           "active"_a, "scheduled"_a, "row_token"_a, "row_position"_a, "max_len"_a, "end_ids"_a,
           "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a, "counter"_a, "ring"_a,
           "stamps"_a, "ring_rows"_a);
  nb::class_<cuda::AdjustTable>(module, "AdjustTable")
      .def("__init__", &make_adjust_table, nb::kw_only(), "flags"_a, "min_len"_a,
           "frequency_penalty"_a, "presence_penalty"_a, "repetition_penalty"_a, "counts"_a,
           "bias"_a, "mask"_a);
  ops.def("begin_command", &begin_command, "table"_a);
  ops.def("embed_slots", &embed_slots, "table"_a, "weight"_a, "first_id"_a, "out"_a);
  ops.def("adjust_logits", &adjust_logits, "table"_a, "adjust"_a, "logits"_a, "rows"_a.none(),
          "out"_a);
  ops.def("sample", &sample, "table"_a, "logits"_a, "rows"_a.none(), "workspace"_a);
  ops.def("logprobs", &logprobs, "table"_a, "logits"_a, "rows"_a.none(), "counts"_a, "out"_a);
  ops.def("token_logprobs", &token_logprobs, "logits"_a, "token_ids"_a, "count"_a, "out"_a);
  ops.def_static("sample_workspace", &cuda::sample_workspace, "num_rows"_a, "vocab"_a);
}

}  // namespace slotwise::bindings
