"""What all requests share: the server, the runs in progress, whether new ones are taken."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from .body import Room
from .config import Config, ConfigError
from .errors import ApiError, unavailable
from .metrics import Metrics
from .run import Run
from .upstream import Upstream

if TYPE_CHECKING:
    # OpenTelemetry is optional.
    from .tracing import Tracer

log = logging.getLogger(__name__)


class Gateway:
    """One process's state."""

    def __init__(self, config: Config) -> None:
        """ConfigError where what traces need is not installed."""
        self.config = config
        self.tracer = _tracer(config)
        self.metrics = Metrics()
        self.room = Room(config.limits.max_bodies_bytes)
        self._upstream: Upstream | None = None
        self._runs: set[Run] = set()
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.is_draining = False

    @property
    def upstream(self) -> Upstream:
        """There while the application runs."""
        assert self._upstream is not None
        return self._upstream

    async def open(self) -> None:
        """ValueError for TLS files that cannot be used."""
        self._upstream = Upstream(self.config, self._end_waiting)

    async def close(self) -> None:
        """Ends what still runs."""
        self.end_runs()
        await self.upstream.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    async def check_ready(self) -> None:
        """ApiError unless a new request is served now."""
        if self.is_draining:
            raise draining()
        await self.upstream.check_ready()

    def enter(self) -> None:
        """A request has come."""
        self._num_open += 1
        self._is_idle.clear()

    def leave(self) -> None:
        """Its response has ended."""
        self._num_open -= 1
        if not self._num_open:
            self._is_idle.set()

    def add(self, run: Run) -> None:
        """It is to be ended when the process ends."""
        self._runs.add(run)

    def drop(self, run: Run) -> None:
        """It has ended."""
        self._runs.discard(run)

    def drain(self) -> None:
        """No new requests from here on."""
        self.is_draining = True

    async def wait_idle(self) -> None:
        """Until no request is open."""
        await self._is_idle.wait()

    def _end_waiting(self, error: ApiError) -> None:
        """What the server has not taken would be tried for long, and may go elsewhere at once."""
        for run in list(self._runs):
            if not run.is_accepted:
                run.end(error)

    def end_runs(self) -> None:
        """What runs is told that there is no time left."""
        if self._runs:
            log.warning("%d requests did not end in time", len(self._runs))
        for run in list(self._runs):
            run.end(unavailable("the gateway shuts down; the answer is not whole"))


def _tracer(config: Config) -> Tracer | None:
    """None where no collector is named."""
    if not config.otlp_endpoint:
        return None
    try:
        from .tracing import Tracer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-endpoint needs {error.name}, which is not installed: "
            "pip install 'slotwise[trace]'"
        ) from error
    return Tracer(config.otlp_endpoint, config.trace_sample_ratio)


def draining() -> ApiError:
    """To requests that come too late."""
    return unavailable("the gateway shuts down; send the request elsewhere")
