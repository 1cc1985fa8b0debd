# Python code of the protos, made by grpcio-tools; the folders equal the proto packages, so that
# `from slotwise.v1 import inference_pb2` is right as generated.
set(PROTO_ROOT ${CMAKE_CURRENT_SOURCE_DIR}/../protos)
set(PROTO_OUT ${CMAKE_CURRENT_BINARY_DIR}/protos)
set(PROTO_NAMES slotwise/v1/inference slotwise/worker/v1/worker)

set(PROTO_PY)
foreach(name ${PROTO_NAMES})
  list(APPEND PROTO_PY ${PROTO_OUT}/${name}_pb2.py)
endforeach()
list(TRANSFORM PROTO_NAMES PREPEND ${PROTO_ROOT}/ OUTPUT_VARIABLE PROTO_FILES)
list(TRANSFORM PROTO_FILES APPEND .proto)

add_custom_command(
  OUTPUT ${PROTO_PY}
  COMMAND ${CMAKE_COMMAND} -E make_directory ${PROTO_OUT}
  COMMAND ${Python_EXECUTABLE} -m grpc_tools.protoc -I${PROTO_ROOT} --python_out=${PROTO_OUT}
          --pyi_out=${PROTO_OUT} --grpc_python_out=${PROTO_OUT} ${PROTO_FILES}
  COMMAND ${CMAKE_COMMAND} -E touch ${PROTO_OUT}/slotwise/py.typed
  DEPENDS ${PROTO_FILES}
  VERBATIM)
add_custom_target(protos ALL DEPENDS ${PROTO_PY})
install(DIRECTORY ${PROTO_OUT}/slotwise DESTINATION .)
