"""One request's tokens to what its caller sees: text, held-back parts, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .detokenizer import Detokenizer


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


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a caller wants the text of its request."""

    stop: tuple[str, ...] = ()
    # Sampling one of these ends the request; its text is left out.
    end_token_ids: frozenset[int] = frozenset()
    # The matched stop string, or the text of the end id, belongs to the output.
    include_stop_in_output: bool = False
    omit_text: bool = False
    # Stop strings are not looked for in the text of the first so many tokens.
    min_new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Tokens that count, and the text they set free."""

    token_ids: tuple[int, ...]
    text: str


class TextStream:
    """Fed with a request's tokens in order; `matched_stop` tells when a stop string ended it."""

    def __init__(self, detokenizer: Detokenizer, options: TextOptions) -> None:
        self._detokenizer = detokenizer
        self._options = options
        self._matcher = StopMatcher(options.stop)
        self._needs_text = bool(options.stop) or not options.omit_text
        # Generated tokens that count; with a stop string, up to the one that completed it.
        self.num_tokens = 0
        self.matched_stop: str | None = None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Tokens after the one that completed a stop string are dropped."""
        if self.matched_stop is not None:
            return TextDelta((), "")
        texts: list[str] = []
        used = 0
        for token_id in token_ids:
            used += 1
            self.num_tokens += 1
            texts.append(self._push_one(token_id))
            if self.matched_stop is not None:
                break
        return TextDelta(tuple(token_ids[:used]), self._shown("".join(texts)))

    def finish(self) -> str:
        """Text still held at the end of the request, whatever ended it; "" after a stop string."""
        if self.matched_stop is not None:
            return ""
        return self._shown(self._matcher.finish() + self._detokenizer.finish())

    def _push_one(self, token_id: int) -> str:
        if not self._needs_text:
            return ""
        if token_id in self._options.end_token_ids:
            return self._end_text(token_id)
        text = self._detokenizer.push(token_id)
        if self.num_tokens <= self._options.min_new_tokens:
            return text
        freed = self._matcher.push(text)
        if isinstance(freed, StopMatch):
            self.matched_stop = freed.stop
            return freed.before + (freed.stop if self._options.include_stop_in_output else "")
        return freed

    def _end_text(self, token_id: int) -> str:
        if not self._options.include_stop_in_output:
            return ""
        return self._matcher.finish() + self._detokenizer.push_kept(token_id)

    def _shown(self, text: str) -> str:
        return "" if self._options.omit_text else text
