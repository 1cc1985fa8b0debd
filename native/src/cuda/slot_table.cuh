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

// What the row is in the next step, from what its slot is now.
__device__ __forceinline__ void set_row(const SlotTable& table, int row) {
  const bool decodes = table.scheduled[row] != kNotScheduled && table.active[row] != 0;
  table.row_token[row] = decodes ? table.last_token[row] : -1;
  table.row_position[row] = decodes ? table.length[row] : -1;
}

// The team's part of a step's logits is row `part`: which row of the table that is.
__device__ __forceinline__ int table_row(const int32_t* rows, int part) {
  return rows == nullptr ? part : rows[part];
}

// embed, which also stamps the start of a step where the table has stamps.
void launch_embed(const EmbedParams& params, const SlotTable& table, Stream stream);

}  // namespace slotwise::cuda
