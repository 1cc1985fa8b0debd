# Device code, or nothing.
set(slotwise_use_cuda OFF)
if(NOT SLOTWISE_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(slotwise_use_cuda ON)
  elseif(NOT SLOTWISE_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "SLOTWISE_CUDA=${SLOTWISE_CUDA} but no CUDA compiler was found; "
                        "put nvcc on the PATH or set SLOTWISE_CUDA=OFF")
  endif()
endif()

if(slotwise_use_cuda)
  # Ampere to consumer Blackwell; 90a has the matrix instructions of Hopper.
  set(SLOTWISE_CUDA_ARCHITECTURES "80-real;89-real;90a-real;100-real;120" CACHE STRING
      "Compute capabilities to compile for")
  if(SLOTWISE_CUDA_ARCHITECTURES MATCHES "(^|;)90(-[a-z]+)?(;|$)")
    message(FATAL_ERROR "SLOTWISE_CUDA_ARCHITECTURES=${SLOTWISE_CUDA_ARCHITECTURES}: for Hopper "
                        "name 90a-real; 90 is without its matrix instructions")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES ${SLOTWISE_CUDA_ARCHITECTURES})
  enable_language(CUDA)
  add_library(slotwise_cuda STATIC
    src/cuda/adjust_logits.cu
    src/cuda/all_reduce.cu
    src/cuda/attention_float32.cu
    src/cuda/copy_prefix.cu
    src/cuda/decode_attention.cu
    src/cuda/decode_attention_tma.cu
    src/cuda/device.cu
    src/cuda/elementwise.cu
    src/cuda/linear.cu
    src/cuda/logprobs.cu
    src/cuda/prefill_attention.cu
    src/cuda/prefill_attention_wgmma.cu
    src/cuda/prefill_linear.cu
    src/cuda/rope_append.cu
    src/cuda/sample.cu
    src/cuda/slot_table.cu)
  set_target_properties(slotwise_cuda PROPERTIES CUDA_STANDARD 17 CUDA_RUNTIME_LIBRARY Static)
  # As on the CPU, only the fused multiply-adds that are written are made: two kernels that must
  # agree to the bit then do, whatever the compiler does around them.
  target_compile_options(slotwise_cuda PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-O3 --fmad=false --expt-relaxed-constexpr -Xcompiler=-Wall>)
else()
  add_library(slotwise_cuda STATIC src/no_cuda.cpp)
endif()
target_include_directories(slotwise_cuda PUBLIC include)
