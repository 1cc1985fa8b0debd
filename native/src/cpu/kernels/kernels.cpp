// Compiled once for each instruction set, which names SLOTWISE_ISA and sets the compiler's flags.
// Everything but the table is local to the file, and no inline code of the standard library is
// used: the linker keeps one copy of such code, maybe one this CPU cannot run.
#include "slotwise/kernels.h"

#include "kernels/attention.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/sample.h"

#define SLOTWISE_JOIN_(a, b) a##b
#define SLOTWISE_JOIN(a, b) SLOTWISE_JOIN_(a, b)
#define SLOTWISE_NAME_(isa) #isa
#define SLOTWISE_NAME(isa) SLOTWISE_NAME_(isa)

namespace slotwise {

extern const Kernels SLOTWISE_JOIN(kernels_, SLOTWISE_ISA);
const Kernels SLOTWISE_JOIN(kernels_, SLOTWISE_ISA) = {
    SLOTWISE_NAME(SLOTWISE_ISA),
    linear,
    rms_norm,
    rope_append,
    silu_mul,
    attention_scratch,
    attention_split,
    attention_fold,
    attention_finish,
    scan_logits,
    scale_logits,
    gumbel_argmax,
};

}  // namespace slotwise
