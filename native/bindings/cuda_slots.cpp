#include <nanobind/stl/optional.h>

#include <optional>

#include "bind.h"
#include "cuda_array.h"
#include "cuda_ops.h"

namespace slotwise::bindings {

using namespace nb::literals;

namespace {

using SlotInts = DeviceTensor<int32_t, 1>;
using SlotFloats = DeviceTensor<float, 1>;

template <typename View>
auto* field(const char* name, const Array& array, int64_t num_slots) {
  const View view("SlotTable", name, array);
  check_shape("SlotTable", name, view, {num_slots});
  return view.data();
}

// The arrays stay the caller's, who keeps them as long as the table.
void make_table(cuda::SlotTable* self, int32_t vocab, const Array& last_token, const Array& length,
                const Array& active, const Array& scheduled, const Array& row_token,
                const Array& row_position, const Array& max_len, const Array& end_ids,
                const Array& temperature, const Array& top_k, const Array& top_p,
                const Array& min_p, const Array& seed, const Array& counter, uintptr_t ring,
                uintptr_t stamps, int32_t ring_rows) {
  const int64_t slots = SlotInts("SlotTable", "last_token", last_token).shape(0);
  const DeviceTensor<int32_t, 2> ends("SlotTable", "end_ids", end_ids);
  check_shape("SlotTable", "end_ids", ends, {slots, (vocab + 31) / 32});
  check_contiguous("SlotTable", "end_ids", ends);
  const auto ints = [&](const char* name, const Array& array) {
    return field<SlotInts>(name, array, slots);
  };
  const auto floats = [&](const char* name, const Array& array) {
    return field<SlotFloats>(name, array, slots);
  };
  cuda::SlotTable table{};
  table.num_slots = static_cast<int32_t>(slots);
  table.vocab = vocab;
  table.last_token = ints("last_token", last_token);
  table.length = ints("length", length);
  table.active = ints("active", active);
  table.scheduled = ints("scheduled", scheduled);
  table.row_token = ints("row_token", row_token);
  table.row_position = ints("row_position", row_position);
  table.max_len = ints("max_len", max_len);
  table.end_ids = reinterpret_cast<uint32_t*>(ends.data());
  table.temperature = floats("temperature", temperature);
  table.top_k = ints("top_k", top_k);
  table.top_p = floats("top_p", top_p);
  table.min_p = floats("min_p", min_p);
  table.seed = field<DeviceTensor<int64_t, 1>>("seed", seed, slots);
  table.counter = reinterpret_cast<uint32_t*>(field<SlotInts>("counter", counter, 1));
  table.ring = reinterpret_cast<int32_t*>(ring);
  table.stamps = reinterpret_cast<uint64_t*>(stamps);
  table.ring_rows = ring_rows;
  new (self) cuda::SlotTable(table);
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
  check_shape(op, "out", out, {table.num_slots, weight.shape(1)});
  ops.enter();
  cuda::embed_slots(table,
                    {table.row_token, table.num_slots, weight.data(), weight.dtype(),
                     weight.shape(0), first_id, weight.shape(1), out.data()},
                    ops.stream);
}

// The slots of rows that end prompts; null where rows are all slots in order.
const int32_t* slots_of_rows(const char* op, const std::optional<Array>& array, int64_t rows,
                             const cuda::SlotTable& table) {
  if (array) {
    const DeviceTensor<const int32_t, 1> slots(op, "slots", *array);
    check_shape(op, "slots", slots, {rows});
    return slots.data();
  }
  if (rows != table.num_slots) fail(op, "one row per slot", std::to_string(rows) + " rows");
  return nullptr;
}

void sample(CudaOps& ops, const cuda::SlotTable& table, const Array& logits_array,
            const std::optional<Array>& slots_array, const Array& workspace_array) {
  const char* op = "sample";
  const DeviceTensor<const float, 2> logits(op, "logits", logits_array);
  const DeviceTensor<uint8_t, 1> workspace(op, "workspace", workspace_array);
  const int64_t rows = logits.shape(0);
  check_shape(op, "logits", logits, {rows, table.vocab});
  const int64_t bytes = cuda::sample_workspace(rows, table.vocab);
  if (workspace.shape(0) < bytes) {
    fail(op, "workspace of at least " + std::to_string(bytes) + " bytes", shape_text(workspace));
  }
  const int32_t* slots = slots_of_rows(op, slots_array, rows, table);
  ops.enter();
  cuda::sample(table, {logits.data(), logits.stride(0), rows, slots, workspace.data()}, ops.stream);
}

void logprobs(CudaOps& ops, const cuda::SlotTable& table, const Array& logits_array,
              const std::optional<Array>& slots_array, const Array& counts_array,
              const Array& out_array) {
  const char* op = "logprobs";
  const DeviceTensor<const float, 2> logits(op, "logits", logits_array);
  const int64_t rows = logits.shape(0);
  check_shape(op, "logits", logits, {rows, table.vocab});
  const SlotInts counts(op, "counts", counts_array);
  check_shape(op, "counts", counts, {table.num_slots});
  // Pinned: the device writes it.
  const Tensor<int32_t, 3> out(op, "out", out_array);
  check_shape(op, "out", out,
              {out.shape(0), table.num_slots, sizeof(TokenLogprobs) / sizeof(int32_t)});
  check_contiguous(op, "out", out);
  if (out.shape(0) < 1) fail(op, "out of at least one row", shape_text(out));
  const cuda::LogprobsParams params{logits.data(),
                                    logits.stride(0),
                                    rows,
                                    slots_of_rows(op, slots_array, rows, table),
                                    counts.data(),
                                    reinterpret_cast<TokenLogprobs*>(out.data()),
                                    static_cast<int32_t>(out.shape(0))};
  ops.enter();
  cuda::logprobs(table, params, ops.stream);
}

}  // namespace

void bind_cuda_slots(nb::module_& module, nb::class_<CudaOps>& ops) {
  nb::class_<cuda::SlotTable>(module, "SlotTable")
      .def("__init__", &make_table, nb::kw_only(), "vocab"_a, "last_token"_a, "length"_a,
           "active"_a, "scheduled"_a, "row_token"_a, "row_position"_a, "max_len"_a, "end_ids"_a,
           "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a, "counter"_a, "ring"_a,
           "stamps"_a, "ring_rows"_a);
  ops.def("begin_command", &begin_command, "table"_a);
  ops.def("embed_slots", &embed_slots, "table"_a, "weight"_a, "first_id"_a, "out"_a);
  ops.def("sample", &sample, "table"_a, "logits"_a, "slots"_a.none(), "workspace"_a);
  ops.def("logprobs", &logprobs, "table"_a, "logits"_a, "slots"_a.none(), "counts"_a, "out"_a);
  ops.def_static("sample_workspace", &cuda::sample_workspace, "num_rows"_a, "vocab"_a);
}

}  // namespace slotwise::bindings
