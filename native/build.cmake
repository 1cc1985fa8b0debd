# Names the build: a hash of the sources, their compilers and flags, and no path. Answers of equal
# builds have equal bits.
file(GLOB_RECURSE slotwise_sources CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}
     bindings/* include/* src/* *.cmake CMakeLists.txt)
list(SORT slotwise_sources)
# A source that changes has the hash made anew.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${slotwise_sources})

string(TOUPPER "${CMAKE_BUILD_TYPE}" slotwise_build_type)
set(slotwise_parts
  "${CMAKE_SYSTEM_PROCESSOR}" "${CMAKE_BUILD_TYPE}" "${SLOTWISE_SANITIZE}"
  "${CMAKE_CXX_COMPILER_ID}" "${CMAKE_CXX_COMPILER_VERSION}"
  "${CMAKE_CXX_FLAGS}" "${CMAKE_CXX_FLAGS_${slotwise_build_type}}")
if(slotwise_use_cuda)
  list(APPEND slotwise_parts
    "${CMAKE_CUDA_COMPILER_ID}" "${CMAKE_CUDA_COMPILER_VERSION}" "${CMAKE_CUDA_ARCHITECTURES}"
    "${CMAKE_CUDA_FLAGS}" "${CMAKE_CUDA_FLAGS_${slotwise_build_type}}")
endif()
foreach(source ${slotwise_sources})
  file(SHA256 ${CMAKE_CURRENT_SOURCE_DIR}/${source} slotwise_hash)
  list(APPEND slotwise_parts "${source}" "${slotwise_hash}")
endforeach()
string(SHA256 slotwise_hash "${slotwise_parts}")
string(SUBSTRING ${slotwise_hash} 0 16 slotwise_build)
set_source_files_properties(bindings/module.cpp PROPERTIES
  COMPILE_DEFINITIONS "SLOTWISE_BUILD=\"${slotwise_build}\"")
