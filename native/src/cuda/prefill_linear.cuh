#pragma once

#include "slotwise/cuda.h"

namespace slotwise::cuda {

// `linear` of any number of rows, by tiles; 16-bit outputs.
void prefill_linear(const LinearParams& params, Stream stream);

}  // namespace slotwise::cuda
