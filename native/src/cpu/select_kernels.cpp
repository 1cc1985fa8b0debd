#include <stdexcept>

#include "slotwise/kernels.h"

namespace slotwise {

extern const Kernels kernels_portable;
#ifdef SLOTWISE_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

namespace {

bool runs(const std::string& isa) {
#ifdef SLOTWISE_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == "avx2") return avx2;
  if (isa == "avx512") {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == "portable";
}

const Kernels& kernels_of(const std::string& isa) {
#ifdef SLOTWISE_X86
  if (isa == "avx512") return kernels_avx512;
  if (isa == "avx2") return kernels_avx2;
#else
  static_cast<void>(isa);
#endif
  return kernels_portable;
}

}  // namespace

const Kernels& select_kernels(const std::string& isa) {
  for (const char* name : {"avx512", "avx2", "portable"}) {
    if ((isa == "auto" || isa == name) && runs(name)) return kernels_of(name);
  }
  throw std::invalid_argument(
      "[CpuOps] expected isa \"auto\", \"avx512\", \"avx2\" or \"portable\" that this CPU runs, "
      "got \"" +
      isa + "\"");
}

}  // namespace slotwise
