"""What `make protos-check` finds: changes that break clients of the last release, and bad style."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from clients.npm import installed
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

pytestmark = pytest.mark.clients

HERE = Path(__file__).resolve().parent
PROTOS = HERE.parent.parent / "protos"
API = "slotwise/v1/inference.proto"
WORKER = "slotwise/worker/v1/worker.proto"
RELEASED = PROTOS / "released.binpb"
FIELD = "  uint32 next_token_index = 2;"
RPC = "  rpc FlushCache(FlushCacheRequest) returns (FlushCacheResponse);"


@pytest.fixture(scope="module")
def buf() -> Path:
    return installed(HERE) / "node_modules" / ".bin" / "buf"


@pytest.fixture
def changed(tmp_path):
    """A copy of the protos in which a text, found once, is another one."""
    copy = tmp_path / "protos"
    shutil.copytree(PROTOS, copy)

    def change(before: str, after: str, file: str = API) -> Path:
        path = copy / file
        assert path.read_text().count(before) == 1
        path.write_text(path.read_text().replace(before, after))
        return copy

    return change


def check(buf: Path, *words: object) -> tuple[int, str]:
    command = [str(word) for word in (buf, *words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def breaking(buf: Path, protos: Path) -> tuple[int, str]:
    return check(buf, "breaking", protos, "--against", RELEASED)


def test_the_protos_as_they_are(buf):
    assert check(buf, "lint", PROTOS) == (0, "")
    assert breaking(buf, PROTOS) == (0, "")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (FIELD, "  uint32 next_index = 2;", 'name from "next_token_index" to "next_index"'),
        (FIELD, "  uint32 next_token_index = 7;", 'Previously present field "2"'),
        (FIELD, "", 'Previously present field "2"'),
        (FIELD, "  uint64 next_token_index = 2;", 'type from "uint32" to "uint64"'),
        (FIELD, "  repeated uint32 next_token_index = 2;", "cardinality"),
        (FIELD, "  optional uint32 next_token_index = 2;", "cardinality"),
        (RPC, "", "FlushCache"),
        ("  FINISH_REASON_LENGTH = 2;", "", 'enum value "2"'),
        ("message AttachRequest {", "message ReadRequest {", "AttachRequest"),
        ("package slotwise.v1;", "package slotwise.v2;", "package"),
    ],
)
def test_a_change_that_breaks_clients_is_found(buf, changed, before, after, words):
    protos = changed(before, after)
    if words == "AttachRequest":
        changed("Attach(AttachRequest)", "Attach(ReadRequest)")
    if words == "package":
        shutil.rmtree(protos / "slotwise" / "worker")
    status, said = breaking(buf, protos)
    assert status != 0
    assert words in said


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FIELD, FIELD + "\n  // More.\n  optional uint32 more = 9;"),
        (RPC, RPC + "\n  // More.\n  rpc More(FlushCacheRequest) returns (FlushCacheResponse);"),
        ("message JsonObject {}", "message JsonObject {}\nmessage Other { uint32 more = 1; }"),
    ],
)
def test_what_is_added_breaks_nobody(buf, changed, before, after):
    protos = changed(before, after)
    assert breaking(buf, protos) == (0, "")


def test_the_step_protocol_may_change_with_a_release(buf, changed):
    protos = changed("  string rendezvous_address = 4;", "  string meeting_address = 4;", WORKER)
    assert breaking(buf, protos) == (0, "")


def test_bad_style_is_found(buf, changed):
    status, said = check(buf, "lint", changed(FIELD, "  uint32 nextTokenIndex = 2;"))
    assert status != 0
    assert "lower_snake_case" in said


def test_the_released_set_is_of_the_public_api_alone(tmp_path):
    files = descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes()).file
    assert [file.name for file in files] == [API]
    out = tmp_path / "today.binpb"
    assert protoc.main(["", f"-I{PROTOS}", f"--descriptor_set_out={out}", API]) == 0
    (today,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    released = {method.name for method in files[0].service[0].method}
    assert released
    assert released <= {method.name for method in today.service[0].method}
