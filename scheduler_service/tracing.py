"""Spans of requests, sent to an OpenTelemetry collector. Imported only where one is named."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .engine_types import EngineState
from .errors import SlotwiseError
from .request import Event, FinishedEvent, FinishReason, Request
from .step import PrefillChunk, Row, StepCommand, StepResult
from .trace import Trace, TraceStart

# A collector that hangs holds the end of the process up for no longer.
_STOP_S = 1.0
_EXPORT_S = 5.0
# Of a request's steps: so many from its beginning have a span, and then each so-manieth.
_MAX_FIRST_STEPS = 4
_EACH_STEP = 64
# Refusals that are no fault of the caller's.
_OWN_REFUSALS = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL")
# What is refused may be an id without bounds.
_MAX_ID_LEN = 256
_FAILURES = (FinishReason.DEADLINE, FinishReason.ERROR)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A command under way. `rows`: those of the calls that are traced, by their indices."""

    at_ns: int
    kind: str
    num_rows: int
    num_steps: int
    num_prefill_tokens: int
    rows: dict[CallTrace, list[int]]


class _Step(NamedTuple):
    """A command that served a call, as its span will have it."""

    begin_ns: int
    end_ns: int
    attributes: dict[str, str | int]


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
        # By request id, those that are sampled and run.
        self._active: dict[str, CallTrace] = {}
        self._under_way: dict[tuple[int, int], _Sent] = {}

    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> TraceStart:
        """For a call that came with this metadata. A malformed traceparent counts as none."""
        context = self._context(metadata)

        def start(requests: Sequence[Request]) -> Trace | None:
            span = self._tracer.start_span(
                "slotwise.generate",
                context,
                kind=SpanKind.SERVER,
                start_time=self.unix_ns(requests[0].arrival_ns),
            )
            return CallTrace(self, span, requests) if span.is_recording() else None

        return start

    @contextlib.contextmanager
    def attached(
        self, metadata: Iterable[tuple[str, str | bytes]], call_id: str, trace: Trace | None
    ) -> Iterator[None]:
        """While an Attach reads a call: a span in the reader's trace, linked to the call's."""
        links = [Link(trace.span.get_span_context())] if isinstance(trace, CallTrace) else []
        span = self._tracer.start_span(
            "slotwise.attach",
            self._context(metadata),
            kind=SpanKind.SERVER,
            links=links,
            attributes={"gen_ai.request.id": call_id},
            start_time=self.now_ns(),
        )
        try:
            yield
        except Exception as error:
            span.set_status(StatusCode.ERROR, str(error))
            raise
        finally:
            span.end(self.now_ns())

    @contextlib.contextmanager
    def refusals(self, metadata: Iterable[tuple[str, str | bytes]], call_id: str) -> Iterator[None]:
        """A span for the refusal that the block raises, if it does. It has no words of the error:
        they may quote the request."""
        begin_ns = self.now_ns()
        try:
            yield
        except SlotwiseError as error:
            span = self._tracer.start_span(
                "slotwise.generate",
                self._context(metadata),
                kind=SpanKind.SERVER,
                attributes={
                    "gen_ai.request.id": call_id[:_MAX_ID_LEN],
                    "slotwise.refusal": error.status,
                },
                start_time=begin_ns,
            )
            if error.status in _OWN_REFUSALS:
                span.set_status(StatusCode.ERROR, error.status)
            span.end(self.now_ns())
            raise

    def _context(self, metadata: Iterable[tuple[str, str | bytes]]) -> Context:
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        # Never the context of whatever runs here.
        return self._propagator.extract(carrier, Context())

    @property
    def is_wanted(self) -> bool:
        return bool(self._active)

    def sent(self, command: StepCommand, request_ids: Sequence[str], now_ns: int) -> None:
        rows: dict[CallTrace, list[int]] = {}
        for index, request_id in enumerate(request_ids):
            trace = self._active.get(request_id)
            if trace is not None:
                rows.setdefault(trace, []).append(index)
                trace.note_prefix(command.rows[index], now_ns)
        if not rows:
            return
        chunks = [row for row in command.rows if isinstance(row, PrefillChunk)]
        kind = "mixed" if 0 < len(chunks) < len(command.rows) else "prefill" if chunks else "decode"
        self._under_way[command.epoch, command.step_id] = _Sent(
            at_ns=now_ns,
            kind=kind,
            num_rows=len(command.rows),
            num_steps=command.num_steps,
            num_prefill_tokens=sum(len(chunk.token_ids) for chunk in chunks),
            rows=rows,
        )

    def done(self, result: StepResult, now_ns: int) -> None:
        sent = self._under_way.pop((result.epoch, result.step_id), None)
        # What breaks the protocol is found elsewhere.
        if sent is None or len(result.rows) != sent.num_rows:
            return
        for trace, indices in sent.rows.items():
            trace.add_step(sent, result, indices, now_ns)

    def on_state(self, state: EngineState) -> None:
        """Requests survive the loss of their workers; their spans tell of it."""
        names = {EngineState.RECOVERING: "workers_lost", EngineState.READY: "recovered"}
        if state not in names:
            return
        self._under_way.clear()
        for trace in set(self._active.values()):
            trace.span.add_event(names[state], timestamp=self.now_ns())

    def end(self, request_id: str) -> None:
        """Its steps are asked for no more."""
        self._active.pop(request_id, None)

    def close(self) -> None:
        """Sends what is left, if that takes no more than a second."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_STOP_S)

    def begin(self, trace: CallTrace, requests: Sequence[Request]) -> None:
        """What is known of a call when it is accepted."""
        self._active.update((request.request_id, trace) for request in requests)
        first = requests[0]
        trace.span.set_attributes(
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

    def add_steps(self, span: Span, steps: Sequence[_Step]) -> None:
        context = set_span_in_context(span)
        for step in steps:
            begin_ns, end_ns = self.unix_ns(step.begin_ns), self.unix_ns(step.end_ns)
            attributes = step.attributes
            child = self._tracer.start_span(
                "step", context, start_time=begin_ns, attributes=attributes
            )
            child.end(end_ns)

    def unix_ns(self, monotonic_ns: int) -> int:
        return monotonic_ns + self._offset_ns

    def now_ns(self) -> int:
        return self.unix_ns(time.monotonic_ns())


class CallTrace:
    """The span of one call, until all its answers have ended."""

    def __init__(self, tracer: Tracer, span: Span, requests: Sequence[Request]) -> None:
        self.span = span
        self._tracer = tracer
        self._requests = {request.request_id: request for request in requests}
        self._ends: dict[str, FinishedEvent] = {}
        self._end_ns = 0
        self._num_steps = 0
        self._steps: list[_Step] = []
        tracer.begin(self, requests)

    @property
    def ids(self) -> dict[str, str]:
        context = self.span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    def note_prefix(self, row: Row, now_ns: int) -> None:
        """A part of the prompt need not be computed, as the row says."""
        if isinstance(row, PrefillChunk) and row.prefix is not None:
            is_copied = row.prefix.source_slot != row.slot
            attributes = {"slotwise.num_tokens": row.prefix.length, "slotwise.copied": is_copied}
            self.span.add_event("prefix", attributes, timestamp=self._tracer.unix_ns(now_ns))

    def add_step(
        self, sent: _Sent, result: StepResult, indices: Sequence[int], now_ns: int
    ) -> None:
        """A command with rows of this call, at `indices`, is answered."""
        number = self._num_steps
        self._num_steps += 1
        if number >= _MAX_FIRST_STEPS and number % _EACH_STEP:
            return
        attributes: dict[str, str | int] = {
            "slotwise.step.id": result.step_id,
            "slotwise.step.epoch": result.epoch,
            "slotwise.step.kind": sent.kind,
            "slotwise.step.num_rows": sent.num_rows,
            "slotwise.step.num_steps": sent.num_steps,
            "slotwise.step.num_prefill_tokens": sent.num_prefill_tokens,
            "slotwise.step.worker_ns": result.duration_ns,
            "slotwise.step.own_tokens": sum(len(result.rows[index].token_ids) for index in indices),
        }
        self._steps.append(_Step(sent.at_ns, now_ns, attributes))

    def note(self, event: Event) -> None:
        """Must be told of every FinishedEvent of the call; others cost nothing."""
        if not isinstance(event, FinishedEvent) or event.request_id in self._ends:
            return
        self._ends[event.request_id] = event
        self._tracer.end(event.request_id)
        request = self._requests[event.request_id]
        self._end_ns = max(self._end_ns, self._tracer.add_phases(self.span, request, event))
        if event.time_to_first_token_ns:
            first_ns = self._tracer.unix_ns(request.arrival_ns) + event.time_to_first_token_ns
            attributes = {"slotwise.choice": request.choice_index}
            self.span.add_event("first_token", attributes, timestamp=first_ns)
        if event.reason in _FAILURES:
            self.span.set_status(StatusCode.ERROR, event.message or event.reason.value)
        if len(self._ends) == len(self._requests):
            self._finish()

    def _finish(self) -> None:
        ends = [self._ends[name] for name in self._requests]
        first = next(iter(self._requests.values()))
        e2e_ns = self._end_ns - self._tracer.unix_ns(first.arrival_ns)
        self.span.set_attributes(
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
                "slotwise.num_steps": self._num_steps,
                "slotwise.num_steps_left_out": self._num_steps - len(self._steps),
            }
        )
        self._tracer.add_steps(self.span, self._steps)
        # The call is kept for a while.
        self._steps = []
        self.span.end(self._end_ns)


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
