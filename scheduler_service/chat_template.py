"""The checkpoint's chat template, in a sandbox, with what users typed kept plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import InvalidArgumentError
from .json_file import ModelFilesError

# A template may quote a message in its error; the status line has room for little.
MAX_REASON = 400


class ChatTemplate:
    """Messages to prompt text. Rendering is pure but for the date, and may run in any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens are variables of the template (bos_token, eos_token, ...).

        ModelFilesError when the source is not a template.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelFilesError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """InvalidArgumentError, with the template's own words, when it refuses the messages."""
        known = self._special_tokens | {"tools": None, "documents": None}
        try:
            return self._template.render(
                known
                | dict(variables)
                | {"messages": messages, "add_generation_prompt": add_generation_prompt}
            )
        except Exception as error:  # a template can fail in any way, always by its input
            reason = str(error) or type(error).__name__
            raise InvalidArgumentError(
                "chat.messages", f"the chat template refuses them: {reason[:MAX_REASON]}"
            ) from error


class _GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %} marks a part for training: transparent."""

    tags = {"generation"}  # noqa: RUF012  declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own: no HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


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
