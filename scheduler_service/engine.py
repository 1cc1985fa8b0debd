"""The async shell around the scheduler: workers, requests and time."""

from __future__ import annotations

from collections.abc import Callable

from .engine_types import (
    EngineConfig,
    EngineInfo,
    EngineState,
    Geometry,
    Load,
    LoadProgress,
    SelfTestReport,
    WorkerReport,
)
from .request import FinishReason, Request
from .request_stream import RequestStream
from .slots import SlotView

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineFailedError",
    "EngineInfo",
    "EngineState",
    "Geometry",
    "Load",
    "LoadProgress",
    "RequestStream",
    "SelfTestReport",
    "SlotView",
    "WorkerReport",
]


class EngineFailedError(Exception):
    """The engine cannot start: a fault that another try would not mend. The message says what."""


class Engine:
    """Owns the scheduler, the workers' streams and, when it spawns them, the worker processes.

    All methods run on the event loop that called `start`. The plain ones return at once.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_state: Callable[[EngineState], None],
        on_progress: Callable[[LoadProgress], None],
    ) -> None:
        """on_state is called on the loop at each change, on_progress while workers load; neither
        may block or raise. The first state, STARTING, is not reported."""
        raise NotImplementedError

    @property
    def state(self) -> EngineState:
        raise NotImplementedError

    @staticmethod
    def now_ns() -> int:
        """The clock of Request.arrival_ns and deadline_ns (monotonic)."""
        raise NotImplementedError

    async def start(self) -> None:
        """Spawns (if so configured), configures and warms up the workers; returns when READY.

        Keeps trying while workers cannot be reached. EngineFailedError: a fault that stays, with
        the worker's own words. Cancelling it (or calling `stop`) gives up cleanly.
        """
        raise NotImplementedError

    def info(self) -> EngineInfo:
        """UnavailableError before the first group is configured."""
        raise NotImplementedError

    def submit(self, request: Request) -> RequestStream:
        """Queues a validated request (prompt + max_new_tokens fits geometry.max_seq_len).

        DuplicateRequestError, QueueFullError, or UnavailableError (starting, draining, down).
        """
        raise NotImplementedError

    def cancel(
        self, request_id: str, reason: FinishReason = FinishReason.CANCELLED, message: str = ""
    ) -> None:
        """Ends a request in whatever phase; its stream gets the FinishedEvent at once.

        UnknownRequestError when none of that id waits or runs (it has ended already).
        """
        raise NotImplementedError

    def stop_request(self, request_id: str, num_tokens: int) -> bool:
        """A stop string was found: ends the request with STOP and num_tokens generated tokens.

        False when it had ended by itself: its FinishedEvent is in the stream. Else the stream's
        next FinishedEvent is this one; TokenEvents still in the stream before it are to be dropped.
        """
        raise NotImplementedError

    def load(self) -> Load:
        raise NotImplementedError

    def slots(self) -> list[SlotView]:
        """All slots in order of index; empty before the first group is configured."""
        raise NotImplementedError

    async def drain(self, grace_s: float) -> None:
        """State DRAINING: refuses new requests, waits until the accepted ones have ended, at most
        grace_s; ends the rest with ERROR / UNAVAILABLE."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Ends every request with ERROR / UNAVAILABLE, closes the streams, ends spawned workers.

        State STOPPED. May be called in any state, also during `start` and `drain`, and twice.
        """
        raise NotImplementedError
