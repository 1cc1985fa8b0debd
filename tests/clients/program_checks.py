"""What the examples of a client and a reader made with it must do, whatever their language."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from clients.lossy_server import (
    DRAINS,
    EXISTS,
    EXPIRED,
    FAULT,
    LOST,
    NOT_FOUND,
    NUM_TOKENS,
    OUT_OF_RANGE,
    POISON,
    RESET,
    SLOW,
    SUPERSEDED,
    Fault,
    Proxy,
)
from clients.scripted_server import SERVICE, queue_full
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health_pb2

from chaos.relay import Relay
from integration.streams import Generation
from slotwise.v1 import inference_pb2 as pb
from slotwise_client import Client, Counters, Delta

TIMEOUT_S = 120
QUESTION = "What is the capital of France?"
ALL = {"n": 2, "logprobs": 1, "prompt_logprobs": 1, "parse_output": True}
# A request that the server gave up, which Attach tells after Accepted.
GIVEN_UP = Fault(1, DRAINS, forgets=True)
UNREAD = Fault(3, cancels=True)


def refuse(status) -> Fault:
    return Fault(0, status, forgets=True)


@dataclass(frozen=True)
class Failed:
    """The error that a stream ended with."""

    code: str
    field: str
    retry_after_ms: int
    message: str


@dataclass(frozen=True)
class Told:
    """What the reader was told: events, and the error at their end."""

    events: tuple[pb.GenerateResponse, ...]
    error: Failed | None = None

    @classmethod
    def of(cls, output: str) -> Told:
        lines = [line.partition(" ")[::2] for line in output.splitlines()]
        events = [bytes.fromhex(rest) for kind, rest in lines if kind == "event"]
        errors = [rest.split("\t", 3) for kind, rest in lines if kind == "error"]
        failed = [Failed(code, field, int(ms), message) for code, field, ms, message in errors]
        return cls(tuple(map(pb.GenerateResponse.FromString, events)), *failed)

    def summary(self) -> dict:
        """All of it, however it was cut into events."""
        assert self.error is None, self.error
        assert [one.WhichOneof("event") for one in self.events].count("accepted") == 1
        assert self.events[0].HasField("accepted")
        assert len({one.request_id for one in self.events}) == 1
        deltas = [one.delta for one in self.events if one.HasField("delta")]
        choices = sorted({delta.index for delta in deltas})
        return {
            "choices": [joined([one for one in deltas if one.index == i]) for i in choices],
            "finished": [one.finished.index for one in self.events if one.HasField("finished")],
            "prompt": [row.token.token_id for row in self.prompt_logprobs()],
        }

    def prompt_logprobs(self) -> Iterator[pb.TokenLogprobs]:
        for event in self.events:
            yield from event.prompt_logprobs.logprobs


def joined(deltas: list[pb.Delta]) -> dict:
    firsts = [delta.first_token_index for delta in deltas if delta.token_ids]
    counts = [len(delta.token_ids) for delta in deltas if delta.token_ids]
    assert firsts == [sum(counts[:i]) for i in range(len(counts))], "a gap or an overlap"
    parts = [part for delta in deltas for part in delta.tool_calls]
    return {
        "ids": [token_id for delta in deltas for token_id in delta.token_ids],
        "text": "".join(delta.text for delta in deltas),
        "reasoning": "".join(delta.reasoning_text for delta in deltas),
        "calls": "".join(part.arguments_json for part in parts),
        "names": [part.name for part in parts if part.name],
        "logprobs": [row.token.token_id for delta in deltas for row in delta.logprobs],
    }


def run(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [program, *map(str, words)]
    # What the program itself says: gRPC's core logs a slow machine's doings in between.
    env = {**os.environ, "GRPC_VERBOSITY": "NONE"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env
    )


def reader_command(program: Path, address: str, request, **settings) -> list:
    kinds = {pb.AttachRequest: "attach", pb.CancelRequest: "cancel"}
    kind = settings.pop("kind", kinds.get(type(request), "generate"))
    options = [f"{name}={value}" for name, value in settings.items()]
    return [program, address, kind, request.SerializeToString().hex(), *options]


class Reader:
    """Reads a request with the client that is tested, in a process of its own."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def read(self, address: str, request=None, *, settings=None, **fields) -> Told:
        """A request, or one with these fields."""
        request = request or pb.GenerateRequest(text="x", **fields)
        done = run(*reader_command(self._program, address, request, **(settings or {})))
        assert done.returncode == 0, done.stderr + done.stdout
        return Told.of(done.stdout)

    def start(self, address: str, request, **settings) -> subprocess.Popen[str]:
        command = reader_command(self._program, address, request, **settings)
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def undisturbed(self, lossy, **fields) -> dict:
        lossy.script.faults.clear()
        wanted = self.read(lossy.address, **fields).summary()
        lossy.script.calls.clear()
        assert wanted["choices"][0]["text"].endswith("!")
        return wanted


def until_idle(client: Client) -> Counters:
    """What the server counts then."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        load = client.load()
        if load.num_running == load.num_waiting == 0:
            return load.requests
        assert time.monotonic() < deadline, f"still busy: {load}"


def endless(request_id: str, max_new_tokens: int = 60_000) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0)
    return pb.GenerateRequest(
        request_id=request_id,
        text="x",
        sampling=sampling,
        ignore_eos=True,
        max_new_tokens=max_new_tokens,
    )


def refuse_with(words: str) -> status_pb2.Status:
    return status_pb2.Status(code=code_pb2.INTERNAL, message=words)


def with_whole_calls(message: dict) -> dict:
    """The parts of a tool call in a delta made one."""
    parts = list(message["delta"].tool_calls) if "delta" in message else []
    if parts:
        parts[0].arguments_json = "".join(part.arguments_json for part in parts)
        del message["delta"].tool_calls[1:]
    return message


class ProgramChecks:
    """A test module with a fixture `programs`, a folder, makes a class of tests of it.

    It holds the examples chat, cancel, health and attach, and the reader, which takes a request in
    hex and prints the events in hex.
    """

    @pytest.fixture
    def reader(self, programs) -> Reader:
        return Reader(programs / "reader")

    @pytest.fixture
    def small_client(self, small_server) -> Iterator[Client]:
        with Client(small_server.address) as client:
            yield client

    @pytest.fixture
    def closed_port(self) -> Iterator[str]:
        # Held all the time, so that nobody else listens there.
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            yield f"127.0.0.1:{held.getsockname()[1]}"

    # The examples

    def test_chat_streams_what_the_python_client_reads(self, programs, small_server, small_client):
        done = run(programs / "chat", small_server.address, QUESTION, 64)
        answer = small_client.chat(QUESTION, temperature=0, max_new_tokens=64)
        text = "".join(event.text for event in answer if isinstance(event, Delta))
        assert len(text) > 10
        assert (done.returncode, done.stdout) == (0, text + "\n"), done.stderr

    def test_chat_shows_a_text_while_the_next_one_is_awaited(self, programs, served):
        served.script.blocked = True
        command = [programs / "chat", served.address, QUESTION]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.read(3) == "The"
            assert not served.script.ended.is_set()
            served.script.ended.set()
            process.kill()

    def test_a_refused_field_is_named(self, programs, small_server):
        done = run(programs / "chat", small_server.address, QUESTION, 0)
        assert (done.returncode, done.stdout) == (1, "")
        assert "INVALID_ARGUMENT: max_new_tokens" in done.stderr
        assert "field: max_new_tokens\n" in done.stderr

    def test_cancel_ends_the_request_and_frees_its_slot(self, programs, lossy, small_client):
        lossy.script.blocked = True
        done = run(programs / "cancel", lossy.address, QUESTION, 2)
        assert done.returncode == 0, done.stderr
        text, _, said = done.stdout.rpartition("\ncancelled ")
        assert lossy.script.cancelled == [said.strip()]
        assert text == " 100"

        cancelled = until_idle(small_client).cancelled
        done = run(programs / "cancel", small_client.target, QUESTION, 1)
        assert done.returncode == 0, done.stderr
        assert until_idle(small_client).cancelled == cancelled + 1

    def test_health_says_what_the_server_says(self, programs, served, small_server):
        assert run(programs / "health", small_server.address).returncode == 0
        ready = run(programs / "health", served.address)
        assert (ready.returncode, ready.stdout) == (0, "SERVING\n")
        served.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        busy = run(programs / "health", served.address)
        assert (busy.returncode, busy.stderr) == (1, "NOT_SERVING\n")
        assert run(programs / "health", served.address, "").returncode == 0
        other = run(programs / "health", served.address, "slotwise.worker/7")
        assert other.returncode == 1
        assert "NOT_FOUND" in other.stderr

    def test_examples_say_how_they_are_used(self, programs):
        for name in ("chat", "cancel", "health", "attach"):
            done = run(programs / name)
            assert done.returncode != 0
            assert done.stderr.startswith(f"usage: {name} ADDRESS")

    def test_cancel_of_an_answer_that_is_shorter(self, programs, served):
        done = run(programs / "cancel", served.address, QUESTION, 1000)
        assert (done.returncode, done.stderr) == (0, "")

    def test_no_server_is_an_error_at_once(self, programs, closed_port):
        for words in (["health"], ["chat", QUESTION], ["attach", "mine"]):
            done = run(programs / words[0], closed_port, *words[1:])
            assert (done.returncode, done.stdout) == (1, "")
            assert f"error: UNAVAILABLE: no answer from {closed_port}" in done.stderr

    def test_attach_reads_the_rest_from_a_token(self, programs, small_server, small_client):
        stream = small_client.chat(QUESTION, temperature=0, max_new_tokens=40)
        deltas = [event for event in stream if isinstance(event, Delta)]
        assert sum(len(delta.token_ids) for delta in deltas) == 40
        for place in (0, len(deltas) // 2, len(deltas) - 1):
            first = deltas[place].first_token_index
            done = run(programs / "attach", small_server.address, stream.request_id, first)
            rest = "".join(delta.text for delta in deltas[place:])
            assert (done.returncode, done.stdout) == (0, rest + "\n"), done.stderr
        beyond = run(programs / "attach", small_server.address, stream.request_id, 41)
        assert beyond.returncode == 1
        assert "OUT_OF_RANGE" in beyond.stderr
        unknown = run(programs / "attach", small_server.address, "nobody")
        assert unknown.returncode == 1
        assert "NOT_FOUND" in unknown.stderr

    # The client

    def test_a_question_over_many_frames_arrives(self, programs, served):
        """More than the window that HTTP/2 opens with, and less than Linux takes as a word."""
        question = "How many bytes is this? " * 5000
        done = run(programs / "chat", served.address, question)
        assert done.returncode == 0, done.stderr
        assert served.script.requests[-1].chat.messages[0].content == question

    def test_an_answer_over_many_frames_arrives(self, reader, served, monkeypatch):
        words = tuple("é" * 3_000_000 + str(i) for i in range(3))
        monkeypatch.setattr("clients.scripted_server.WORDS", words)
        told = reader.read(served.address).summary()
        assert told["choices"][0]["text"] == "".join(words)

    def test_a_token_goes_with_every_call(self, reader, served):
        assert reader.read(served.address, settings={"token": "s3cret"}).error is None
        assert set(served.script.tokens) == {"Bearer s3cret"}

    @pytest.mark.parametrize(
        ("address", "token", "words"),
        [
            ("192.0.2.1:50051", "s3cret", "unencrypted"),
            ("127.0.0.1:1", "two words", "printable ASCII"),
        ],
    )
    def test_a_token_that_cannot_go_is_refused(self, programs, address, token, words):
        command = reader_command(programs / "reader", address, pb.GenerateRequest(), token=token)
        done = run(*command)
        assert done.stdout.startswith("refused ")
        assert words in done.stdout
        assert token not in done.stdout

    def test_a_dropped_stream_ends_its_request(self, reader, small_server, small_client):
        before = until_idle(small_client)
        with reader.start(small_server.address, endless("dropped"), drop_after=3) as process:
            lines = [process.stdout.readline() for _ in range(4)]
            assert lines[-1] == "dropped\n"
            # Not that it has come to its own end meanwhile.
            assert until_idle(small_client).length == before.length
            assert small_client.load().num_unread == 0
            process.stdin.close()

    def test_a_stream_that_is_left_runs_on(self, reader, lossy, small_server, small_client):
        lossy.script.blocked = True
        reader.read(lossy.address, settings={"detach_after": 2})
        assert lossy.script.cancelled == []

        told = reader.read(small_server.address, endless("left"), settings={"detach_after": 3})
        assert len(told.events) == 3
        assert small_client.load().num_running == 1
        assert reader.read(small_server.address, pb.CancelRequest(request_id="left")).error is None
        until_idle(small_client)
        again = reader.read(small_server.address, pb.CancelRequest(request_id="left"))
        assert again.error.code == "NOT_FOUND"

    def test_complete_is_one_whole_answer(self, programs, small_server, small_client):
        request = endless("answer", 16)
        words = reader_command(programs / "reader", small_server.address, request, kind="complete")
        answer = run(*words).stdout.removeprefix("answer ")
        got = pb.CompleteResponse.FromString(bytes.fromhex(answer))
        wanted = small_client.complete("x", temperature=0, ignore_eos=True, max_new_tokens=16)
        assert got.choices[0].text == wanted.text
        assert tuple(got.choices[0].token_ids) == wanted.choices[0].token_ids

    def test_a_deadline_is_kept_by_the_server_too(self, reader, lossy):
        lossy.script.blocked = True
        note, left = lossy.script._note, []

        def note_time(request, context):
            left.append(context.time_remaining())
            note(request, context)

        lossy.script._note = note_time
        told = reader.read(lossy.address, settings={"timeout_ms": 2000})
        assert told.error.code == "DEADLINE_EXCEEDED"
        # gRPC rounds it up by less than a millisecond; without one this is None.
        assert [seconds < 2.1 for seconds in left] == [True]

    def test_a_deadline_ends_the_tries_and_says_why(self, reader, lossy):
        lossy.script.faults = deque([Fault(3, LOST), *([Fault(0, LOST)] * 100)])
        told = reader.read(lossy.address, settings={"timeout_ms": 2000})
        assert told.error.code == "DEADLINE_EXCEEDED"
        assert "Socket closed" in told.error.message

    def test_a_full_queue_is_the_callers_to_handle(self, reader, lossy):
        lossy.script.faults = deque([Fault(0, queue_full(1, 500_000_000))])
        error = reader.read(lossy.address).error
        assert (error.code, error.retry_after_ms) == ("RESOURCE_EXHAUSTED", 1500)
        assert lossy.script.calls == ["Generate"]

    # What is lost on the way

    def test_no_token_is_lost_when_connections_break(self, reader, small_server):
        """Cut again and again in the middle of an answer of a real server."""
        wanted = Generation()
        for response in small_server.stub.Generate(endless("whole", 4000), timeout=TIMEOUT_S):
            wanted.add(response)
        # On a busy machine all may have come before a reset: the proxy does not wait for us.
        proxy = Proxy(small_server.address, cut_after=3000)
        host, _, port = proxy.address.rpartition(":")
        relay = Relay((host, int(port)))
        try:
            lines, num_resets = [], 0
            with reader.start(relay.address, endless("cut", 4000)) as process:
                for line in process.stdout:
                    lines.append(line)
                    if len(lines) % 20 == 3:
                        num_resets += relay.cut() > 0
        finally:
            relay.close()
            proxy.close()
        assert proxy.num_cuts + num_resets >= 3
        told = Told.of("".join(lines)).summary()["choices"][0]
        assert told["ids"] == wanted.token_ids
        assert told["text"] == wanted.text

    @pytest.mark.parametrize("after", range(NUM_TOKENS + 6))
    def test_a_broken_connection_is_not_seen(self, reader, lossy, after):
        wanted = reader.undisturbed(lossy, **ALL)
        lossy.script.faults = deque([Fault(after=after)])
        assert reader.read(lossy.address, **ALL).summary() == wanted
        assert len(lossy.script.calls) > 1
        assert lossy.script.cancelled == []

    @pytest.mark.parametrize("after", range(NUM_TOKENS + 5))
    @pytest.mark.parametrize("status", [LOST, RESET, DRAINS], ids=["lost", "reset", "drains"])
    def test_a_server_that_forgot_is_asked_anew(self, reader, lossy, after, status):
        wanted = reader.undisturbed(lossy, **ALL)
        assert wanted["choices"][1]["calls"] == '{"a": 1}'
        lossy.script.faults = deque([Fault(after=after, status=status, forgets=True)])
        assert reader.read(lossy.address, **ALL).summary() == wanted
        kinds = [one for one in lossy.script.requests if isinstance(one, pb.GenerateRequest)]
        assert kinds[-1] == kinds[-2], "the same id, seed and parameters"
        assert kinds[-1] != kinds[0]

    @pytest.mark.parametrize(
        ("forgets", "places"), [(True, (2, 5, 9, 12)), (False, (2, 5, 9, 6, 3, 7, 1, 12))]
    )
    def test_many_losses_in_a_row(self, reader, lossy, forgets, places):
        wanted = reader.undisturbed(lossy, **ALL)
        lossy.script.faults = deque(Fault(after=after, forgets=forgets) for after in places)
        assert reader.read(lossy.address, **ALL).summary() == wanted

    def test_deltas_that_are_known_in_part_are_cut(self, reader, lossy):
        """Of two tokens, the one that came; of a tool call, its name and what came of it."""
        wanted = reader.undisturbed(lossy, **ALL)
        make = lossy.script._messages
        lossy.script._messages = lambda *words: map(with_whole_calls, make(*words))
        lossy.script.faults = deque([Fault(9, LOST), Fault(0, OUT_OF_RANGE)])
        assert reader.read(lossy.address, **ALL).summary() == wanted
        assert lossy.script.calls == ["Generate", "Attach 5", "Attach 0"]

    def test_an_end_without_the_last_messages_is_a_loss(self, reader, lossy):
        wanted = reader.undisturbed(lossy)
        lossy.script.faults = deque([Fault(after=4, is_silent=True)])
        assert reader.read(lossy.address).summary() == wanted
        assert lossy.script.calls == ["Generate", "Attach 3"]

    @pytest.mark.parametrize(
        ("refusals", "calls"),
        [
            ([Fault(0, LOST), Fault(0, LOST)], "Attach, Attach, Attach"),
            ([Fault(0, DRAINS)], "Attach, Attach"),
            ([Fault(0, OUT_OF_RANGE)], "Attach, Attach 0"),
            ([refuse(DRAINS)], "Attach, Attach, Generate"),
            ([GIVEN_UP], "Attach, Generate"),
            (
                [GIVEN_UP, refuse(DRAINS), refuse(LOST)],
                "Attach, Generate, Attach, Attach, Generate",
            ),
            ([refuse(EXPIRED)], "Attach, Generate"),
            ([refuse(NOT_FOUND)], "Attach, Generate"),
            ([refuse(NOT_FOUND), refuse(EXISTS)], "Attach, Generate, Attach, Generate"),
            ([refuse(NOT_FOUND), refuse(queue_full(0, 1000))], "Attach, Generate, Generate"),
        ],
    )
    def test_what_a_refusal_of_attach_leads_to(self, reader, lossy, refusals, calls):
        wanted = reader.undisturbed(lossy)
        lossy.script.faults = deque([Fault(3, LOST), *refusals])
        assert reader.read(lossy.address).summary() == wanted
        calls = re.sub(r"Attach(?! 0)", "Attach 2", f"Generate, {calls}")
        assert lossy.script.calls == calls.split(", ")

    @pytest.mark.parametrize(
        ("status", "code"), [(SUPERSEDED, "ABORTED"), (POISON, "INTERNAL"), (FAULT, "INTERNAL")]
    )
    def test_what_is_not_to_be_tried_again_is_an_error(self, reader, lossy, status, code):
        lossy.script.faults = deque([Fault(3, status)])
        assert reader.read(lossy.address).error.code == code
        assert lossy.script.calls == ["Generate"]
        assert lossy.script.cancelled == []

    def test_an_errors_words_arrive_whole(self, reader, lossy):
        words = "naïve: 100 % of 日本"
        lossy.script.faults = deque([Fault(0, refuse_with(words))])
        assert reader.read(lossy.address).error.message == words

    def test_what_was_cancelled_since_nobody_read_it_is_asked_anew(self, reader, lossy):
        wanted = reader.undisturbed(lossy, **ALL)
        lossy.script.faults = deque([Fault(4, LOST), UNREAD])
        assert reader.read(lossy.address, attach_window_ms=0, **ALL).summary() == wanted
        kinds = [call.split()[0] for call in lossy.script.calls]
        assert kinds == ["Generate", "Attach", "Generate"]

    def test_what_was_cancelled_while_somebody_read_it_stays_so(self, reader, lossy):
        for faults in ([Fault(4, LOST), UNREAD], [Fault(4, cancels=True)]):
            lossy.script.faults = deque(faults)
            last = reader.read(lossy.address).events[-1]
            assert last.finished.finish_reason == pb.FINISH_REASON_CANCELLED
        assert lossy.script.calls.count("Generate") == 2

    def test_who_reads_slowly_is_cut_off_and_reads_on(self, reader, lossy):
        wanted = reader.undisturbed(lossy)
        lossy.script.faults = deque([Fault(4, SLOW), None])
        assert reader.read(lossy.address).summary() == wanted
        assert lossy.script.calls == ["Generate", "Attach 3"]
        # Not that the connection was silent: the messages before the cut had come long before.
        lossy.script.faults = deque([Fault(4, SLOW), UNREAD])
        assert reader.read(lossy.address).summary() == wanted

    def test_another_answer_is_an_error_and_its_run_is_ended(self, reader, lossy):
        lossy.script.faults = deque([Fault(6, LOST, forgets=True, shift=50)])
        told = reader.read(lossy.address, request_id="mine")
        assert told.error.code == "DATA_LOSS"
        assert "token 2 is 152 and was 102" in told.error.message
        assert lossy.script.was_cancelled.wait(TIMEOUT_S)
        assert lossy.script.cancelled == ["mine"]

    def test_an_id_that_another_request_has_is_not_read(self, reader, lossy):
        def seeded(seed: int) -> pb.GenerateRequest:
            sampling = pb.SamplingParams(seed=seed)
            return pb.GenerateRequest(text="x", request_id="mine", sampling=sampling)

        assert reader.read(lossy.address, seeded(5)).error is None
        told = reader.read(lossy.address, seeded(6))
        assert (told.error.code, told.events) == ("ALREADY_EXISTS", ())
        lossy.script.faults = deque([Fault(0, LOST)])
        told = reader.read(lossy.address, seeded(6))
        assert (told.error.code, told.events) == ("ALREADY_EXISTS", ())
        assert "not this one" in told.error.message
        assert lossy.script.cancelled == []

    def test_a_server_without_attach_windows_is_asked_without(self, reader, lossy):
        lossy.script.max_window_ms = 0
        assert reader.read(lossy.address).error is None
        assert lossy.script.calls == ["Generate", "Generate"]
        sent = lossy.script.requests[-2:]
        assert [one.HasField("attach_window_ms") for one in sent] == [True, False]
        # That it was sent twice does not make a request of the same id its own.
        lossy.script.calls.clear()
        told = reader.read(lossy.address, request_id=sent[-1].request_id)
        assert told.error.code == "ALREADY_EXISTS"
        assert lossy.script.calls == ["Generate", "Generate"]

    def test_without_reconnecting_a_loss_is_an_error(self, reader, lossy):
        lossy.script.faults = deque([Fault(3, LOST)])
        told = reader.read(lossy.address, settings={"reconnect_ms": 0})
        assert told.error.code == "UNAVAILABLE"
        assert lossy.script.calls == ["Generate"]
        assert not lossy.script.requests[-1].HasField("attach_window_ms")

    def test_a_loss_that_lasts_is_an_error_after_the_bound(self, reader, lossy):
        lossy.script.faults = deque([Fault(3, LOST), *([Fault(0, LOST)] * 100)])
        told = reader.read(lossy.address, settings={"reconnect_ms": 3000})
        assert told.error.code == "UNAVAILABLE"
        # After 0.1, 0.2, 0.4 and 0.8 s; 1.6 s more are too long. The tries may last as long.
        assert lossy.script.calls == ["Generate", *["Attach 2"] * 4]

    def test_attach_begins_where_it_is_told_and_goes_on(self, reader, lossy):
        reader.read(lossy.address, request_id="mine", n=2)
        where = pb.AttachRequest(
            request_id="mine", next_token_index=2, other_next_token_indices=[4]
        )
        for faults in ([], [Fault(3), Fault(2), None]):
            lossy.script.faults = deque(faults)
            told = reader.read(lossy.address, where)
            assert told.error is None
            ids = [i for event in told.events for i in event.delta.token_ids]
            assert ids == [102, 103, 104, 105, 204, 205]

    @pytest.mark.parametrize(
        ("status", "code"),
        [
            (NOT_FOUND, "NOT_FOUND"),
            (EXPIRED, "FAILED_PRECONDITION"),
            (OUT_OF_RANGE, "OUT_OF_RANGE"),
            (SUPERSEDED, "ABORTED"),
        ],
    )
    def test_attach_is_refused_with_its_own_error(self, reader, lossy, status, code):
        reader.read(lossy.address, request_id="mine")
        lossy.script.faults = deque([Fault(0, status)])
        told = reader.read(lossy.address, pb.AttachRequest(request_id="mine"))
        assert told.error.code == code
        assert lossy.script.cancelled == []
