"""How long a request sits in a slot, as a guess at when to retry."""

from __future__ import annotations

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0
_FIRST_GUESS_NS = 1_000_000_000


class ServiceTime:
    """A moving mean of the time between admission and end."""

    def __init__(self) -> None:
        self._mean_ns = _FIRST_GUESS_NS

    def observe(self, duration_ns: int) -> None:
        self._mean_ns = (7 * self._mean_ns + duration_ns) // 8

    def retry_after_s(self, num_slots: int) -> float:
        """The mean time until one of num_slots busy slots is free, within 0.1 to 60 seconds."""
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, self._mean_ns / num_slots / 1e9))
