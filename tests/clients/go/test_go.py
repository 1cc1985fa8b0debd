"""The Go client: built with Debian's gRPC, without a module proxy, and read with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import deque
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from clients.builds import ROOT
from clients.lossy_server import DRAINS, Fault
from clients.npm import run as run_tool
from clients.program_checks import (
    ALL,
    ProgramChecks,
    Told,
    endless,
    run,
    until_idle,
)
from clients.scripted_server import bad_field, scripted_server
from clients.toolchains import need, need_file

from slotwise.v1 import inference_pb2 as pb

pytestmark = pytest.mark.clients

SOURCES = ROOT / "clients" / "go"
READER = Path(__file__).parent / "reader"
BUILD = ROOT / "build" / "go"
BIN = BUILD / "bin"
LIBRARIES = Path("/usr/share/gocode")
EXAMPLES = ("chat", "cancel", "health", "attach")
PACKAGES = ("slotwise", *(f"slotwise/examples/{name}" for name in EXAMPLES))


@pytest.fixture(scope="module")
def go():
    """Runs a command of Go, in GOPATH mode."""
    command = need("go", "golang-go")
    sources = LIBRARIES / "src"
    need_file(f"{sources}/google.golang.org/grpc", "golang-google-grpc-dev")
    # An older one may have come with gRPC; this one takes its place.
    package = "golang-github-golang-protobuf-1-5-dev"
    need_file(f"{sources}/github.com/golang/protobuf/proto/wire.go", package)
    settings = {
        "GO111MODULE": "off",
        "GOPATH": f"{BUILD}:{LIBRARIES}",
        # It goes by content.
        "GOCACHE": str(BUILD / "cache"),
        "GOFLAGS": "",
    }
    link("slotwise", SOURCES)
    link("reader", READER)
    return lambda *words: run_tool(command, *words, env={**os.environ, **settings})


def link(name: str, target: Path) -> None:
    """A package of this name, where Go looks for one."""
    place = BUILD / "src" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.is_symlink() or place.readlink() != target:
        place.unlink(missing_ok=True)
        place.symlink_to(target)


@pytest.fixture(scope="module")
def programs(go) -> Path:
    """The folder of the examples and the reader."""
    BIN.mkdir(parents=True, exist_ok=True)
    go("build", "-o", BIN, *PACKAGES[1:], "reader")
    return BIN


class TestGo(ProgramChecks):
    """What every client's programs must do, and what this one has besides."""

    @pytest.mark.parametrize("fault", [None, Fault(4), Fault(4, forgets=True), Fault(0, DRAINS)])
    def test_complete_is_one_whole_answer_all_the_same(self, programs, reader, lossy, fault):
        wanted = reader.undisturbed(lossy, **ALL)
        lossy.script.faults = deque([fault])
        answer = pb.CompleteResponse.FromString(
            bytes.fromhex(asked(programs, lossy.address, "complete", pb.GenerateRequest(**ALL)))
        )
        for choice, told in zip(answer.choices, wanted["choices"], strict=True):
            assert choice.index == choice.finished.index
            assert (list(choice.token_ids), choice.text) == (told["ids"], told["text"])
            assert choice.reasoning_text == told["reasoning"]
            calls = [(call.name, call.arguments_json) for call in choice.tool_calls]
            assert calls == [("find", '{"a": 1}')]
            assert [row.token.token_id for row in choice.logprobs] == told["logprobs"]
        assert [row.token.token_id for row in answer.prompt_logprobs] == wanted["prompt"]

    def test_cancel_stops_a_request_by_its_id(self, programs, small_server, small_client):
        stream = small_server.stub.Generate(endless("another's"))
        next(stream)
        cancel = pb.CancelRequest(request_id="another's")
        assert asked(programs, small_server.address, "cancel", cancel) == ""
        *_, last = stream
        assert last.finished.finish_reason == pb.FINISH_REASON_CANCELLED
        until_idle(small_client)
        again = run(*command_of(programs, small_server.address, "cancel", cancel))
        assert again.stdout.startswith("error NOT_FOUND")

    def test_the_end_of_the_context_frees_the_slot(self, reader, small_server, small_client):
        until_idle(small_client)
        with reader.start(small_server.address, endless("stopped")) as process:
            lines = [process.stdout.readline() for _ in range(5)]
            assert small_client.load().num_running == 1
            process.send_signal(signal.SIGINT)
            lines += process.stdout
        # The server knew before the program ended.
        until_idle(small_client)
        assert small_client.load().num_unread == 0
        assert Told.of("".join(lines)).error.code == "CANCELLED"

    def test_what_is_detached_goes_on(self, reader, lossy):
        lossy.script.blocked = True
        request = pb.GenerateRequest(text="x", request_id="left")
        with reader.start(lossy.address, request, detach_after=2) as process:
            assert process.stdout.readlines(2)[-1].startswith("event")
        assert lossy.script.cancelled == []

    def test_a_refusal_names_its_field(self, reader, lossy):
        lossy.script.faults = deque([Fault(0, bad_field("stop.3", "it is empty"))])
        error = reader.read(lossy.address).error
        assert (error.code, error.field) == ("INVALID_ARGUMENT", "stop.3")

    def test_tls(self, reader, tmp_path):
        authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
        credentials = grpc.ssl_server_credentials([authority.pair("server").content])
        with scripted_server(credentials=credentials) as server:
            settings = {"ca": authority.path, "token": "secret"}
            assert reader.read(server.address, settings=settings).error is None
            assert server.script.tokens == ["Bearer secret"]
            error = reader.read(server.address, settings={"ca": stranger.path}).error
        assert error.code == "UNAVAILABLE"
        assert "certificate" in error.message


def command_of(programs: Path, address: str, kind: str, request) -> list:
    return [programs / "reader", address, kind, request.SerializeToString().hex()]


def asked(programs: Path, address: str, kind: str, request) -> str:
    """What the reader says after "answer"."""
    done = run(*command_of(programs, address, kind, request))
    assert done.returncode == 0, done.stderr
    assert not done.stdout.startswith("error"), done.stdout
    return done.stdout.removeprefix("answer ").strip()


# The sources


def test_units_and_vet(go):
    assert "ok" in go("test", "slotwise")
    go("vet", *PACKAGES, "reader")


def test_the_sources_are_formatted():
    assert run_tool(need("gofmt", "golang-go"), "-l", SOURCES, READER) == ""


def test_the_generated_code_is_what_protoc_makes(tmp_path):
    command = [need("protoc", "protobuf-compiler"), f"-I{ROOT}/protos"]
    for plugin, package in (("go", "protoc-gen-go-1-5"), ("go-grpc", "protoc-gen-go-grpc")):
        need(f"protoc-gen-{plugin}", package)
        mapping = "Mslotwise/v1/inference.proto=slotwise/slotwisepb"
        command += [f"--{plugin}_out={tmp_path}", f"--{plugin}_opt={mapping}"]
    subprocess.run([*command, "slotwise/v1/inference.proto"], check=True)
    made = sorted((tmp_path / "slotwise" / "slotwisepb").iterdir())
    assert [one.name for one in made] == ["inference.pb.go", "inference_grpc.pb.go"]
    for one in made:
        committed = SOURCES / "slotwisepb" / one.name
        assert unversioned(committed) == unversioned(one), "run go generate in clients/go"


def unversioned(path: Path) -> str:
    """Without the lines that name the versions of the generators."""
    return re.sub(r"^//.*\tprotoc(-gen-go)? .*$", "", path.read_text(), flags=re.MULTILINE)


def test_every_module_that_is_imported_is_required(go):
    required = re.findall(r"^\t(\S+) v\S+$", (SOURCES / "go.mod").read_text(), re.MULTILINE)
    lists = '{{join .Imports "\\n"}}\n{{join .TestImports "\\n"}}'
    foreign = {
        name for name in go("list", "-f", lists, *PACKAGES).split() if "." in name.partition("/")[0]
    }
    assert foreign
    for name in foreign:
        assert any(f"{name}/".startswith(f"{module}/") for module in required), name


def test_the_chat_example_is_short():
    lines = (SOURCES / "examples" / "chat" / "main.go").read_text().splitlines()
    body = lines[lines.index("func main() {") + 1 : -1]
    assert 0 < len([line for line in body if line.strip()]) < 30
