"""A tool call that the model has to make: a schema for its output, and the call read from it.

The prompt opens the call, <tool_call>, and the output is the JSON object that follows it in the
format of Qwen: {"name": ..., "arguments": {...}}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from slotwise_client import Tool, ToolCallDelta

OPENING: Final = "<tool_call>\n"

_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*', re.DOTALL
)
# What may belong to the end of the object around the arguments.
_TAIL: Final = " \t\r\n}"


def calls_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """Of one call to one of the tools."""
    return {
        "anyOf": [_call_schema(f"tool_{index}", tool) for index, tool in enumerate(tools)],
        "$defs": {
            f"tool_{index}": _moved(tool.parameters or {"type": "object"}, f"#/$defs/tool_{index}")
            for index, tool in enumerate(tools)
        },
    }


def _call_schema(key: str, tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/{key}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema that stands at `root` of another one: what it refers to has moved too."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    target = moved.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = root + target[1:]
    return moved


class CallReader:
    """Reads one output as it comes; the joined pieces are the call's arguments."""

    def __init__(self, call_id: str) -> None:
        self._id = call_id
        self._has_head = False
        self._held = ""

    def push(self, text: str) -> tuple[ToolCallDelta, ...]:
        """More of the output; gives what is certain."""
        self._held += text
        first: tuple[ToolCallDelta, ...] = ()
        if not self._has_head:
            head = _HEAD.match(self._held)
            if head is None:
                return ()
            self._has_head = True
            self._held = self._held[head.end() :]
            first = (ToolCallDelta(0, self._id, json.loads(head[1]), ""),)
        given = self._held.rstrip(_TAIL)
        self._held = self._held[len(given) :]
        return (*first, ToolCallDelta(0, "", "", given)) if given else first

    def finish(self, is_whole: bool) -> tuple[ToolCallDelta, ...]:
        """The output has ended, as a whole object or somewhere in it."""
        if not self._has_head:
            return ()
        rest = self._held.rstrip()
        if is_whole:
            rest = rest.removesuffix("}").rstrip()
        self._held = ""
        return (ToolCallDelta(0, "", "", rest),) if rest else ()
