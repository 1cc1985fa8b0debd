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

from .errors import InvalidArgumentError
from .json_file import ModelFilesError
from .template_sandbox import Budget, Sandbox, TemplateLimitError, TemplateTimeoutError

# Of its thread's time, for one rendering.
MAX_NS = 1_000_000_000
# Bytes that one may make, and more for each character of its chat: steps copy what they join.
BASE_BYTES = 1 << 25
BYTES_PER_CHAR = 32
MAX_DATE_FORM = 256
MAX_INDENT = 16
# What tojson escapes when asked to: not the markers of typed text, which must come through.
_NOT_ASCII = re.compile("[^\\x00-\\x7f\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]+")

# A template may quote a message in its error; the status line has room for little.
MAX_REASON = 400


class TemplateTimeError(InvalidArgumentError):
    """A rendering went beyond its time; with more it might end."""


class ChatTemplate:
    """Messages to prompt text. Rendering is pure but for the date, and may run in any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens are variables of the template (bos_token, eos_token, ...).

        ModelFilesError when the source is not a template.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._sandbox = _sandbox()
        try:
            self._code = self._sandbox.compile_bounded(source)
            self.knows_no_content = _asks_for_no_content(self._sandbox.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelFilesError(f"the chat template does not compile: {error}") from error

    def mentions(self, name: str) -> bool:
        """Whether the name occurs in the source; a variable that does not has no effect."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        max_ns: int = MAX_NS,
    ) -> str:
        """InvalidArgumentError, with the template's own words, when it refuses the messages.

        That holds too when it works or writes without end; TemplateTimeError when it went beyond
        max_ns of its thread's time.
        """
        known = self._special_tokens | {"tools": None, "documents": None}
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        size = count_chars(messages) + count_chars(variables)
        budget = Budget(BASE_BYTES + BYTES_PER_CHAR * size, max_ns)
        try:
            return self._sandbox.run(self._code, budget, known | dict(variables) | own)
        except TemplateLimitError as error:
            in_time = not isinstance(error, TemplateTimeoutError)
            kind = InvalidArgumentError if in_time else TemplateTimeError
            raise kind("chat", f"the chat template works on it without end: {error}") from None
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


def _sandbox() -> Sandbox:
    sandbox = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    sandbox.add_filter("tojson", _to_json)
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    return sandbox


def _asks_for_no_content(template: nodes.Template) -> bool:
    """Whether the template tests if a message's content is none."""
    for test in template.find_all(nodes.Test):
        match test:
            case nodes.Test(name="none", node=nodes.Getattr(attr="content")):
                return True
            case nodes.Test(name="none", node=nodes.Getitem(arg=nodes.Const(value="content"))):
                return True
    return False


def count_chars(value: Any) -> int:
    """Of all strings in a JSON value, keys too; what else there is counts as one."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(count_chars(key) + count_chars(item) for key, item in value.items())
    return sum(map(count_chars, value)) if isinstance(value, list | tuple) else 1


@jinja2.pass_environment
def _to_json(
    environment: Sandbox,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own: no HTML escapes."""
    depth = environment.budget.depth(value)
    for what in (indent, *(separators or ())):
        if (len(what) if isinstance(what, str) else what or 0) > MAX_INDENT:
            raise jinja2.TemplateRuntimeError(f"indents and separators are at most {MAX_INDENT}")
    if indent is not None:
        environment.budget.take(environment.budget.weigh(value) * MAX_INDENT * depth)
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > MAX_DATE_FORM:
        raise jinja2.TemplateError(f"a date's form has at most {MAX_DATE_FORM} characters")
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
