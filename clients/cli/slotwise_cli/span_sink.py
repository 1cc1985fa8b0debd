"""A collector that only counts, in a process of its own so that it slows down nobody's threads."""

import contextlib
import multiprocessing
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import grpc

from .output import CliError

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp


class SpanSink:
    """Its place, and what has come there so far."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.endpoint: str = self._answer()

    def counts(self) -> Counter[str]:
        """How many spans of each name have come."""
        self._pipe.send(None)
        counts: Counter[str] = self._answer()
        return counts

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise CliError(
                "the benchmark's collector of spans did not start; it needs "
                "pip install 'slotwise[trace]'"
            ) from None


@contextlib.contextmanager
def span_sink() -> Iterator[SpanSink]:
    """CliError when it does not start."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield SpanSink(ours)
    finally:
        # The process ends with the pipe.
        ours.close()
        process.join()


def _run(pipe: Connection) -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

    counter = _SpanCounter()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(counter, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with contextlib.suppress(EOFError, BrokenPipeError):
        pipe.send(f"http://127.0.0.1:{port}")
        while True:
            pipe.recv()
            pipe.send(counter.counts)
    server.stop(None).wait()


class _SpanCounter:
    def __init__(self) -> None:
        self.counts = Counter[str]()
        self._lock = threading.Lock()

    def Export(  # noqa: N802
        self, request: "otlp.ExportTraceServiceRequest", context: grpc.ServicerContext
    ) -> "otlp.ExportTraceServiceResponse":
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp

        scopes = (scope for one in request.resource_spans for scope in one.scope_spans)
        with self._lock:
            self.counts.update(span.name for scope in scopes for span in scope.spans)
        return otlp.ExportTraceServiceResponse()
