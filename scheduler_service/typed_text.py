"""Keeps control tokens that users typed plain text while a template is rendered around them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .errors import InvalidArgumentError

# Private-use characters, in which no tokenizer has markup.
MARKER_RANGES = ((0xF0000, 0xFFFFD), (0x100000, 0x10FFFD), (0xE000, 0xF8FF))


class TypedText:
    """Control tokens in one chat's strings, each replaced by a marker of one character.

    A marker is a private-use character that occurs nowhere in that chat, so templates pass it on
    like any letter, and what users type cannot be taken for one.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        """texts: all strings that reach the template, so that no marker occurs in them."""
        seen: set[str] = set()
        for text in texts:
            seen.update(text)
        self._free = (char for char in _private_characters() if char not in seen)
        self._markers: dict[str, str] = {}
        self._texts: dict[str, str] = {}

    def hide(self, text: str, controls: re.Pattern[str]) -> str:
        """The text with a marker for each match of controls."""
        return controls.sub(self._marker, text)

    def pieces(self, rendered: str) -> list[tuple[str, bool]]:
        """Rendered text cut at the markers: (text, typed). Joined, it is what users see."""
        if not self._texts:
            return [(rendered, False)]
        parts = re.split("([" + "".join(self._texts) + "])", rendered)
        # Markers stand at the odd places.
        return [
            (self._texts[part], True) if place % 2 else (part, False)
            for place, part in enumerate(parts)
            if part
        ]

    def _marker(self, match: re.Match[str]) -> str:
        text = match[0]
        if text not in self._markers:
            marker = next(self._free, None)
            if marker is None:
                raise InvalidArgumentError(
                    "chat.messages", "uses every private-use character of Unicode; leave some out"
                )
            self._markers[text] = marker
            self._texts[marker] = text
        return self._markers[text]


def control_pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of the texts, the longest first; None when there are none."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _private_characters() -> Iterator[str]:
    for first, last in MARKER_RANGES:
        yield from map(chr, range(first, last + 1))
