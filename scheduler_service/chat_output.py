"""What a chat model writes, told apart: text, reasoning and tool calls.

Two formats of the Qwen family. Both may open with reasoning in <think>...</think>; then comes text,
and calls in <tool_call>...</tool_call>: as JSON ("qwen3"), or as <function=...> ("qwen3_xml").

The line breaks next to this markup belong to it. What is no call as the format has it is text, to
the byte; of a call that breaks off, what was given stays, and the rest is text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from .generate_call import Tool
from .json_file import is_unicode
from .tokenizer import Tokenizer

THINK = "<think>"
END_THINK = "</think>"
CALL = "<tool_call>"
END_CALL = "</tool_call>"
FUNCTION = "<function="
END_FUNCTION = "</function>"
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"

T = TypeVar("T")
# A step of a parser: yields where it needs more text, returns what it found.
Reading = Generator[None, None, T]

_SPACES = re.compile(r"[ \t\r\n]*")
_BREAKS = re.compile(r"\n*")
# Characters of a JSON string that mean themselves.
_PLAIN = re.compile(r'[^"\\]*')
# Of JSON outside strings: numbers, true, false, null; and what stands between values.
_LITERAL = re.compile(r"[0-9A-Za-z.+-]*")
_BETWEEN = re.compile(r"[0-9A-Za-z.+\-,: \t\r\n]*")
_NAME = re.compile(r"[^<>\n]*")
_CLOSING = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A part of call `index` of an answer, from 0; the first one has id and name.

    Joined by index, the pieces of arguments_json are its arguments as JSON text. The id is
    "call_<index>": the same in every answer, so that equal requests get equal answers.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments_json: str = ""


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """What a piece of an answer's text turned out to be; any of it may be empty."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()

    def __add__(self, other: OutputPiece) -> OutputPiece:
        return OutputPiece(
            self.text + other.text,
            self.reasoning + other.reasoning,
            self.tool_calls + other.tool_calls,
        )


NOTHING = OutputPiece()


class OutputParser(Protocol):
    """Reads one answer. However its text is cut, the joined pieces are the same."""

    def push(self, text: str) -> OutputPiece:
        """More text; gives what is certain."""

    def finish(self) -> OutputPiece:
        """The text has ended."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """`name` as in GetModelInfoResponse.output_format: "qwen3" or "qwen3_xml"."""

    name: str
    has_reasoning: bool

    def parser(self, opens_reasoning: bool, tools: Sequence[Tool] = ()) -> OutputParser:
        """opens_reasoning: as of the Prompt. `tools`: those of the chat, for their types."""
        kind = _XmlParser if self.name == "qwen3_xml" else _JsonParser
        return kind(opens_reasoning, self.has_reasoning, tools)


def find_format(template_source: str, tokenizer: Tokenizer) -> OutputFormat | None:
    """The format that the chat template teaches, None when it is none of ours.

    None as well when the tokenizer leaves markup out of the text that it decodes.
    """
    if CALL not in template_source or {THINK, END_THINK, CALL, END_CALL} & tokenizer.special_texts:
        return None
    has_reasoning = END_THINK in template_source
    if FUNCTION in template_source and PARAMETER in template_source:
        return OutputFormat("qwen3_xml", has_reasoning)
    return OutputFormat("qwen3", has_reasoning) if "arguments" in template_source else None


class _BrokenCallError(Exception):
    """The text is not the call that it seemed to be, or has ended before the call has."""


class _Parser(ABC):
    """Runs along the text as a coroutine that waits where it needs more of it."""

    def __init__(self, opens_reasoning: bool, has_reasoning: bool, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in reversed(tools)}
        # Of their parameters, read when first called.
        self._schemas: dict[str, Any] = {}
        # What is not given yet, and how far it has been read.
        self._text = ""
        self._place = 0
        self._has_ended = False
        self._num_calls = 0
        # What is read of the arguments goes out, without waiting for the call's end.
        self._streams = False
        self._out = OutputPiece()
        self._run = self._answer(opens_reasoning, has_reasoning)
        next(self._run)

    def push(self, text: str) -> OutputPiece:
        self._text += text
        next(self._run)
        return self._taken()

    def finish(self) -> OutputPiece:
        self._has_ended = True
        next(self._run, None)
        return self._taken()

    @abstractmethod
    def _call(self) -> Reading[None]:
        """Reads and gives a call behind its <tool_call>; _BrokenCallError where it is none."""

    def _answer(self, opens_reasoning: bool, has_reasoning: bool) -> Reading[None]:
        if not opens_reasoning and has_reasoning:
            opens_reasoning = yield from self._opening()
        if opens_reasoning:
            yield from self._skip(_BREAKS)
            self._drop()
            if (yield from self._give_up_to(END_THINK, is_reasoning=True)):
                yield from self._drop_end(END_THINK)
        while (yield from self._give_up_to(CALL)):
            try:
                yield from self._skip(_BREAKS)
                yield from self._expect(CALL)
                yield from self._call()
                yield from self._drop_end(END_CALL)
            except _BrokenCallError:
                self._give_broken()

    def _opening(self) -> Reading[bool]:
        """True when the answer starts with <think>, which is then dropped."""
        yield from self._skip(_SPACES)
        try:
            yield from self._expect(THINK)
        except _BrokenCallError:
            self._place = 0
            return False
        self._drop()
        return True

    def _give_up_to(self, mark: str, is_reasoning: bool = False) -> Reading[bool]:
        """Gives what stands before the mark and its line breaks. False when the text has ended."""
        while (found := self._text.find(mark)) < 0 and not self._has_ended:
            self._give(_without_breaks(self._text, _held_from(self._text, mark)), is_reasoning)
            yield
        end = len(self._text) if found < 0 else _without_breaks(self._text, found)
        self._give(end, is_reasoning)
        return found >= 0

    def _drop_end(self, mark: str) -> Reading[None]:
        """Drops an end mark, any space before it, and line breaks behind it.

        The mark may be missing at the text's end, where it can have been a stop string.
        """
        yield from self._skip(_SPACES)
        if not self._has_ended or self._place < len(self._text):
            yield from self._expect(mark)
        yield from self._skip(_BREAKS)
        self._drop()

    def _give_broken(self) -> None:
        if self._streams:
            self._give_arguments()
            self._streams = False
        self._give(len(self._text) if self._has_ended else self._place)

    def _more(self) -> Reading[None]:
        """Waits for more text; _BrokenCallError when there is none."""
        if self._has_ended:
            raise _BrokenCallError
        if self._streams:
            self._give_arguments()
        yield

    def _peek(self) -> Reading[str]:
        """The next character."""
        while self._place == len(self._text):
            yield from self._more()
        return self._text[self._place]

    def _skip(self, pattern: re.Pattern[str]) -> Reading[None]:
        """Passes what the pattern, a repetition, matches. May stop at the text's end."""
        while True:
            match = pattern.match(self._text, self._place)
            assert match is not None
            self._place = match.end()
            if self._place < len(self._text) or self._has_ended:
                return
            yield from self._more()

    def _expect(self, *marks: str) -> Reading[str]:
        """Passes one of the marks, and returns it."""
        while True:
            for mark in marks:
                if self._text.startswith(mark, self._place):
                    self._place += len(mark)
                    return mark
            rest = self._text[self._place : self._place + len(max(marks, key=len))]
            if not any(mark.startswith(rest) for mark in marks):
                raise _BrokenCallError
            yield from self._more()

    def _give(self, end: int, is_reasoning: bool = False) -> None:
        given, self._text, self._place = self._text[:end], self._text[end:], 0
        self._out += OutputPiece(reasoning=given) if is_reasoning else OutputPiece(given)

    def _give_call(self, name: str, arguments: str) -> None:
        """The first piece of a call: for all that was read of it."""
        index = self._num_calls
        self._num_calls += 1
        self._give_piece(ToolCallPiece(index, f"call_{index}", name, arguments))

    def _give_arguments(self, arguments: str | None = None) -> None:
        """More of the last call's; unless given, as they stand in what was read."""
        written = self._read(0) if arguments is None else arguments
        if written:
            self._give_piece(ToolCallPiece(self._num_calls - 1, arguments_json=written))

    def _give_piece(self, piece: ToolCallPiece) -> None:
        self._out += OutputPiece(tool_calls=(piece,))
        self._drop()

    def _read(self, begin: int) -> str:
        return self._text[begin : self._place]

    def _drop(self) -> None:
        self._text, self._place = self._text[self._place :], 0

    def _taken(self) -> OutputPiece:
        out, self._out = self._out, OutputPiece()
        return out


class _JsonParser(_Parser):
    """{"name": ..., "arguments": {...}}, in any order, other keys passed over."""

    def _call(self) -> Reading[None]:
        name = arguments = None
        yield from self._skip(_SPACES)
        yield from self._expect("{")
        while True:
            key = yield from self._key()
            if key == "name" and name is None:
                name = yield from self._text_value()
                if arguments is not None:
                    self._give_call(name, arguments)
            elif key == "arguments" and arguments is None:
                arguments = yield from self._arguments(name)
            elif key in ("name", "arguments"):
                raise _BrokenCallError
            else:
                yield from self._value()
            yield from self._skip(_SPACES)
            if (yield from self._expect(",", "}")) == "}":
                break
        if name is None:
            raise _BrokenCallError
        if arguments is None:
            self._give_call(name, "{}")
        self._drop()

    def _key(self) -> Reading[str]:
        yield from self._skip(_SPACES)
        key = yield from self._text_value()
        yield from self._skip(_SPACES)
        yield from self._expect(":")
        yield from self._skip(_SPACES)
        return key

    def _arguments(self, name: str | None) -> Reading[str]:
        """Gives an object as it comes when the call's name is known; what is left of it else."""
        if (yield from self._peek()) != "{":
            raise _BrokenCallError
        if name is None:
            begin = self._place
            yield from self._value()
            return self._read(begin)
        self._give_call(name, "")
        self._streams = True
        yield from self._value()
        self._give_arguments()
        self._streams = False
        return ""

    def _value(self) -> Reading[None]:
        first = yield from self._peek()
        if first == '"':
            yield from self._string()
        elif first in _CLOSING:
            yield from self._nested()
        else:
            yield from self._pass_some(_LITERAL)

    def _nested(self) -> Reading[None]:
        """An object or array: brackets match, strings end; the rest is the reader's to judge."""
        closing: list[str] = []
        while True:
            char = yield from self._peek()
            if char == '"':
                yield from self._string()
            elif char in _CLOSING:
                closing.append(_CLOSING[char])
                self._place += 1
            elif char == closing[-1]:
                self._place += 1
                closing.pop()
                if not closing:
                    return
            else:
                yield from self._pass_some(_BETWEEN)

    def _pass_some(self, pattern: re.Pattern[str]) -> Reading[None]:
        char = yield from self._peek()
        if pattern.fullmatch(char) is None:
            raise _BrokenCallError
        yield from self._skip(pattern)

    def _text_value(self) -> Reading[str]:
        """A string, not empty, decoded."""
        begin = self._place
        yield from self._string()
        try:
            text = json.loads(self._read(begin))
        except ValueError:
            raise _BrokenCallError from None
        if not text or not is_unicode(text):
            raise _BrokenCallError
        return str(text)

    def _string(self) -> Reading[None]:
        yield from self._expect('"')
        while True:
            yield from self._skip(_PLAIN)
            if (yield from self._peek()) == '"':
                self._place += 1
                return
            # A backslash, and what it escapes.
            while self._place + 2 > len(self._text):
                yield from self._more()
            self._place += 2


class _XmlParser(_Parser):
    """<function=NAME>, then <parameter=KEY> VALUE </parameter> for each argument, </function>."""

    def _call(self) -> Reading[None]:
        yield from self._skip(_SPACES)
        yield from self._expect(FUNCTION)
        name = yield from self._tag_name()
        opening = "{"
        while True:
            yield from self._skip(_SPACES)
            if (yield from self._expect(PARAMETER, END_FUNCTION)) == END_FUNCTION:
                break
            key = yield from self._tag_name()
            value = yield from self._value_text()
            written = f"{opening}{_json(key)}: {self._value_json(name, key, value)}"
            if opening == "{":
                self._give_call(name, written)
            else:
                self._give_arguments(written)
            opening = ", "
        if opening == "{":
            self._give_call(name, "{}")
        else:
            self._give_arguments("}")

    def _tag_name(self) -> Reading[str]:
        """Up to the ">" of a tag, which is passed."""
        begin = self._place
        yield from self._skip(_NAME)
        name = self._read(begin).strip()
        yield from self._expect(">")
        if not name:
            raise _BrokenCallError
        return name

    def _value_text(self) -> Reading[str]:
        """Without the line break at either end, which is the format's."""
        begin = seen = self._place
        while (end := self._text.find(END_PARAMETER, seen)) < 0:
            seen = max(begin, len(self._text) - len(END_PARAMETER) + 1)
            yield from self._more()
        self._place = end + len(END_PARAMETER)
        return self._text[begin:end].removeprefix("\n").removesuffix("\n")

    def _value_json(self, function: str, key: str, value: str) -> str:
        if not self._is_string(function, key) and _is_json(value):
            return value.strip()
        return _json(value)

    def _is_string(self, function: str, key: str) -> bool:
        if function not in self._schemas:
            tool = self._tools.get(function)
            self._schemas[function] = json.loads(tool.parameters_json or "{}") if tool else {}
        schema = _at(self._schemas[function], "properties", key)
        return _types(schema) - {"null"} == {"string"}


def _at(schema: Any, *keys: str) -> Any:
    for key in keys:
        schema = schema.get(key) if isinstance(schema, dict) else None
    return schema


def _types(schema: Any) -> set[str]:
    """The types that a JSON Schema names, in its alternatives too; empty when it names none."""
    found = _at(schema, "type")
    types = {item for item in [found, *_items(found)] if isinstance(item, str)}
    for key in ("anyOf", "oneOf"):
        for alternative in _items(_at(schema, key)):
            types |= _types(alternative)
    return types


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        # Numbers of any length are passed on as they stand.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _held_from(text: str, mark: str) -> int:
    """Where the end of the text may be the start of the mark; the text's length if nowhere."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return len(text) - length
    return len(text)


def _without_breaks(text: str, end: int) -> int:
    """The end of text[:end] without its last line breaks."""
    return len(text[:end].rstrip("\n"))
