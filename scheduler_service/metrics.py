"""What Prometheus scrapes: the server's state now and its counts since start, as text.

Nothing is recorded here: the scheduler counts (limits.py, latencies.py), and a scrape reads that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .engine_types import EngineInfo, EngineState, Load
from .errors import UnavailableError
from .latencies import Histogram, Latencies, Sizes
from .limits import Counters
from .record import JournalState
from .service import InferenceService

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "slotwise"

# By field of Latencies and Sizes: name of the metric, and what it is.
_LATENCIES = {
    "time_to_first_token": ("time_to_first_token_seconds", "From arrival to the first token."),
    "inter_token_latency": ("inter_token_latency_seconds", "Between successive tokens."),
    "time_per_output_token": (
        "request_time_per_output_token_seconds",
        "Of each request: its decode time over its tokens after the first.",
    ),
    "e2e_request_latency": ("e2e_request_latency_seconds", "From arrival to the end."),
    "request_queue_time": ("request_queue_time_seconds", "From arrival to a slot."),
    "request_prefill_time": ("request_prefill_time_seconds", "From a slot to the first token."),
    "request_decode_time": (
        "request_decode_time_seconds",
        "From the first token to the last.",
    ),
    "request_inference_time": (
        "request_inference_time_seconds",
        "From a slot to the last token.",
    ),
}
_SIZES = {
    "request_prompt_tokens": ("request_prompt_tokens", "Prompt tokens of a request."),
    "request_generation_tokens": ("request_generation_tokens", "Generated tokens of a request."),
    "iteration_tokens": ("iteration_tokens_total", "Tokens of a step, of prompts and generated."),
}


class Metrics:
    """Reads the service when it is asked. On the event loop's thread only."""

    def __init__(self) -> None:
        self._service: InferenceService | None = None

    def follow(self, service: InferenceService) -> None:
        """Before that there is the process to tell of, and that the server starts."""
        self._service = service

    def text(self) -> bytes:
        """In the text format of Prometheus. Whole in every state; before the workers have reported
        their geometry, without what depends on it."""
        registry = CollectorRegistry()
        registry.register(_Found(list(self._families())))
        ProcessCollector(namespace=PREFIX, registry=registry)
        text: bytes = generate_latest(registry)
        return text

    def _families(self) -> Iterator[Metric]:
        service = self._service
        yield from _state(EngineState.STARTING if service is None else service.engine.state)
        if service is None:
            return
        yield from _front(service)
        try:
            info, load = service.engine.info(), service.engine.load()
        except UnavailableError:
            return
        yield from _group(info, load)
        yield from _now(load)
        yield from _counts(load.counters)
        yield from _histograms(load.counters)


class _Found(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _state(state: EngineState) -> Iterator[Metric]:
    values = {one.value: one is state for one in EngineState if one is not EngineState.STOPPED}
    yield _labelled_gauge("server_state", "1 for the state that the server is in.", "state", values)


def _front(service: InferenceService) -> Iterator[Metric]:
    """Of the process, whatever the workers do."""
    info = InfoMetricFamily(f"{PREFIX}:build", "What is served, by what.")
    info.add_metric([], {"version": service.version, "model": service.model.info.name})
    yield info
    state = service.survival.journal_state
    yield _labelled_gauge(
        "journal_state",
        "1 for the state of the journal; failing: it cannot be written.",
        "state",
        {one.value: one is state for one in JournalState},
    )
    rejected = service.rejections
    yield _labelled_counter(
        "admission_rejections",
        "Requests refused, by reason.",
        "reason",
        {
            "invalid": rejected.invalid,
            "queue_full": rejected.full,
            "unavailable": rejected.unavailable,
        },
    )
    yield _gauge("num_requests_unread", "Requests whose client is away.", service.calls.num_unread)
    yield _counter("slow_readers", "Connections cut, unread.", service.num_slow_readers)
    yield _counter("resumed_requests", "Gone on from the journal.", service.num_resumed)


def _group(info: EngineInfo, load: Load) -> Iterator[Metric]:
    geometry = info.geometry
    config = InfoMetricFamily(f"{PREFIX}:cache_config", "The slot cache and what computes.")
    config.add_metric(
        [],
        {
            "num_slots": str(geometry.num_slots),
            "max_running": str(geometry.max_running),
            "max_seq_len": str(geometry.max_seq_len),
            "kv_dtype": geometry.kv_dtype,
            "weight_dtype": geometry.weight_dtype,
            "prefix_reuse": geometry.prefix_reuse.value,
            "device_name": geometry.device_name,
            "world_size": str(len(info.workers)),
        },
    )
    yield config
    yield _gauge("epoch", "Rises each time the workers are configured anew.", load.epoch)
    labels = ["rank", "device"]
    is_up = GaugeMetricFamily(f"{PREFIX}:rank_up", "0 from a rank's loss on.", labels=labels)
    memory = GaugeMetricFamily(f"{PREFIX}:rank_memory_bytes", "Taken by the rank.", labels=labels)
    device = GaugeMetricFamily(
        f"{PREFIX}:rank_device_memory_bytes", "All that its device has.", labels=labels
    )
    for one in load.ranks:
        values = [str(one.report.rank), one.report.device]
        is_up.add_metric(values, one.is_up)
        memory.add_metric(values, one.report.measured_memory_bytes)
        device.add_metric(values, one.report.device_memory_bytes)
    yield from (is_up, memory, device)
    yield _counter("recoveries", "Times that workers came back.", load.num_recoveries)


def _now(load: Load) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Requests in slots.", load.num_running)
    yield _gauge("num_requests_waiting", "Requests in the queue.", load.num_waiting)
    yield _gauge(
        "oldest_waiting_seconds",
        "Since the arrival of the request that has waited longest.",
        load.oldest_waiting_ns / 1e9,
    )
    yield _gauge("num_slots", "Seats with a KV cache.", load.num_slots)
    yield _gauge("max_num_requests_running", "Requests that may run.", load.max_running)
    usage = load.num_used_tokens / load.max_total_tokens if load.max_total_tokens else 0.0
    yield _gauge("kv_cache_usage_perc", "Share of positions in busy slots, 0 to 1.", usage)
    yield _gauge("prefix_cache_tokens", "Tokens in free slots.", load.num_cached_tokens)
    yield _gauge(
        "num_pending_prefill_tokens",
        "Prompt tokens accepted and not computed.",
        load.num_pending_prefill_tokens,
    )
    yield _gauge(
        "engine_silence_seconds",
        "Since the workers' last result, while one is due.",
        load.engine_silence_ns / 1e9,
    )


def _counts(counters: Counters) -> Iterator[Metric]:
    cache = counters.prefix_cache
    yield _counter("requests_accepted", "Requests accepted.", counters.accepted)
    yield _counter("prompt_tokens", "Prompt tokens.", counters.num_prompt_tokens)
    yield _counter(
        "prompt_tokens_cached",
        "Of them, of ended requests, not computed.",
        counters.num_cached_prompt_tokens,
    )
    yield _counter("generation_tokens", "Generated tokens.", counters.num_generated_tokens)
    yield _counter("engine_steps", "Steps of the workers.", counters.num_steps)
    yield _counter("prefill_step_seconds", "In steps with prompts.", counters.prefill_step_ns / 1e9)
    yield _counter("decode_step_seconds", "In other steps.", counters.decode_step_ns / 1e9)
    yield _counter("prefix_cache_queries", "Prompt tokens looked for.", cache.num_queried_tokens)
    yield _counter("prefix_cache_hits", "Prompt tokens found.", cache.num_hit_tokens)
    yield _counter("prefix_cache_copied_tokens", "Of them, copied.", cache.num_copied_tokens)
    yield _counter("prefix_cache_evictions", "Tokens lost.", cache.num_evicted_tokens)
    yield _labelled_counter(
        "request_success",
        "Requests that ended, by reason.",
        "finished_reason",
        {"stop": counters.stop, "length": counters.length, "abort": counters.cancelled},
    )
    yield _labelled_counter(
        "request_failure",
        "Requests that failed, by reason.",
        "reason",
        {"deadline": counters.deadline, "error": counters.error},
    )
    yield _counter("corrupted_requests", "Ended by logits that are no numbers.", counters.corrupted)
    yield _counter("poisoned_requests", "Given up: workers died of them.", counters.poisoned)


def _histograms(counters: Counters) -> Iterator[Metric]:
    for one in fields(Latencies):
        name, text = _LATENCIES[one.name]
        yield _histogram(name, text, getattr(counters.latencies, one.name), 1e9)
    for one in fields(Sizes):
        name, text = _SIZES[one.name]
        yield _histogram(name, text, getattr(counters.sizes, one.name), 1)


def _histogram(name: str, text: str, histogram: Histogram, unit: float) -> Metric:
    family = HistogramMetricFamily(f"{PREFIX}:{name}", text)
    number, buckets = 0, list[tuple[str, float]]()
    bounds = [f"{bound / unit:g}" for bound in histogram.upper_bounds]
    for bound, count in zip([*bounds, "+Inf"], histogram.counts, strict=True):
        number += count
        buckets.append((bound, number))
    family.add_metric([], buckets, histogram.sum / unit)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}:{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}:{name}", text, value)


def _labelled_gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}:{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _labelled_counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}:{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
