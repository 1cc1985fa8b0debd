"""Spans of requests, sent to an OpenTelemetry collector. Imported only where one is named."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .request import Event, FinishedEvent, FinishReason, Request
from .service import TraceStart

# A collector that hangs holds the end of the process up for no longer.
_STOP_S = 1.0
_EXPORT_S = 5.0
_FAILURES = (FinishReason.DEADLINE, FinishReason.ERROR)

_log = logging.getLogger(__name__)


class Tracer:
    """Makes spans when requests end, from the times that their events tell. Export is in a thread
    of its own, with a bounded queue: no request ever waits for the collector."""

    def __init__(self, endpoint: str, sample_ratio: float, model: str) -> None:
        """sample_ratio: of requests whose caller says nothing of a trace; else the caller decides.
        Certificates and headers are those of the OTEL_EXPORTER_OTLP_* variables."""
        # It tells of every failed attempt; TellingExporter says the same once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter = OTLPSpanExporter(
            endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_S
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create({"service.name": "slotwise"}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(TellingExporter(exporter, endpoint)))
        self._tracer = self._provider.get_tracer("slotwise")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        # From the scheduler's clock to that of collectors; one for all, so spans fit each other.
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceStart:
        """For a call that came with this metadata. A malformed traceparent counts as none."""
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        context = self._propagator.extract(carrier)

        def start(requests: Sequence[Request]) -> Callable[[Event], None] | None:
            span = self._tracer.start_span(
                "slotwise.generate",
                context,
                kind=SpanKind.SERVER,
                start_time=self.unix_ns(requests[0].arrival_ns),
            )
            return CallTrace(self, span, requests).note if span.is_recording() else None

        return start

    def close(self) -> None:
        """Sends what is left, if that takes no more than a second."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_STOP_S)

    def begin(self, span: Span, requests: Sequence[Request]) -> None:
        """What is known of a call when it is accepted."""
        first = requests[0]
        span.set_attributes(
            {
                "gen_ai.request.id": first.call_id,
                "gen_ai.request.max_tokens": first.max_new_tokens,
                "gen_ai.request.n": len(requests),
                "gen_ai.request.temperature": first.sampling.temperature,
                "gen_ai.request.top_p": first.sampling.top_p,
                "gen_ai.request.top_k": first.sampling.top_k,
                "gen_ai.response.model": self._model,
            }
        )

    def add_phases(self, span: Span, request: Request, end: FinishedEvent) -> int:
        """A span for each phase that an answer came to; returns when the last one ended."""
        context = set_span_in_context(span)
        at_ns = self.unix_ns(request.arrival_ns)
        phases = [("queue", end.queue_ns)]
        if request.admitted_ns is not None:
            phases.append(("prefill", end.prefill_ns))
        if request.first_token_ns is not None:
            phases.append(("decode", end.decode_ns))
        for name, duration_ns in phases:
            attributes = {"slotwise.choice": request.choice_index}
            child = self._tracer.start_span(name, context, start_time=at_ns, attributes=attributes)
            at_ns += duration_ns
            child.end(at_ns)
        return at_ns

    def unix_ns(self, monotonic_ns: int) -> int:
        return monotonic_ns + self._offset_ns


class CallTrace:
    """The span of one call, until all its answers have ended."""

    def __init__(self, tracer: Tracer, span: Span, requests: Sequence[Request]) -> None:
        self._tracer = tracer
        self._span = span
        self._requests = {request.request_id: request for request in requests}
        self._ends: dict[str, FinishedEvent] = {}
        self._end_ns = 0
        tracer.begin(span, requests)

    def note(self, event: Event) -> None:
        """Must be told of every FinishedEvent of the call; others cost nothing."""
        if not isinstance(event, FinishedEvent) or event.request_id in self._ends:
            return
        self._ends[event.request_id] = event
        request = self._requests[event.request_id]
        self._end_ns = max(self._end_ns, self._tracer.add_phases(self._span, request, event))
        if event.time_to_first_token_ns:
            first_ns = self._tracer.unix_ns(request.arrival_ns) + event.time_to_first_token_ns
            attributes = {"slotwise.choice": request.choice_index}
            self._span.add_event("first_token", attributes, timestamp=first_ns)
        if event.reason in _FAILURES:
            self._span.set_status(StatusCode.ERROR, event.message or event.reason.value)
        if len(self._ends) == len(self._requests):
            self._finish()

    def _finish(self) -> None:
        ends = [self._ends[name] for name in self._requests]
        first = next(iter(self._requests.values()))
        e2e_ns = self._end_ns - self._tracer.unix_ns(first.arrival_ns)
        self._span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [end.reason.value for end in ends],
                "gen_ai.usage.prompt_tokens": ends[0].num_prompt_tokens,
                "gen_ai.usage.completion_tokens": sum(end.num_generated_tokens for end in ends),
                "gen_ai.usage.cached_tokens": ends[0].num_cached_tokens,
                # Of the first answer, in seconds.
                "gen_ai.latency.time_in_queue": ends[0].queue_ns / 1e9,
                "gen_ai.latency.time_to_first_token": ends[0].time_to_first_token_ns / 1e9,
                "gen_ai.latency.time_in_model_prefill": ends[0].prefill_ns / 1e9,
                "gen_ai.latency.time_in_model_decode": ends[0].decode_ns / 1e9,
                "gen_ai.latency.e2e": e2e_ns / 1e9,
            }
        )
        self._span.end(self._end_ns)


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
                _log.warning(
                    "spans do not reach the collector at %s; serving goes on", self._endpoint
                )
            self._num_lost += len(spans)
        elif self._num_lost:
            _log.info("spans reach the collector again; %d were lost", self._num_lost)
            self._num_lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
