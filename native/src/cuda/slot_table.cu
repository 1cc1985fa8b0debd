// The start of a command; sample.cu moves the slots on.
#include "launch.cuh"
#include "slot_table.cuh"

namespace slotwise::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) begin_command_kernel(SlotTable table) {
  start_successor();
  wait_for_predecessor();
  for (int row = threadIdx.x; row < table.num_rows; row += kThreads) set_row(table, row);
}

}  // namespace

void begin_command(const SlotTable& table, Stream stream) {
  launch("begin_command", begin_command_kernel, {dim3(1), kThreads}, stream, table);
}

void embed_slots(const SlotTable& table, const EmbedParams& params, Stream stream) {
  launch_embed(params, table, stream);
}

}  // namespace slotwise::cuda
