"""An OpenTelemetry collector for the tests: a real one over gRPC, which keeps what it gets."""

from __future__ import annotations

import contextlib
import threading
from concurrent import futures

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

TIMEOUT_S = 60
PARENT = "00f067aa0ba902b7"


def traceparent(trace_id: str, *, sampled: bool = True) -> list[tuple[str, str]]:
    return [("traceparent", f"00-{trace_id}-{PARENT}-{'01' if sampled else '00'}")]


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

    def wait_for(self, is_it):
        """The first span of which `is_it` is true, when it has come."""
        with self._came:
            assert self._came.wait_for(lambda: any(map(is_it, self.spans)), TIMEOUT_S)
            return next(filter(is_it, self.spans))

    def trace_of(self, request_id: str) -> list:
        """The spans of a request's trace, when its root is here; others of it came before."""
        with self._came:
            assert self._came.wait_for(lambda: self._root(request_id), TIMEOUT_S)
            trace_id = self._root(request_id).trace_id
            return [span for span in self.spans if span.trace_id == trace_id]

    def _root(self, request_id: str):
        for span in self.spans:
            if span.name == "slotwise.generate" and values(span)["gen_ai.request.id"] == request_id:
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
