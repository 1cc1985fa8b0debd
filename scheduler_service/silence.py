"""Notices when a result is due and nothing is heard for too long. Idle is not silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class SilenceWatch:
    """Calls on_silence(seconds) once nothing was heard for timeout_s while something was due."""

    def __init__(self, timeout_s: float, on_silence: Callable[[float], None]) -> None:
        self._timeout_s = timeout_s
        self._on_silence = on_silence
        # When the last result came, or the first became due; None: nothing is due.
        self._since_ns: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def silence_ns(self) -> int:
        """0 when nothing is due."""
        return 0 if self._since_ns is None else time.monotonic_ns() - self._since_ns

    def expect(self) -> None:
        """Something is due from now on, if it was not before."""
        if self._since_ns is None:
            self._since_ns = time.monotonic_ns()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._check)

    def heard(self, more_is_due: bool) -> None:
        """Something came. The timer is left to run: it looks again when it fires."""
        self._since_ns = time.monotonic_ns() if more_is_due else None

    def stop(self) -> None:
        """Nothing is due any more."""
        self._since_ns = None
        self.suspend()

    def suspend(self) -> None:
        """Calls on_silence no more, until the next `expect`; the silence goes on counting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        if self._since_ns is None:
            return
        silence_s = self.silence_ns / 1e9
        if silence_s >= self._timeout_s:
            self._on_silence(silence_s)
            return
        left_s = max(0.001, self._timeout_s - silence_s)
        self._timer = asyncio.get_running_loop().call_later(left_s, self._check)
