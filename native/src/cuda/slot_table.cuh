// The slot table as kernels see it.
#pragma once

#include <cuda_runtime.h>

#include "slotwise/cuda.h"

namespace slotwise::cuda {

enum class Stamp { kStart, kEnd };

// The device's clock into the step's row of stamps.
__device__ __forceinline__ void stamp(const SlotTable& table, uint32_t step, Stamp which) {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  const uint32_t row = step % static_cast<uint32_t>(table.ring_rows);
  table.stamps[2 * row + static_cast<uint32_t>(which)] = now;
}

// What the slot's row of the next step is, from what the slot is now.
__device__ __forceinline__ void set_row(const SlotTable& table, int slot) {
  const bool decodes = table.scheduled[slot] != 0 && table.active[slot] != 0;
  table.row_token[slot] = decodes ? table.last_token[slot] : -1;
  table.row_position[slot] = decodes ? table.length[slot] : -1;
}

// embed, which also stamps the start of a step where the table has stamps.
void launch_embed(const EmbedParams& params, const SlotTable& table, Stream stream);

}  // namespace slotwise::cuda
