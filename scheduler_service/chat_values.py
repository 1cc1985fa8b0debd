"""A chat as chat templates expect it: plain values in the shapes that transformers gives them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from .errors import InvalidArgumentError
from .generate_call import ChatInput, ChatMessage, Tool, ToolCall

MAX_TOOLS = 1024
MAX_NAME = 256
# Of one JSON text, and of all in a chat: parsed, one takes some thirty times its size.
MAX_JSON_CHARS = 1 << 20
MAX_JSON_TOTAL = 1 << 22
MAX_JSON_DEPTH = 100
KWARGS = "chat.template_kwargs_json"
SERVER_VARIABLES = ("messages", "add_generation_prompt")


@dataclass(frozen=True, slots=True)
class ChatValues:
    """What a template is given: messages, and the variables of the caller, tools among them."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]


def check_chat(chat: ChatInput) -> None:
    """InvalidArgumentError for what can be told without reading the JSON texts."""
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidArgumentError(
            "chat.tools", f"{len(chat.tools)} tools; at most {MAX_TOOLS} are accepted"
        )
    for place, tool in enumerate(chat.tools):
        _check_name(tool.name, f"chat.tools[{place}].name")
    for field, call in _calls(chat):
        _check_name(call.name, f"{field}.name")
    total = 0
    for field, text in _json_texts(chat):
        total += len(text)
        if len(text) > MAX_JSON_CHARS:
            raise InvalidArgumentError(
                field, f"{len(text)} characters; at most {MAX_JSON_CHARS} are accepted"
            )
    if total > MAX_JSON_TOTAL:
        raise InvalidArgumentError(
            "chat", f"holds {total} characters of JSON; at most {MAX_JSON_TOTAL} are accepted"
        )


def num_json_chars(chat: ChatInput) -> int:
    return sum(len(text) for _, text in _json_texts(chat))


def chat_values(
    chat: ChatInput, knows_no_content: bool, mentions: Callable[[str], bool]
) -> ChatValues:
    """Reads the JSON texts of a checked chat; InvalidArgumentError for the first that is wrong.

    What is unset or empty is absent. Only content is always there: templates add to it without a
    look. knows_no_content: the template asks if content is none, which is then so where an
    assistant's message has calls alone. mentions: whether a name occurs in the template; a variable
    that does not would be ignored.
    """
    variables = _object(chat.template_kwargs_json, KWARGS)
    for name in SERVER_VARIABLES:
        if name in variables:
            raise InvalidArgumentError(KWARGS, f"{name} is set by the server; leave it out")
    for name in variables:
        if not mentions(name):
            raise InvalidArgumentError(
                KWARGS, f"{name[:100]!r} is no variable of this model's template; leave it out"
            )
    if chat.tools and not mentions("tools"):
        raise InvalidArgumentError(
            "chat.tools", "this model's chat template takes no tools; leave them out"
        )
    if chat.tools:
        if "tools" in variables:
            raise InvalidArgumentError(KWARGS, "sets tools, and so does chat.tools; leave one out")
        tools = [_tool(tool, f"chat.tools[{i}]") for i, tool in enumerate(chat.tools)]
        variables["tools"] = tools
    messages = [
        _message(message, f"chat.messages[{i}]", knows_no_content)
        for i, message in enumerate(chat.messages)
    ]
    return ChatValues(messages, variables)


def _message(message: ChatMessage, field: str, knows_no_content: bool) -> dict[str, Any]:
    calls_only = message.role == "assistant" and message.content is None and message.tool_calls
    no_content = None if knows_no_content and calls_only else ""
    values = {
        "role": message.role,
        "content": no_content if message.content is None else message.content,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "tool_calls": [
            _tool_call(call, f"{field}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ],
    }
    optional = ("tool_call_id", "name", "reasoning_content", "tool_calls")
    return {key: value for key, value in values.items() if value or key not in optional}


def _tool_call(call: ToolCall, field: str) -> dict[str, Any]:
    arguments = _object(call.arguments_json, f"{field}.arguments_json")
    values = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **values} if call.id else values


def _tool(tool: Tool, field: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        function["parameters"] = _object(tool.parameters_json, f"{field}.parameters_json")
    return {"type": "function", "function": function}


def _check_name(name: str, field: str) -> None:
    if not 1 <= len(name) <= MAX_NAME:
        raise InvalidArgumentError(
            field, f"has {len(name)} characters; 1 to {MAX_NAME} are accepted"
        )


def _calls(chat: ChatInput) -> Iterator[tuple[str, ToolCall]]:
    for place, message in enumerate(chat.messages):
        for index, call in enumerate(message.tool_calls):
            yield f"chat.messages[{place}].tool_calls[{index}]", call


def _json_texts(chat: ChatInput) -> Iterator[tuple[str, str]]:
    """(field, text) of each."""
    yield KWARGS, chat.template_kwargs_json
    for place, tool in enumerate(chat.tools):
        yield f"chat.tools[{place}].parameters_json", tool.parameters_json
    for field, call in _calls(chat):
        yield f"{field}.arguments_json", call.arguments_json


def _object(text: str, field: str) -> dict[str, Any]:
    """The object in a JSON text, {} of an empty one; InvalidArgumentError when it is none."""
    if not text:
        return {}
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        # Escapes can spell half of a surrogate pair, which is no text.
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidArgumentError(
            field, f"is nested too deep; at most {MAX_JSON_DEPTH} levels are accepted"
        ) from None
    except ValueError as error:
        raise InvalidArgumentError(field, f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError(field, f"holds a {type(value).__name__}; an object is needed")
    depth = _depth(value)
    if depth > MAX_JSON_DEPTH:
        raise InvalidArgumentError(
            field, f"is nested {depth} deep; at most {MAX_JSON_DEPTH} levels are accepted"
        )
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _depth(value: Any) -> int:
    """Levels of objects and arrays."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [
            part for item in level for part in (item.values() if isinstance(item, dict) else item)
        ]
    return depth
