# The operators on the CPU. The kernels are compiled once for each instruction set and chosen when the
# program runs.
add_library(slotwise_cpu STATIC
  src/cpu/aligned_buffer.cpp
  src/cpu/attention.cpp
  src/cpu/cpu_ops.cpp
  src/cpu/logprobs.cpp
  src/cpu/packed_weight.cpp
  src/cpu/sample.cpp
  src/cpu/select_kernels.cpp
  src/cpu/thread_pool.cpp)
target_include_directories(slotwise_cpu PUBLIC include)
target_link_libraries(slotwise_cpu PUBLIC Threads::Threads)
target_compile_options(slotwise_cpu PRIVATE -O3)

function(slotwise_add_kernels isa)
  add_library(slotwise_kernels_${isa} OBJECT src/cpu/kernels/kernels.cpp)
  target_include_directories(slotwise_kernels_${isa} PRIVATE include src/cpu)
  target_compile_definitions(slotwise_kernels_${isa} PRIVATE SLOTWISE_ISA=${isa})
  target_compile_options(slotwise_kernels_${isa} PRIVATE -O3 ${ARGN})
  target_sources(slotwise_cpu PRIVATE $<TARGET_OBJECTS:slotwise_kernels_${isa}>)
endfunction()

slotwise_add_kernels(portable -Wno-psabi)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  target_compile_definitions(slotwise_cpu PRIVATE SLOTWISE_X86)
  slotwise_add_kernels(avx2 -mavx2 -mfma)
  # GCC 12 warns of its own AVX-512 header (GCC bug 105593).
  slotwise_add_kernels(
    avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mprefer-vector-width=512
    $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized> $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
endif()
