// silu(gate) * up in float32, in single operations that nothing is fused with: the same bits
// wherever it is inlined. exp and the division are the hardware's (some units in the last place;
// the result is rounded to 16 bits): exact ones cost the product of prefill more than its tiles.
#pragma once

#include <cuda_runtime.h>

namespace slotwise::cuda {

__device__ __forceinline__ float silu_times(float gate, float up) {
  return __fmul_rn(__fdividef(gate, __fadd_rn(1.0f, __expf(-gate))), up);
}

}  // namespace slotwise::cuda
