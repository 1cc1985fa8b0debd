"""Every service, rpc, message of the wire and enum value says what it is, in the proto itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent.parent / "protos"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    out = tmp_path_factory.mktemp("protos") / "set.bin"
    names = [str(p.relative_to(PROTOS)) for p in sorted(PROTOS.rglob("*.proto"))]
    status = protoc.main(
        ["protoc", f"-I{PROTOS}", "--include_source_info", f"--descriptor_set_out={out}", *names]
    )
    assert status == 0
    return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file


def commented_paths(file):
    return {
        tuple(location.path)
        for location in file.source_code_info.location
        if location.leading_comments.strip()
    }


def test_every_rpc_has_a_comment(files):
    for file in files:
        paths = commented_paths(file)
        for s, service in enumerate(file.service):
            for m, method in enumerate(service.method):
                assert (6, s, 2, m) in paths, f"{service.name}.{method.name}"


def test_requests_and_responses_belong_to_one_rpc(files):
    exceptions = {
        # Complete is Generate answered whole: the same request on purpose.
        "GenerateRequest": 2,
        # Attach goes on with a stream of Generate.
        "GenerateResponse": 2,
    }
    for file in files:
        for service in file.service:
            for side in ("input_type", "output_type"):
                used = [getattr(method, side).split(".")[-1] for method in service.method]
                for name in set(used):
                    assert used.count(name) == exceptions.get(name, 1), name


def test_enums_start_unspecified(files):
    for file in files:
        for enum in file.enum_type:
            assert enum.value[0].name.endswith("_UNSPECIFIED"), enum.name


def test_folder_equals_package(files):
    for file in files:
        assert str(Path(file.name).parent).replace("/", ".") == file.package


def test_numeric_sampling_fields_are_optional(files):
    for file in files:
        for message in file.message_type:
            if message.name == "SamplingParams":
                assert message.field
                repeated = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
                single = [field for field in message.field if field.label != repeated]
                assert all(field.proto3_optional for field in single)
