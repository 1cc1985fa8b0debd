"""What traces cost: `python tests/scheduler_service/bench_traces.py`.

Microseconds of the scheduler's event loop for each step and each request that is sampled, and what
a step takes where nothing is. Spans go to a collector that takes them all, in the same process's
export thread, which takes its share too: `all` is both together.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from array import array
from collections.abc import Iterator
from concurrent import futures

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from scheduler_service.request import FinishedEvent, FinishReason, Request, Sampling, TokenEvent
from scheduler_service.step import DecodeRow, RowResult, StepCommand, StepResult
from scheduler_service.tracing import Tracer

NUM_ROWS = 8
NOT_SAMPLED = [("traceparent", f"00-{'a' * 32}-{'b' * 16}-00")]


class _Collector(otlp_grpc.TraceServiceServicer):
    def Export(self, request, context):  # noqa: N802
        return otlp.ExportTraceServiceResponse()


@contextlib.contextmanager
def collecting() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(_Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def run(tracer: Tracer, num_tokens: int, metadata: list[tuple[str, str]]) -> float:
    """Seconds that tracing takes of NUM_ROWS requests of so many tokens, one a step."""
    took_s = 0.0
    now_ns = time.monotonic_ns()
    names = [f"r{row}" for row in range(NUM_ROWS)]
    began_s = time.perf_counter()
    traces = []
    for name in names:
        prompt = array("I", (1, 2, 3))
        request = Request(name, prompt, Sampling(0.0, 1.0, 0, 0.0, 7), 9, frozenset(), now_ns)
        request.admitted_ns = request.first_token_ns = now_ns
        traces.append(tracer.caller(metadata)([request]))
    took_s += time.perf_counter() - began_s
    command = StepCommand(1, 0, 1, tuple(DecodeRow(row, 1) for row in range(NUM_ROWS)))
    rows = tuple(RowResult(row, 1, (5,)) for row in range(NUM_ROWS))
    tokens = [TokenEvent(name, 1, (5,)) for name in names]
    for step_id in range(num_tokens):
        command = StepCommand(1, step_id, 1, command.rows)
        result = StepResult(1, step_id, 0, rows, 1000)
        began_s = time.perf_counter()
        if tracer.is_wanted:
            tracer.sent(command, names, now_ns)
        tracer.done(result, now_ns + 1)
        for trace, event in zip(traces, tokens, strict=True):
            if trace is not None:
                trace.note(event)
        took_s += time.perf_counter() - began_s
    began_s = time.perf_counter()
    for name, trace in zip(names, traces, strict=True):
        if trace is not None:
            trace.note(FinishedEvent(name, FinishReason.LENGTH, 3, num_tokens, 1, 1, 1, 1))
    return took_s + time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256, help="of each request")
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    with collecting() as endpoint:
        tracer = Tracer(endpoint, 1.0, "model")
        run(tracer, 8, [])
        num_all = NUM_ROWS * asked.tokens
        for name, metadata in (("sampled", []), ("not sampled", NOT_SAMPLED)):
            cpu_s, loop_s = time.process_time(), []
            for _ in range(asked.rounds):
                loop_s.append(run(tracer, asked.tokens, metadata))
                # As between requests: else the queue would be full, and spans dropped for nothing.
                tracer._provider.force_flush()
            cpu_s = (time.process_time() - cpu_s) / asked.rounds
            least_s = min(loop_s)
            print(
                f"{name}: {least_s / NUM_ROWS * 1e6:.0f} us a request of {asked.tokens} tokens, "
                f"{least_s / num_all * 1e9:.0f} ns a token; "
                f"all: {cpu_s / num_all * 1e9:.0f} ns of processor time a token"
            )
        tracer.close()


if __name__ == "__main__":
    main()
