"""What a collector gets of requests: a real one over gRPC, one that hangs, and none at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
from concurrent import futures

import grpc
import pytest
from free_ports import fixed_port
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from checkpoints import make_checkpoint
from integration.servers import running_server
from scheduler_service.config import ConfigError, parse_arguments
from scheduler_service.process import Process
from slotwise.v1 import inference_pb2 as pb

TIMEOUT_S = 60
PARENT = "00f067aa0ba902b7"
SAMPLING = pb.SamplingParams(temperature=1.0, seed=7)


def traceparent(trace_id: str, *, sampled: bool = True) -> list[tuple[str, str]]:
    return [("traceparent", f"00-{trace_id}-{PARENT}-{'01' if sampled else '00'}")]


def request(request_id: str, **given) -> pb.GenerateRequest:
    prompt = pb.TokenIds(ids=[5, 6, 7])
    return pb.GenerateRequest(request_id=request_id, token_ids=prompt, **given)


class Collector(otlp_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans = []
        self._came = threading.Condition()

    def Export(self, request, context):  # noqa: N802
        with self._came:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self.spans.extend(scope.spans)
            self._came.notify_all()
        return otlp.ExportTraceServiceResponse()

    def trace_of(self, request_id: str) -> list:
        """The spans of a request's trace, when its root is here; others of it came before."""
        with self._came:
            assert self._came.wait_for(lambda: self._root(request_id), TIMEOUT_S)
            trace_id = self._root(request_id).trace_id
            return [span for span in self.spans if span.trace_id == trace_id]

    def _root(self, request_id: str):
        for span in self.spans:
            if values(span).get("gen_ai.request.id") == request_id:
                return span
        return None


def values(span) -> dict:
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        if kind == "array_value":
            value = [each.string_value for each in value.values]
        found[one.key] = value
    return found


@contextlib.contextmanager
def collecting(port: int = 0):
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{bound}"
    finally:
        server.stop(None).wait()


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
    told = values(root)
    assert told["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert told["gen_ai.usage.prompt_tokens"] == 3
    assert told["gen_ai.usage.completion_tokens"] == 40
    assert (told["gen_ai.request.n"], told["gen_ai.request.max_tokens"]) == (2, 20)
    for choice in (0, 1):
        phases = [span for span in children if values(span)["slotwise.choice"] == choice]
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
    # The clock of the machine; a step of it may be corrected while the server runs.
    slack_ns = 10**9
    assert began_ns - slack_ns <= root.start_time_unix_nano
    assert root.end_time_unix_nano <= ended_ns + slack_ns


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
    asked = request("survivor", max_new_tokens=400, ignore_eos=True)
    num_tokens = 0
    is_killed = False
    for response in server.stub.Generate(asked, timeout=600):
        num_tokens += len(response.delta.token_ids)
        if num_tokens and not is_killed:
            is_killed = True
            os.kill(server.worker_pids()[0], signal.SIGKILL)
    assert (is_killed, num_tokens) == (True, 400)
    spans = collector.trace_of("survivor")
    names = sorted(span.name for span in spans)
    assert names == ["decode", "prefill", "queue", "slotwise.generate"]


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
