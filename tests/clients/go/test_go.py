"""The Go client: built, and read with, against scripted and real servers."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from clients.lossy_server import (
    DRAINS,
    EXISTS,
    EXPIRED,
    FAULT,
    LOST,
    NOT_FOUND,
    NUM_TOKENS,
    OUT_OF_RANGE,
    RESET,
    SLOW,
    SUPERSEDED,
    Fault,
)
from clients.scripted_server import SERVICE, bad_field, queue_full, scripted_server
from clients.toolchains import need, need_file
from google.protobuf.json_format import Parse
from grpc_health.v1 import health_pb2

from chaos.relay import Relay
from integration.streams import Generation
from slotwise.v1 import inference_pb2 as pb
from slotwise_client import Client, Delta, Finished

pytestmark = pytest.mark.clients

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "clients" / "go"
BUILD = ROOT / "build" / "go"
EXAMPLES = ("chat", "cancel", "health", "attach")
GO_PATH = Path("/usr/share/gocode")
TIMEOUT_S = 120
QUESTION = "What is the capital of France?"
# Hours, if nobody ends it.
ENDLESS = {"ignoreEos": True, "maxNewTokens": 60_000, "sampling": {"temperature": 0}}
ALL = {"logprobs": 1, "promptLogprobs": 1, "n": 2, "parseOutput": True}


class Go:
    """Debian's Go and its gRPC, in GOPATH mode: no module proxy is asked."""

    def __init__(self) -> None:
        self._go = need("go", "golang-go")
        sources = GO_PATH / "src"
        need_file(f"{sources}/google.golang.org/grpc", "golang-google-grpc-dev")
        # An older one may have come with gRPC; this one takes its place.
        package = "golang-github-golang-protobuf-1-5-dev"
        need_file(f"{sources}/github.com/golang/protobuf/proto/wire.go", package)
        self.packages = ["slotwise", *(f"slotwise/examples/{name}" for name in EXAMPLES)]
        self._env = {
            **os.environ,
            "GO111MODULE": "off",
            "GOPATH": f"{BUILD}:{GO_PATH}",
            # Go's own cache goes by content.
            "GOCACHE": str(BUILD / "cache"),
            "GOFLAGS": "",
        }
        self._link("slotwise", SOURCES)
        self._link("reader", Path(__file__).parent / "reader")

    def build(self, package: str) -> Path:
        program = BUILD / "bin" / package.rpartition("/")[2]
        self.run("build", "-o", str(program), package)
        return program

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [self._go, *arguments], env=self._env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @staticmethod
    def _link(name: str, target: Path) -> None:
        link = BUILD / "src" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink() and link.readlink() == target:
            return
        link.unlink(missing_ok=True)
        link.symlink_to(target)


@pytest.fixture(scope="module")
def go() -> Go:
    return Go()


@pytest.fixture(scope="module")
def examples(go) -> dict[str, Path]:
    return {name: go.build(f"slotwise/examples/{name}") for name in EXAMPLES}


@pytest.fixture(scope="module")
def reader(go) -> Path:
    return go.build("reader")


def run(program: Path, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), "-server", address, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@dataclass
class Read:
    """What the reader was told."""

    events: list[pb.GenerateResponse]
    error: dict | None = None

    @classmethod
    def of(cls, lines: list[str]) -> Read:
        messages = [json.loads(line) for line in lines]
        error = messages.pop()["error"] if messages and "error" in messages[-1] else None
        return cls([Parse(json.dumps(one), pb.GenerateResponse()) for one in messages], error)

    def summary(self) -> dict:
        """All of it, however it was cut into events."""
        assert self.error is None, self.error
        assert [one.WhichOneof("event") for one in self.events].count("accepted") == 1
        assert self.events[0].HasField("accepted")
        assert len({one.request_id for one in self.events}) == 1
        deltas = [one.delta for one in self.events if one.HasField("delta")]
        rows = [one.prompt_logprobs.logprobs for one in self.events]
        return {
            "choices": [_joined(deltas, index) for index in (0, 1)],
            "finished": [one.finished.index for one in self.events if one.HasField("finished")],
            "prompt": [row.token.token_id for part in rows for row in part],
        }


def _joined(deltas: list[pb.Delta], index: int) -> dict:
    mine = [delta for delta in deltas if delta.index == index]
    firsts = [delta.first_token_index for delta in mine if delta.token_ids]
    counts = [len(delta.token_ids) for delta in mine if delta.token_ids]
    assert firsts == [sum(counts[:i]) for i in range(len(counts))], "a gap or an overlap"
    parts = [part for delta in mine for part in delta.tool_calls]
    return {
        "ids": [token_id for delta in mine for token_id in delta.token_ids],
        "text": "".join(delta.text for delta in mine),
        "reasoning": "".join(delta.reasoning_text for delta in mine),
        "calls": "".join(part.arguments_json for part in parts),
        "names": [part.name for part in parts if part.name],
        "logprobs": [row.token.token_id for delta in mine for row in delta.logprobs],
    }


def read(program: Path, address: str, request: dict, *flags: str) -> Read:
    done = run(program, address, *flags, json.dumps({"text": "x", **request}))
    assert done.returncode == 0, done.stderr
    return Read.of(done.stdout.splitlines())


def attached(program: Path, address: str, request: dict, *flags: str) -> Read:
    done = run(program, address, "-attach", *flags, json.dumps(request))
    assert done.returncode == 0, done.stderr
    return Read.of(done.stdout.splitlines())


def undisturbed(lossy, program: Path, request: dict) -> dict:
    lossy.script.faults.clear()
    wanted = read(program, lossy.address, request).summary()
    lossy.script.calls.clear()
    assert wanted["choices"][0]["text"].endswith("!")
    return wanted


# The sources


def test_unit_tests_vet_and_format(go):
    assert "ok" in go.run("test", "slotwise")
    go.run("vet", *go.packages, "reader")
    gofmt = need("gofmt", "golang-go")
    folders = [str(SOURCES), str(Path(__file__).parent / "reader")]
    done = subprocess.run([gofmt, "-l", *folders], capture_output=True, text=True, check=True)
    assert done.stdout == "", "to be formatted"


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
        assert _unversioned(committed) == _unversioned(one), "run go generate in clients/go"


def _unversioned(path: Path) -> str:
    """Without the lines that name the versions of the generators."""
    return re.sub(r"^//.*\tprotoc(-gen-go)? .*$", "", path.read_text(), flags=re.MULTILINE)


def test_every_module_that_is_imported_is_required(go):
    required = re.findall(r"^\t(\S+) v\S+$", (SOURCES / "go.mod").read_text(), re.MULTILINE)
    used = set(go.run("list", "-f", '{{join .Imports "\\n"}}', *go.packages).split())
    used |= set(go.run("list", "-f", '{{join .TestImports "\\n"}}', *go.packages).split())
    foreign = {name for name in used if "." in name.partition("/")[0]}
    assert foreign
    for name in foreign:
        assert any(f"{name}/".startswith(f"{module}/") for module in required), name


def test_the_chat_example_is_short():
    lines = (SOURCES / "examples" / "chat" / "main.go").read_text().splitlines()
    body = lines[lines.index("func main() {") + 1 : -1]
    assert 0 < len([line for line in body if line.strip()]) < 30


# The examples, against a real server


def test_chat_streams_what_the_python_client_reads(examples, small_server):
    done = run(examples["chat"], small_server.address, "-max-new-tokens", "64", QUESTION)
    assert done.returncode == 0, done.stderr
    with Client(small_server.address) as client:
        stream = client.chat(QUESTION, temperature=0, max_new_tokens=64)
        deltas = [event for event in stream if isinstance(event, Delta)]
    text = "".join(delta.text for delta in deltas)
    assert len(text) > 10
    assert done.stdout == text + "\n"


def test_attach_reads_the_rest_from_a_token(examples, small_server):
    done = run(examples["chat"], small_server.address, "-max-new-tokens", "40", QUESTION)
    request_id = re.search(r"request (\S+)", done.stderr)[1]
    with Client(small_server.address) as client:
        rest = [event for event in client.attach(request_id, 20) if isinstance(event, Delta)]
    wanted = "".join(delta.text for delta in rest)
    assert rest[0].first_token_index == 20
    got = run(examples["attach"], small_server.address, "-from", "20", request_id)
    assert (got.returncode, got.stdout) == (0, wanted + "\n"), got.stderr
    assert done.stdout.endswith(got.stdout)
    assert len(got.stdout) < len(done.stdout)
    beyond = run(examples["attach"], small_server.address, "-from", "41", request_id)
    assert beyond.returncode == 1
    assert "OutOfRange" in beyond.stderr


def test_cancel_frees_the_slot(examples, small_server):
    options = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 60_000}
    with Client(small_server.address) as client:
        stream = client.chat(QUESTION, **options)
        next(event for event in stream if isinstance(event, Delta))
        assert client.load().num_running == 1
        done = run(examples["cancel"], small_server.address, stream.request_id)
        assert done.returncode == 0, done.stderr
        *_, last = stream
        assert isinstance(last, Finished)
        assert last.finish_reason == "cancelled"
        until_idle(client)
        again = run(examples["cancel"], small_server.address, stream.request_id)
    assert again.returncode == 1
    assert "NotFound" in again.stderr


def until_idle(client: Client) -> None:
    for _ in range(10_000):
        load = client.load()
        if load.num_running == load.num_waiting == 0:
            return
    raise AssertionError(f"still busy: {load}")


def test_the_end_of_the_program_frees_the_slot(reader, small_server):
    with reading(reader, small_server.address, {"text": "x", **ENDLESS}) as process:
        lines = list(itertools.islice(process.stdout, 5))
        with Client(small_server.address) as client:
            assert client.load().num_running == 1
            process.send_signal(signal.SIGINT)
            lines += list(process.stdout)
            # The server knew before the program ended.
            until_idle(client)
            assert client.load().num_unread == 0
    told = Read.of(lines)
    assert told.error["code"] == "Canceled"
    assert told.error["cancelled"]


class reading:  # noqa: N801
    """A reader that runs."""

    def __init__(self, program: Path, address: str, request: dict, *flags: str) -> None:
        command = [str(program), "-server", address, *flags, json.dumps(request)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> subprocess.Popen[str]:
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def test_health(examples, served):
    ready = run(examples["health"], served.address)
    assert (ready.returncode, ready.stdout) == (0, "SERVING\n")
    served.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    busy = run(examples["health"], served.address)
    assert busy.returncode == 1
    assert f"{SERVICE} at {served.address} is NOT_SERVING" in busy.stderr
    assert run(examples["health"], served.address, "-service", "").returncode == 0
    other = run(examples["health"], served.address, "-service", "slotwise.worker/7")
    assert other.returncode == 1
    assert "SERVICE_UNKNOWN" in other.stderr


def test_health_and_chat_without_a_server(examples, closed_port):
    for arguments in (("health",), ("chat", "x")):
        done = run(examples[arguments[0]], closed_port, *arguments[1:])
        assert done.returncode == 1
        assert f"no answer from {closed_port}" in done.stderr


@pytest.fixture
def closed_port() -> str:
    with scripted_server() as server:
        return server.address


def test_health_of_a_real_server(examples, small_server):
    assert run(examples["health"], small_server.address).returncode == 0


def test_a_refused_field_is_named(examples, reader, small_server):
    done = run(examples["chat"], small_server.address, "-max-new-tokens", "0", QUESTION)
    assert done.returncode == 1
    assert "InvalidArgument: max_new_tokens" in done.stderr
    told = read(reader, small_server.address, {"sampling": {"temperature": -1}})
    assert (told.error["code"], told.error["field"]) == ("InvalidArgument", "sampling.temperature")


# Connections that are lost


def test_no_token_is_lost_when_connections_break(reader, small_server):
    """Cut again and again in the middle of an answer of a real server."""
    request = {"text": "x", **ENDLESS, "maxNewTokens": 4000, "requestId": "go-cuts"}
    wanted = Generation()
    whole = Parse(json.dumps({**request, "requestId": "go-whole"}), pb.GenerateRequest())
    for response in small_server.stub.Generate(whole, timeout=TIMEOUT_S):
        wanted.add(response)
    host, _, port = small_server.address.rpartition(":")
    relay = Relay((host, int(port)))
    try:
        with reading(reader, relay.address, request) as process:
            lines, num_cuts = [], 0
            for line in process.stdout:
                lines.append(line)
                if len(lines) % 20 == 3:
                    num_cuts += relay.cut() > 0
            assert process.wait(TIMEOUT_S) == 0
    finally:
        relay.close()
    assert num_cuts >= 3
    told = Read.of(lines).summary()["choices"][0]
    assert told["ids"] == wanted.token_ids
    assert told["text"] == wanted.text


@pytest.mark.parametrize("after", range(NUM_TOKENS + 6))
def test_a_broken_connection_is_not_seen(lossy, reader, after):
    wanted = undisturbed(lossy, reader, ALL)
    lossy.script.faults = deque([Fault(after=after)])
    assert read(reader, lossy.address, ALL).summary() == wanted
    assert len(lossy.script.calls) > 1
    assert lossy.script.cancelled == []


@pytest.mark.parametrize("after", range(NUM_TOKENS + 5))
@pytest.mark.parametrize("status", [LOST, RESET, DRAINS], ids=["lost", "reset", "drains"])
def test_a_server_that_forgot_is_asked_anew_and_nothing_comes_twice(lossy, reader, after, status):
    wanted = undisturbed(lossy, reader, ALL)
    assert wanted["choices"][1]["calls"] == '{"a": 1}'
    lossy.script.faults = deque([Fault(after=after, status=status, forgets=True)])
    assert read(reader, lossy.address, ALL).summary() == wanted
    requests = [one for one in lossy.script.requests if one.DESCRIPTOR.name == "GenerateRequest"]
    assert requests[-1] == requests[-2], "the same id, seed and parameters"
    assert requests[-1] != requests[0]


@pytest.mark.parametrize(
    ("forgets", "places"), [(True, (2, 5, 9, 12)), (False, (2, 5, 9, 6, 3, 7, 1, 12))]
)
def test_many_losses_in_a_row(lossy, reader, forgets, places):
    wanted = undisturbed(lossy, reader, ALL)
    lossy.script.faults = deque(Fault(after=after, forgets=forgets) for after in places)
    assert read(reader, lossy.address, ALL).summary() == wanted


def test_an_end_without_the_last_messages_is_a_loss(lossy, reader):
    wanted = undisturbed(lossy, reader, {})
    lossy.script.faults = deque([Fault(after=4, is_silent=True)])
    assert read(reader, lossy.address, {}).summary() == wanted
    assert lossy.script.calls == ["Generate", "Attach 3"]


def refuse(status) -> Fault:
    return Fault(0, status, forgets=True)


# A request that the server gave up, which Attach tells after Accepted.
GIVEN_UP = Fault(1, DRAINS, forgets=True)


@pytest.mark.parametrize(
    ("refusals", "calls"),
    [
        ([Fault(0, LOST), Fault(0, LOST)], "Attach, Attach, Attach"),
        ([Fault(0, DRAINS)], "Attach, Attach"),
        ([Fault(0, OUT_OF_RANGE)], "Attach, Attach 0"),
        ([refuse(DRAINS)], "Attach, Attach, Generate"),
        ([GIVEN_UP], "Attach, Generate"),
        ([GIVEN_UP, refuse(DRAINS), refuse(LOST)], "Attach, Generate, Attach, Attach, Generate"),
        ([refuse(EXPIRED)], "Attach, Generate"),
        ([refuse(NOT_FOUND)], "Attach, Generate"),
        ([refuse(NOT_FOUND), refuse(EXISTS)], "Attach, Generate, Attach, Generate"),
        ([refuse(NOT_FOUND), refuse(queue_full(0, 1000))], "Attach, Generate, Generate"),
    ],
)
def test_what_a_refusal_of_attach_leads_to(lossy, reader, refusals, calls):
    wanted = undisturbed(lossy, reader, {})
    lossy.script.faults = deque([Fault(3, LOST), *refusals])
    assert read(reader, lossy.address, {}).summary() == wanted
    calls = re.sub(r"Attach(?! 0)", "Attach 2", f"Generate, {calls}")
    assert lossy.script.calls == calls.split(", ")


UNREAD = Fault(3, cancels=True)


def test_what_was_cancelled_since_nobody_read_it_is_asked_anew(lossy, reader):
    wanted = undisturbed(lossy, reader, {})
    lossy.script.faults = deque([Fault(4, LOST), UNREAD])
    assert read(reader, lossy.address, {"attachWindowMs": 0}).summary() == wanted
    assert [call.split()[0] for call in lossy.script.calls] == ["Generate", "Attach", "Generate"]
    lossy.script.calls.clear()
    lossy.script.faults = deque([Fault(4, SLOW), UNREAD])
    assert read(reader, lossy.address, {}).summary() == wanted
    assert [call.split()[0] for call in lossy.script.calls] == ["Generate", "Attach", "Generate"]


def test_what_was_cancelled_while_somebody_read_it_stays_so(lossy, reader):
    for faults in ([Fault(4, LOST), UNREAD], [Fault(4, cancels=True)]):
        lossy.script.faults = deque(faults)
        told = read(reader, lossy.address, {})
        assert told.events[-1].finished.finish_reason == pb.FINISH_REASON_CANCELLED
    assert lossy.script.calls.count("Generate") == 2


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (SUPERSEDED, "Aborted"),
        (FAULT, "Internal"),
        (queue_full(3, 500_000_000), "ResourceExhausted"),
        (bad_field("stop.3", "it is empty"), "InvalidArgument"),
    ],
)
def test_what_is_not_to_be_tried_again_is_told(lossy, reader, status, code):
    lossy.script.faults = deque([Fault(0, status)])
    error = read(reader, lossy.address, {}).error
    assert error["code"] == code
    assert status.message in error["message"]
    assert error["field"] == ("stop.3" if code == "InvalidArgument" else "")
    assert error["retry_after"] == (3.5 if code == "ResourceExhausted" else 0)
    assert lossy.script.calls == ["Generate"]
    assert lossy.script.cancelled == []


def test_another_answer_is_an_error_and_its_run_is_ended(lossy, reader):
    lossy.script.faults = deque([Fault(6, LOST, forgets=True, shift=50)])
    error = read(reader, lossy.address, {"requestId": "mine"}).error
    assert error["code"] == "DataLoss"
    assert "token 2 is 152 and was 102" in error["message"]
    assert lossy.script.cancelled == ["mine"]


def test_an_id_that_another_request_has_is_not_read(lossy, reader):
    request = {"requestId": "mine", "sampling": {"seed": "6"}}
    read(reader, lossy.address, {**request, "sampling": {"seed": "5"}})
    assert "a request of that id runs" in read(reader, lossy.address, request).error["message"]
    lossy.script.faults = deque([Fault(0, LOST)])
    error = read(reader, lossy.address, request).error
    assert error["code"] == "AlreadyExists"
    assert "not this one" in error["message"]
    assert lossy.script.cancelled == []


def test_a_server_without_attach_windows_is_asked_without(lossy, reader):
    lossy.script.max_window_ms = 0
    assert read(reader, lossy.address, {}).error is None
    assert lossy.script.calls == ["Generate", "Generate"]
    sent = lossy.script.requests[-2:]
    assert [one.HasField("attach_window_ms") for one in sent] == [True, False]
    told = read(reader, lossy.address, {"attachWindowMs": 5}).error
    assert told["field"] == "attach_window_ms"


def test_a_loss_that_lasts_is_an_error_after_the_bound(lossy, reader):
    lossy.script.faults = deque([Fault(3, LOST), *([Fault(0, LOST)] * 100)])
    error = read(reader, lossy.address, {}, "-reconnect-timeout", "500ms").error
    assert error["code"] == "Unavailable"
    assert "Socket closed" in error["message"]
    # 0.1 + 0.2 + 0.4 s are too long.
    assert 2 <= len(lossy.script.calls) <= 4


def test_the_deadline_ends_the_tries_and_tells_why(lossy, reader):
    lossy.script.faults = deque([Fault(3, LOST), *([Fault(0, LOST)] * 100)])
    error = read(reader, lossy.address, {}, "-timeout", "1s").error
    assert error["code"] == "DeadlineExceeded"
    assert error["late"]
    assert "Socket closed" in error["message"]


@pytest.mark.parametrize("fault", [None, Fault(4), Fault(4, forgets=True), Fault(0, DRAINS)])
def test_complete_is_one_whole_answer_all_the_same(lossy, reader, fault):
    wanted = undisturbed(lossy, reader, ALL)
    lossy.script.faults = deque([fault])
    request = json.dumps({"text": "x", **ALL})
    done = run(reader, lossy.address, "-complete", request)
    answer = Parse(done.stdout, pb.CompleteResponse())
    for index, choice in enumerate(answer.choices):
        told = wanted["choices"][index]
        assert choice.index == choice.finished.index == index
        assert (list(choice.token_ids), choice.text) == (told["ids"], told["text"])
        assert choice.reasoning_text == told["reasoning"]
        calls = [(call.name, call.arguments_json) for call in choice.tool_calls]
        assert calls == [("find", '{"a": 1}')]
        assert [row.token.token_id for row in choice.logprobs] == told["logprobs"]
    assert [row.token.token_id for row in answer.prompt_logprobs] == wanted["prompt"]
    assert len(answer.choices) == 2


def test_attach_by_hand_begins_where_it_is_told(lossy, reader):
    read(reader, lossy.address, {"requestId": "mine", "n": 2})
    where = {"requestId": "mine", "nextTokenIndex": 2, "otherNextTokenIndices": [4]}
    for faults in ([], [Fault(3), Fault(2), None]):
        lossy.script.faults = deque(faults)
        told = attached(reader, lossy.address, where)
        ids = [i for event in told.events for i in event.delta.token_ids]
        assert ids == [102, 103, 104, 105, 204, 205]
        ends = [one.finished.index for one in told.events if one.HasField("finished")]
        assert ends == [0, 1]
    lossy.script.faults = deque([Fault(0, NOT_FOUND)])
    assert attached(reader, lossy.address, where).error["code"] == "NotFound"


def test_leaving_cancels_by_name_and_detaching_does_not(lossy, reader):
    lossy.script.blocked = True
    request = {"text": "x", "requestId": "left"}
    with reading(reader, lossy.address, request, "-detach-after", "2") as process:
        assert process.wait(TIMEOUT_S) == 0
    assert lossy.script.cancelled == []
    lossy.script.ended.clear()
    with reading(reader, lossy.address, {**request, "requestId": "mine"}) as process:
        next(process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
    assert lossy.script.cancelled == ["mine"]


# Who may call


def test_tls_and_a_token(reader, tmp_path):
    authority = Authority(tmp_path, "authority")
    pair = authority.pair("server")
    credentials = grpc.ssl_server_credentials([pair.content])
    flags = ("-ca", str(authority.path), "-token", "secret")
    with scripted_server(credentials=credentials) as server:
        told = read(reader, server.address, {}, *flags)
        assert told.error is None
        assert server.script.tokens == ["Bearer secret"]
        stranger = Authority(tmp_path, "stranger")
        told = read(reader, server.address, {}, "-ca", str(stranger.path))
        assert told.error["code"] == "Unavailable"
        assert "certificate" in told.error["message"]
