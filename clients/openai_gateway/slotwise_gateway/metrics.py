"""/metrics: the gateway's own counts, and behind them what the server tells of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The gateway's own counts."""

    def __init__(self) -> None:
        self._responses: Counter[tuple[str, int]] = Counter()
        self._num_streams = 0

    def count(self, route: str, status: int) -> None:
        """A response has ended."""
        self._responses[route, status] += 1

    def count_refusal(self, status: int) -> None:
        """Of a connection: what came was no request, or there was no room for one."""
        self._responses["connection", status] += 1

    def add_streams(self, number: int) -> None:
        """So many more are open."""
        self._num_streams += number

    def text(self, server: bytes | None) -> bytes:
        """`server`: its metrics as text; None: it did not answer."""
        registry = CollectorRegistry()
        registry.register(_Found(list(self._families(server is not None))))
        own: bytes = generate_latest(registry)
        return own + (server or b"")

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
