#include "bind.h"

namespace slotwise::bindings {

void bind_cuda_peers(nanobind::module_&) {}

}  // namespace slotwise::bindings
