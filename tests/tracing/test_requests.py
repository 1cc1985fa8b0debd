"""What a collector gets of requests: a real one over gRPC, one that hangs, and none at all."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import time

import grpc
import pytest
from free_ports import fixed_port
from tracing.collector import PARENT, TIMEOUT_S, collecting, traceparent, values

from checkpoints import make_checkpoint
from integration.servers import running_server
from scheduler_service.config import ConfigError, parse_arguments
from scheduler_service.process import Process
from slotwise.v1 import inference_pb2 as pb

SAMPLING = pb.SamplingParams(temperature=1.0, seed=7)


def request(request_id: str, **given) -> pb.GenerateRequest:
    prompt = pb.TokenIds(ids=[5, 6, 7])
    return pb.GenerateRequest(request_id=request_id, token_ids=prompt, **given)


@pytest.fixture(scope="module", autouse=True)
def often():
    """Spans are sent soon, not every five seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=512)


@pytest.fixture(scope="module")
def traced(tiny):
    with (
        collecting() as (collector, endpoint),
        running_server(tiny, "--threads", "1", "--otlp-endpoint", endpoint) as server,
    ):
        yield server, collector


def run(server, asked, metadata=()):
    responses = list(server.stub.Generate(asked, metadata=metadata, timeout=TIMEOUT_S))
    return [token for one in responses for token in one.delta.token_ids]


def test_a_trace_has_the_phases_of_its_request(traced):
    server, collector = traced
    began_ns = time.time_ns()
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    run(server, request("whole", max_new_tokens=20, ignore_eos=True, n=2), traceparent(trace_id))
    ended_ns = time.time_ns()
    spans = collector.trace_of("whole")
    [root] = [span for span in spans if span.name == "slotwise.generate"]
    assert root.trace_id.hex() == trace_id
    assert root.parent_span_id.hex() == PARENT
    children = [span for span in spans if span is not root]
    assert {span.parent_span_id for span in children} == {root.span_id}
    phases_of_both = [span for span in children if span.name != "step"]
    told = values(root)
    assert told["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert told["gen_ai.usage.prompt_tokens"] == 3
    assert told["gen_ai.usage.completion_tokens"] == 40
    assert (told["gen_ai.request.n"], told["gen_ai.request.max_tokens"]) == (2, 20)
    for choice in (0, 1):
        phases = [span for span in phases_of_both if values(span)["slotwise.choice"] == choice]
        assert [span.name for span in phases] == ["queue", "prefill", "decode"]
        # Each begins where the one before it ends, within the request.
        assert phases[0].start_time_unix_nano == root.start_time_unix_nano
        for before, after in itertools.pairwise(phases):
            assert before.end_time_unix_nano == after.start_time_unix_nano
        assert phases[-1].end_time_unix_nano <= root.end_time_unix_nano
        [first] = [
            event
            for event in root.events
            if event.name == "first_token" and values(event)["slotwise.choice"] == choice
        ]
        assert first.time_unix_nano == phases[2].start_time_unix_nano
    steps = [span for span in children if span.name == "step"]
    check_steps(root, steps)
    assert sum(values(span)["slotwise.step.own_tokens"] for span in steps) == 40
    assert values(steps[0])["slotwise.step.kind"] == "prefill"
    assert values(steps[-1])["slotwise.step.kind"] == "decode"
    # The clock of the machine; a step of it may be corrected while the server runs.
    slack_ns = 10**9
    assert began_ns - slack_ns <= root.start_time_unix_nano
    assert root.end_time_unix_nano <= ended_ns + slack_ns


def check_steps(root, steps) -> None:
    told = values(root)
    assert len(steps) + told["slotwise.num_steps_left_out"] == told["slotwise.num_steps"]
    for step in steps:
        assert root.start_time_unix_nano <= step.start_time_unix_nano
        assert step.end_time_unix_nano <= root.end_time_unix_nano
        took_ns = step.end_time_unix_nano - step.start_time_unix_nano
        assert 0 < values(step)["slotwise.step.worker_ns"] <= took_ns
    ids = [
        (values(step)["slotwise.step.epoch"], values(step)["slotwise.step.id"]) for step in steps
    ]
    assert ids == sorted(set(ids))


def test_of_many_steps_some_are_left_out(traced):
    server, collector = traced
    # A constraint is followed token by token.
    asked = request("long", max_new_tokens=100, min_new_tokens=100, regex="[a-z]+")
    assert len(run(server, asked)) == 100
    spans = collector.trace_of("long")
    [root] = [span for span in spans if not span.parent_span_id]
    steps = [span for span in spans if span.name == "step"]
    check_steps(root, steps)
    num_steps = values(root)["slotwise.num_steps"]
    assert num_steps > 64
    assert len(steps) == 4 + (num_steps - 1) // 64


def test_a_prefix_that_is_there_is_an_event(traced):
    server, collector = traced
    ids = pb.TokenIds(ids=range(100, 180))
    for name in ("prefix-1", "prefix-2"):
        asked = pb.GenerateRequest(request_id=name, token_ids=ids, max_new_tokens=2)
        run(server, asked)
    [root] = [span for span in collector.trace_of("prefix-2") if not span.parent_span_id]
    [prefix] = [event for event in root.events if event.name == "prefix"]
    num_cached = values(root)["gen_ai.usage.cached_tokens"]
    assert 0 < num_cached == values(prefix)["slotwise.num_tokens"]


def test_a_reader_that_attaches_has_a_span_with_a_link(traced):
    server, collector = traced
    asked = request("read-on", max_new_tokens=30, ignore_eos=True, attach_window_ms=60_000)
    stream = server.stub.Generate(asked, timeout=TIMEOUT_S)
    next(stream)
    stream.cancel()
    trace_id = "c" * 32
    again = pb.AttachRequest(request_id="read-on")
    responses = list(server.stub.Attach(again, metadata=traceparent(trace_id), timeout=TIMEOUT_S))
    assert sum(len(one.delta.token_ids) for one in responses) == 30
    [call] = [span for span in collector.trace_of("read-on") if span.name == "slotwise.generate"]
    attach = collector.wait_for(lambda span: span.trace_id.hex() == trace_id)
    assert attach.name == "slotwise.attach"
    assert [(link.trace_id, link.span_id) for link in attach.links] == [
        (call.trace_id, call.span_id)
    ]


def test_a_refused_request_has_a_span_with_its_status(traced):
    server, collector = traced
    trace_id = "f" * 32
    asked = request("r" * 1_000, max_new_tokens=2)
    with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
        run(server, asked, traceparent(trace_id))
    span = collector.wait_for(lambda span: span.trace_id.hex() == trace_id)
    assert (span.name, span.parent_span_id.hex()) == ("slotwise.generate", PARENT)
    assert values(span) == {
        "gen_ai.request.id": "r" * 256,
        "slotwise.refusal": "INVALID_ARGUMENT",
    }
    # The caller's fault is no error of a server; its words are not told.
    assert (span.status.code, span.status.message) == (0, "")


def test_who_does_not_sample_is_not_traced(traced):
    server, collector = traced
    trace_id = "a" * 32
    run(server, request("silent", max_new_tokens=4), traceparent(trace_id, sampled=False))
    run(server, request("after", max_new_tokens=4))
    collector.trace_of("after")
    assert trace_id not in {span.trace_id.hex() for span in collector.spans}


@pytest.mark.parametrize(
    "text", ["", "00-0-0-01", "00-" + "0" * 32 + "-" + PARENT + "-01", "x" * 900]
)
def test_a_malformed_traceparent_begins_a_new_trace(traced, text):
    server, collector = traced
    request_id = f"malformed-{len(text)}"
    run(server, request(request_id, max_new_tokens=4), [("traceparent", text)])
    spans = collector.trace_of(request_id)
    assert [span.name for span in spans if not span.parent_span_id] == ["slotwise.generate"]


def test_a_lost_worker_leaves_a_whole_trace(traced):
    server, collector = traced
    asked = request("survivor", max_new_tokens=40, ignore_eos=True)
    [worker] = server.worker_pids()
    # Else it might have done all before it dies.
    os.kill(worker, signal.SIGSTOP)
    stream = server.stub.Generate(asked, timeout=600)
    assert next(stream).HasField("accepted")
    os.kill(worker, signal.SIGKILL)
    assert sum(len(one.delta.token_ids) for one in stream) == 40
    spans = collector.trace_of("survivor")
    names = sorted(span.name for span in spans if span.name != "step")
    assert names == ["decode", "prefill", "queue", "slotwise.generate"]
    [root] = [span for span in spans if not span.parent_span_id]
    check_steps(root, [span for span in spans if span.name == "step"])
    events = [event.name for event in root.events]
    lost = events.index("workers_lost")
    assert events[lost : lost + 2] == ["workers_lost", "recovered"]
    assert events.count("workers_lost") == 1


def test_an_absent_collector_is_told_once_and_met_again(tiny, traced):
    port = fixed_port()
    flags = ["--threads", "1", "--otlp-endpoint", f"http://127.0.0.1:{port}"]
    with running_server(tiny, *flags) as server:
        asked = request("same", max_new_tokens=16, ignore_eos=True, sampling=SAMPLING)
        without_collector = run(server, asked)
        wait_for_line(server, "spans do not reach the collector")
        with collecting(port) as (collector, _):
            number = 0
            while not collector.spans:
                number += 1
                assert number < TIMEOUT_S * 5
                run(server, request(f"again-{number}", max_new_tokens=2))
                time.sleep(0.2)
            wait_for_line(server, "spans reach the collector again")
    assert sum("spans do not reach" in line for line in server.log) == 1
    assert without_collector == run(traced[0], asked)
    assert len(without_collector) == 16


def test_a_collector_that_hangs_holds_up_neither_answers_nor_the_end(tiny):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with running_server(tiny, "--threads", "1", "--otlp-endpoint", endpoint) as server:
            assert len(run(server, request("one", max_new_tokens=8, ignore_eos=True))) == 8
    assert server.process.returncode == 0


def wait_for_line(server, text: str) -> None:
    ends = time.monotonic() + TIMEOUT_S
    while not any(text in line for line in server.log):
        assert time.monotonic() < ends, "".join(server.log)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--otlp-endpoint", "127.0.0.1:4317"], "--otlp-endpoint is '127.0.0.1:4317'"),
        (["--trace-sample-ratio", "1.5"], "--trace-sample-ratio is 1.5"),
        (["--trace-sample-ratio", "nan"], "--trace-sample-ratio is nan"),
    ],
)
def test_flags_that_cannot_be(flags, words):
    with pytest.raises(ConfigError, match=words):
        parse_arguments(["--model", "m", *flags])


async def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "scheduler_service.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    config = parse_arguments(["--model", "m", "--otlp-endpoint", "http://127.0.0.1:1"])
    with pytest.raises(ConfigError, match=r"slotwise\[trace\]"):
        Process(config)
