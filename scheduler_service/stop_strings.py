"""Stop strings in a stream of text: found across token borders, never leaked in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found. `before` is the text to release in front of it."""

    stop: str
    before: str


class StopMatcher:
    """Looks for stop strings; holds back text that may yet become one.

    Of several that are complete when a token's text arrives, the earliest start wins, then the
    longest. Work is linear in the text, whatever the stop strings (Knuth-Morris-Pratt).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        # Length of each stop string's longest prefix that ends the text seen so far.
        self._lengths = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """Text that is free to go, or the match. After a match nothing may be pushed."""
        buffer = self._held + text
        match = self._earliest(len(self._held), buffer)
        if match is not None:
            start, stop = match
            self._held = ""
            return StopMatch(stop, buffer[:start])
        free = len(buffer) - max(self._lengths, default=0)
        self._held = buffer[free:]
        return buffer[:free]

    def finish(self) -> str:
        """The text still held: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, begin: int, buffer: str) -> tuple[int, str] | None:
        """Start and stop string of the best match that ends in buffer[begin:]."""
        best: tuple[int, int, str] | None = None
        for index, (stop, failure) in enumerate(self._stops):
            length = self._lengths[index]
            for position in range(begin, len(buffer)):
                char = buffer[position]
                while length and (length == len(stop) or stop[length] != char):
                    length = failure[length - 1]
                length += stop[length] == char
                if length == len(stop):
                    found = (position + 1 - length, -length, stop)
                    best = found if best is None else min(best, found)
                    break
            self._lengths[index] = length
        return None if best is None else (best[0], best[2])


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper border."""
    table = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = table[length - 1]
        length += pattern[position] == pattern[length]
        table[position] = length
    return table
