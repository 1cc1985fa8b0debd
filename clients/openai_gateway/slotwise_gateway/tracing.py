"""Spans of requests, sent to an OpenTelemetry collector. Imported only where one is named."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from .caller import TraceContext, trace_context

# A collector that hangs holds the end of the process up for no longer.
STOP_S: Final = 1.0
EXPORT_S: Final = 5.0

log = logging.getLogger(__name__)


class Tracer:
    """Makes the spans. Export is in a thread of its own, with a bounded queue: no request ever
    waits for the collector."""

    def __init__(self, endpoint: str, sample_ratio: float) -> None:
        """sample_ratio: of requests whose caller says nothing of a trace; else the caller decides.
        Certificates and headers are those of the OTEL_EXPORTER_OTLP_* variables."""
        # It tells of every failed attempt; TellingExporter says the same once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter = OTLPSpanExporter(
            endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_S
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create({"service.name": "slotwise-gateway"}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(TellingExporter(exporter, endpoint)))
        self._tracer = self._provider.get_tracer("slotwise_gateway")
        self._propagator = TraceContextTextMapPropagator()

    def start(self, scope: Scope, request_id: str) -> RequestSpan:
        """For a request that has come."""
        given = trace_context(scope)
        carrier = {}
        if given is not None:
            carrier = {"traceparent": given.traceparent, "tracestate": given.tracestate or ""}
        span = self._tracer.start_span(
            scope["method"],
            # Never the context of whatever runs here.
            self._propagator.extract(carrier, Context()),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "gen_ai.request.id": request_id},
        )
        return RequestSpan(span, self._passed_on(span))

    def close(self) -> None:
        """Sends what is left, if that takes no more than a second."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(STOP_S)

    def _passed_on(self, span: Span) -> TraceContext:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span, Context()))
        return TraceContext(carrier["traceparent"], carrier.get("tracestate"))


class RequestSpan:
    """From a request's headers to the end of its response. `trace`: for the server."""

    def __init__(self, span: Span, trace: TraceContext) -> None:
        self.trace = trace
        self._span = span
        # In hex, for log lines; none when it is not sampled.
        self.ids: dict[str, str] = {}
        if span.is_recording():
            context = span.get_span_context()
            self.ids["trace_id"] = f"{context.trace_id:032x}"
            self.ids["span_id"] = f"{context.span_id:016x}"

    def end(self, method: str, route: str, status: int, message: str) -> None:
        """`message`: why it has failed, if it has; it may quote the body where the caller is at
        fault, and is not told then."""
        self._span.update_name(f"{method} {route}")
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        is_refused = HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or (message and not is_refused):
            self._span.set_status(StatusCode.ERROR, message)
        self._span.end()


class TellingExporter(SpanExporter):
    """Another exporter, of whose failures it tells once, and once when it works again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        # Spans that were lost since it began to fail.
        self._num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._num_lost:
                log.warning(
                    "spans do not reach the collector at %s; serving goes on", self._endpoint
                )
            self._num_lost += len(spans)
        elif self._num_lost:
            log.info("spans reach the collector again; %d were lost", self._num_lost)
            self._num_lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
