// silu(gate) * up in float32, in single rounded operations: the same bits wherever it is inlined.
#pragma once

#include <cuda_runtime.h>

namespace slotwise::cuda {

__device__ __forceinline__ float silu_times(float gate, float up) {
  return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate))), up);
}

}  // namespace slotwise::cuda
