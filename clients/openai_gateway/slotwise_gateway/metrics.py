"""/metrics: the server's load at the time of the scrape, and the gateway's own counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slotwise_client import Load

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The gateway's own counts."""

    def __init__(self) -> None:
        self._responses: Counter[tuple[str, int]] = Counter()
        self._num_streams = 0

    def count(self, route: str, status: int) -> None:
        """A response has ended."""
        self._responses[route, status] += 1

    def add_streams(self, number: int) -> None:
        """So many more are open."""
        self._num_streams += number

    def text(self, load: Load | None) -> bytes:
        """`load` None: the server did not answer."""
        families = list(self._families(load is not None))
        if load is not None:
            families += server_families(load)
        registry = CollectorRegistry()
        registry.register(_Found(families))
        text: bytes = generate_latest(registry)
        return text

    def _families(self, is_up: bool) -> Iterator[Metric]:
        responses = CounterMetricFamily(
            "slotwise_gateway:requests",
            "Responses by route and HTTP status; 499: the client left first.",
            labels=["route", "status"],
        )
        for (route, status), number in sorted(self._responses.items()):
            responses.add_metric([route, str(status)], number)
        yield responses
        yield GaugeMetricFamily(
            "slotwise_gateway:open_streams", "Streamed answers being written.", self._num_streams
        )
        yield GaugeMetricFamily(
            "slotwise_gateway:server_up", "1 when the gRPC server answered this scrape.", is_up
        )


class _Found(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def server_families(load: Load) -> Iterator[Metric]:
    """What the server tells of itself."""
    cache, requests = load.prefix_cache, load.requests
    yield _gauge("num_requests_running", "Requests in slots.", load.num_running)
    yield _gauge("num_requests_waiting", "Requests in the queue.", load.num_waiting)
    yield _gauge("num_requests_unread", "Requests whose client is away.", load.num_unread)
    yield _gauge("num_slots", "Seats with a KV cache.", load.num_slots)
    yield _gauge("max_num_requests_running", "Requests that may run.", load.max_running)
    usage = load.num_used_tokens / load.max_total_tokens if load.max_total_tokens else 0.0
    yield _gauge("kv_cache_usage_perc", "Share of positions in busy slots, 0 to 1.", usage)
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
    yield _counter("prompt_tokens", "Prompt tokens.", load.num_prompt_tokens)
    yield _counter("generation_tokens", "Generated tokens.", load.num_generated_tokens)
    yield _counter("engine_steps", "Steps of the workers.", load.num_steps)
    yield _counter("prefill_step_seconds", "In steps with prompts.", load.prefill_step_ns / 1e9)
    yield _counter("decode_step_seconds", "In other steps.", load.decode_step_ns / 1e9)
    yield _counter("prefix_cache_queries", "Prompt tokens looked for.", cache.num_queried_tokens)
    yield _counter("prefix_cache_hits", "Prompt tokens found.", cache.num_hit_tokens)
    yield _counter("prefix_cache_evictions", "Tokens lost.", cache.num_evicted_tokens)
    yield _gauge("prefix_cache_tokens", "Tokens in free slots.", cache.num_cached_tokens)
    yield _counter("requests_accepted", "Requests accepted.", requests.accepted)
    yield _labelled(
        "request_success",
        "Requests that ended, by reason.",
        "finished_reason",
        {"stop": requests.stop, "length": requests.length, "abort": requests.cancelled},
    )
    yield _labelled(
        "request_failure",
        "Requests that failed, by reason.",
        "reason",
        {"deadline": requests.deadline, "error": requests.error},
    )
    yield _labelled(
        "admission_rejections",
        "Requests refused, by reason.",
        "reason",
        {
            "invalid": requests.rejected_invalid,
            "queue_full": requests.rejected_full,
            "unavailable": requests.rejected_unavailable,
        },
    )
    yield _counter("corrupted_requests", "Given up: workers died.", requests.poisoned)
    yield _counter("slow_readers", "Connections cut, unread.", requests.slow_reader)
    yield _counter("recoveries", "Times that workers came back.", load.num_recoveries)
    yield _counter("resumed_requests", "Gone on from the journal.", load.num_resumed)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"slotwise:{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"slotwise:{name}", text, value)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"slotwise:{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
