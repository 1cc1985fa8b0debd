"""A collector that only counts, in a process of its own so that it slows down nobody's threads."""

import contextlib
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc

from .output import CliError

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp


class SpanSink:
    """Its place, and what has come there so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.endpoint: str = self._answer()

    def counts(self) -> Counter[str]:
        """How many spans of each name have come."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return Counter(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CliError(
                "the benchmark's collector of spans did not start; it needs "
                "pip install 'slotwise[trace]'"
            )
        return json.loads(line)


@contextlib.contextmanager
def span_sink() -> Iterator[SpanSink]:
    """CliError when it does not start."""
    command = [sys.executable, "-m", "slotwise_cli.span_sink"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    # It ends with its standard input, which the end of the block closes.
    with process:
        yield SpanSink(process)


def main() -> None:
    """Tells its endpoint, then the counts for each line of standard input, as lines of JSON."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

    counter = _SpanCounter()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(counter, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(json.dumps(f"http://127.0.0.1:{port}"), flush=True)
    for _ in sys.stdin:
        print(json.dumps(counter.counts), flush=True)
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


if __name__ == "__main__":
    main()
