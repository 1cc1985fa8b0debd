"""One request's tokens to what its caller sees: text, held-back parts, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .detokenizer import Detokenizer
from .stop_strings import StopMatch, StopMatcher


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a caller wants the text of its request."""

    stop: tuple[str, ...] = ()
    # Sampling one of these ends the request; its text is left out.
    end_token_ids: frozenset[int] = frozenset()
    # The matched stop string, or the text of the end id, belongs to the output.
    include_stop_in_output: bool = False
    omit_text: bool = False


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
            texts.append(self._push_one(token_id))
            if self.matched_stop is not None:
                break
        self.num_tokens += used
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
        freed = self._matcher.push(self._detokenizer.push(token_id))
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
