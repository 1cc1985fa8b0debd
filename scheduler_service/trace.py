"""What calls and steps tell whoever traces them; tracing.py does, where a collector is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .request import Event, Request
from .step import StepCommand, StepResult


class Trace(Protocol):
    """Of one call that is sampled."""

    @property
    def ids(self) -> dict[str, str]:
        """trace_id and span_id in hex, for log lines."""

    def note(self, event: Event) -> None:
        """Told of each event of the call, in order."""


# Told of a call's requests when it is accepted; None: it is not sampled.
TraceStart = Callable[[Sequence[Request]], Trace | None]


class StepWatch(Protocol):
    """Told of commands and their results, on the clock of requests."""

    @property
    def is_wanted(self) -> bool:
        """Somebody asks for the steps that are sent now."""

    def sent(self, command: StepCommand, request_ids: Sequence[str], now_ns: int) -> None:
        """request_ids: one for each row of the command."""

    def done(self, result: StepResult, now_ns: int) -> None:
        """Before the result is applied, and before it is known to be a good one."""
