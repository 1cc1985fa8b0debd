"""/metrics: the server's load at the time of the scrape, and the gateway's own counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slotwise_client import Load

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The gateway's own counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "slotwise_gateway:requests",
            "Responses by route and HTTP status; 499: the client left first.",
            ["route", "status"],
            registry=self._registry,
        )
        self._streams = Gauge(
            "slotwise_gateway:open_streams",
            "Streamed answers that are being written.",
            registry=self._registry,
        )
        self._is_up = Gauge(
            "slotwise_gateway:server_up",
            "1 when the gRPC server answered this scrape.",
            registry=self._registry,
        )

    def count(self, route: str, status: int) -> None:
        """A response has ended."""
        self._requests.labels(route, str(status)).inc()

    def add_streams(self, number: int) -> None:
        """So many more are open."""
        self._streams.inc(number)

    def text(self, load: Load | None) -> bytes:
        """`load` None: the server did not answer."""
        self._is_up.set(load is not None)
        own: bytes = generate_latest(self._registry)
        if load is None:
            return own
        registry = CollectorRegistry()
        registry.register(_Server(load))
        return generate_latest(registry) + own


class _Server(Collector):
    def __init__(self, load: Load) -> None:
        self._load = load

    def collect(self) -> Iterator[Metric]:
        load, cache, requests = self._load, self._load.prefix_cache, self._load.requests
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
        yield _counter(
            "prefix_cache_queries", "Prompt tokens looked for.", cache.num_queried_tokens
        )
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
