"""What a chat model writes, told apart: text, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A part of call `index` of an answer, from 0; the first one has id and name.

    Joined by index, the pieces of arguments_json are its arguments as JSON text.
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


class OutputParser(Protocol):
    """Reads one answer. However its text is cut, the joined pieces are the same."""

    def push(self, text: str) -> OutputPiece:
        """More text; gives what is certain."""

    def finish(self) -> OutputPiece:
        """The text has ended."""
