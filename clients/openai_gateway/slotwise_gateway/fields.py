"""Every field of a request, in one table: what is done with it, and how its value is checked.

Used to read bodies, and to write docs/gateway.md. What stands in no row is refused by its name.
`null` is as if the field were left out.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from .body import kind_of
from .errors import ApiError, invalid

# Of a value in an error.
SHOWN_CHARS: Final = 60

# Takes where the value stands, as the OpenAI API names it, and the value; ApiError.
Check = Callable[[str, Any], Any]


class Route(Enum):
    """Which body: that of /v1/chat/completions or that of /v1/completions."""

    CHAT = "chat"
    COMPLETIONS = "completions"


BOTH: Final = frozenset(Route)
CHAT: Final = frozenset({Route.CHAT})
COMPLETIONS: Final = frozenset({Route.COMPLETIONS})


class Use(Enum):
    """What becomes of a field."""

    HONOURED = "honoured"
    # With the value that changes nothing it is accepted, with another one refused.
    NEUTRAL = "neutral"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """A row. `path`: from the body on, "messages[].content" say."""

    path: str
    routes: frozenset[Route]
    use: Use
    check: Check
    # For readers: what is accepted; why something is refused.
    note: str
    is_required: bool = False
    # Not of the OpenAI API; named as vLLM names it unless the note says more.
    is_extension: bool = False


def read_object(route: Route, path: str, where: str, value: Any) -> dict[str, Any]:
    """What is honoured of a JSON object, without nulls; `path` "" is the body. ApiError."""
    if not isinstance(value, dict):
        raise invalid(where, f"is {kind_of(value)}; an object is needed")
    rows = ROWS[route, path]
    found: dict[str, Any] = {}
    for name, item in value.items():
        row = rows.get(name)
        if row is None:
            raise _unknown(route, where, name, rows)
        if item is not None:
            checked = row.check(_join(where, name), item)
            if row.use is Use.HONOURED:
                found[name] = checked
    for name, row in rows.items():
        if row.is_required and name not in found:
            raise invalid(_join(where, name), "is missing")
    return found


def _unknown(route: Route, where: str, name: str, rows: Mapping[str, Field]) -> ApiError:
    name = name[:200]
    others = {key for (other, _), rows in ROWS.items() if other is not route for key in rows}
    close = difflib.get_close_matches(name, rows, 1)
    if close:
        advice = f"; is {close[0]!r} meant?"
    elif not where and name in others:
        advice = f" of /v1/{'chat/completions' if route is Route.CHAT else 'completions'}"
    else:
        advice = ""
    return invalid(_join(where, name), f"is no known field{advice}", code="unknown_parameter")


def _join(where: str, name: str | int) -> str:
    return f"{where}.{name}" if where else str(name)


# Checks


def boolean(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, value, "true or false")
    return value


def integer(least: int, most: int) -> Check:
    def check(where: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(where, value, "an integer")
        if not least <= value <= most:
            raise invalid(where, f"{_shown(value)} is out of range; {least} to {most} is accepted")
        return value

    return check


def number(least: float, most: float) -> Check:
    def check(where: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _wrong(where, value, "a number")
        if not least <= value <= most:
            raise invalid(
                where, f"{_shown(value)} is out of range; {least:g} to {most:g} is accepted"
            )
        return float(value)

    return check


def text(least: int = 0, most: int | None = None) -> Check:
    def check(where: str, value: Any) -> str:
        if not isinstance(value, str):
            raise _wrong(where, value, "a string")
        if len(value) < least:
            raise invalid(where, "is empty")
        if most is not None and len(value) > most:
            raise invalid(where, f"has {len(value)} characters; at most {most} are accepted")
        return value

    return check


def one_of(*values: str) -> Check:
    def check(where: str, value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise _wrong(where, value, " or ".join(map(repr, values)))
        return value

    return check


def only(*values: Any, reason: str) -> Check:
    """Values that change nothing."""

    def check(where: str, value: Any) -> None:
        if not any(type(value) is type(each) and value == each for each in values):
            accepted = " or ".join(json.dumps(each) for each in values)
            raise invalid(
                where,
                f"{_shown(value)} is not supported: {reason}; leave it out, or {accepted}",
                code="unsupported_value",
            )

    return check


def refused(reason: str) -> Check:
    def check(where: str, value: Any) -> None:
        raise invalid(where, f"is not supported: {reason}", code="unsupported_parameter")

    return check


def json_object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    return value


def object_of(route: Route, path: str) -> Check:
    """An object whose fields have rows of their own."""

    def check(where: str, value: Any) -> dict[str, Any]:
        return read_object(route, path, where, value)

    return check


def list_of(check_one: Check, most: int, least: int = 0) -> Check:
    def check(where: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise _wrong(where, value, "an array")
        if len(value) > most:
            raise invalid(where, f"has {len(value)} entries; at most {most} are accepted")
        if len(value) < least:
            raise invalid(where, "is empty; one entry at least is needed")
        return [check_one(f"{where}.{index}", item) for index, item in enumerate(value)]

    return check


def stop(where: str, value: Any) -> list[str]:
    """One string, or several; null and [] are none."""
    if isinstance(value, str):
        value = [value]
    checked: list[str] = list_of(text(1), MAX_STOPS)(where, value)
    return checked


def logit_bias(where: str, value: Any) -> dict[int, float]:
    biases = json_object(where, value)
    check_bias = number(-100, 100)
    found = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid(
                f"{where}.{key[:SHOWN_CHARS]}", "is no token id; a key such as '50256' is needed"
            )
        found[int(key)] = check_bias(f"{where}.{key}", bias)
    if len(found) < len(biases):
        raise invalid(where, "has one token id twice, written in two ways")
    return found


def content(where: str, value: Any) -> str:
    """Of a message: a string, or text parts, which are joined as they stand."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(where, value, "a string, or an array of text parts")
    if not value:
        raise invalid(where, "is empty; a string or one text part at least is needed")
    return "".join(_part(f"{where}.{index}", part) for index, part in enumerate(value))


def _part(where: str, value: Any) -> str:
    kind = json_object(where, value).get("type")
    if isinstance(kind, str) and kind != "text":
        raise invalid(
            f"{where}.type",
            f"{_shown(kind)} is not supported: the model reads text alone",
            code="unsupported_value",
        )
    part: str = read_object(Route.CHAT, "messages[].content[]", where, value)["text"]
    return part


def tool_choice(where: str, value: Any) -> str | dict[str, Any]:
    """ "none", "auto", "required", or the object that names a function."""
    if isinstance(value, str):
        return str(one_of("none", "auto", "required")(where, value))
    kind = json_object(where, value).get("type")
    if isinstance(kind, str) and kind != "function":
        raise invalid(
            f"{where}.type",
            f"{_shown(kind)} is not supported; 'function' is",
            code="unsupported_value",
        )
    return read_object(Route.CHAT, "tool_choice", where, value)


def tool(where: str, value: Any) -> dict[str, Any]:
    kind = json_object(where, value).get("type")
    if isinstance(kind, str) and kind != "function":
        raise invalid(
            f"{where}.type",
            f"{_shown(kind)} is not supported: only functions have arguments that are known",
            code="unsupported_value",
        )
    return read_object(Route.CHAT, "tools[]", where, value)


def prompt(where: str, value: Any) -> list[str | list[int]]:
    """Of completions: one prompt or several, as text or token ids."""
    if isinstance(value, str):
        return [_filled(where, value)]
    if not isinstance(value, list):
        raise _wrong(where, value, "a string, an array of strings or token ids, or one of arrays")
    if not value:
        raise invalid(where, "is empty; a prompt has at least one token")
    if _is_id(value[0]):
        return [_ids(where, value)]
    if len(value) > MAX_PROMPTS:
        raise invalid(where, f"has {len(value)} prompts; at most {MAX_PROMPTS} are accepted")
    if isinstance(value[0], str):
        check = text()
        return [
            _filled(f"{where}.{index}", check(f"{where}.{index}", item))
            for index, item in enumerate(value)
        ]
    return [_ids(f"{where}.{index}", item) for index, item in enumerate(value)]


def _filled(where: str, value: str) -> str:
    if not value:
        raise invalid(where, "is empty; a prompt has at least one token")
    return value


def _ids(where: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise _wrong(where, value, "an array of token ids")
    if not value:
        raise invalid(where, "is empty; a prompt has at least one token")
    # Written so for prompts of very many.
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 1 << 32:
        return value
    for index, item in enumerate(value):
        if not _is_id(item):
            raise _wrong(f"{where}.{index}", item, "a token id")
        if not 0 <= item < 1 << 32:
            raise invalid(f"{where}.{index}", f"{_shown(item)} is no token id")
    return value


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(where: str, value: Any, needed: str) -> ApiError:
    shown = kind_of(value) if isinstance(value, (dict, list)) else _shown(value)
    return invalid(where, f"is {shown}; {needed} is needed", code="invalid_type")


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of very many digits"
    written = json.dumps(value, ensure_ascii=False)
    return written if len(written) <= SHOWN_CHARS else written[: SHOWN_CHARS - 3] + "..."


# The table

MAX_STOPS: Final = 16
MAX_STOP_IDS: Final = 1024
MAX_PROMPTS: Final = 128
MAX_MESSAGES: Final = 1 << 14
MAX_TOOLS: Final = 1024
_INT32: Final = (1 << 31) - 1
_INT64: Final = (1 << 63) - 1


def _honoured(
    path: str, routes: frozenset[Route], check: Check, note: str, *, is_required: bool = False
) -> Field:
    return Field(path, routes, Use.HONOURED, check, note, is_required)


def _extension(path: str, routes: frozenset[Route], check: Check, note: str) -> Field:
    return Field(path, routes, Use.HONOURED, check, note, is_extension=True)


def _neutral(path: str, routes: frozenset[Route], values: Sequence[Any], reason: str) -> Field:
    accepted = ", ".join(f"`{json.dumps(value)}`" for value in values)
    check = only(*values, reason=reason)
    return Field(path, routes, Use.NEUTRAL, check, f"{accepted} only: {reason}")


def _refused(path: str, routes: frozenset[Route], reason: str) -> Field:
    return Field(path, routes, Use.REFUSED, refused(reason), reason)


FIELDS: Final = (
    _honoured("model", BOTH, text(1), "the served name, or an alias of it", is_required=True),
    # What is asked.
    _honoured(
        "messages",
        CHAT,
        list_of(object_of(Route.CHAT, "messages[]"), MAX_MESSAGES, 1),
        f"1 to {MAX_MESSAGES}",
        is_required=True,
    ),
    _honoured(
        "messages[].role",
        CHAT,
        one_of("system", "developer", "user", "assistant", "tool"),
        "`developer` is read as `system`",
        is_required=True,
    ),
    _honoured(
        "messages[].content",
        CHAT,
        content,
        "a string or text parts, which are joined as they stand; an assistant's may be left out",
    ),
    _honoured("messages[].content[].type", CHAT, one_of("text"), "`text`", is_required=True),
    _honoured("messages[].content[].text", CHAT, text(), "of a part", is_required=True),
    _honoured("messages[].name", CHAT, text(), "where the template knows it"),
    _honoured("messages[].tool_call_id", CHAT, text(), "of a tool's message, which needs it"),
    _honoured(
        "messages[].tool_calls",
        CHAT,
        list_of(object_of(Route.CHAT, "messages[].tool_calls[]"), MAX_MESSAGES),
        "of an assistant's message; `[]` is as if it were left out",
    ),
    _honoured("messages[].tool_calls[].id", CHAT, text(), "as the answer had it"),
    _honoured("messages[].tool_calls[].type", CHAT, one_of("function"), "`function`"),
    _honoured(
        "messages[].tool_calls[].function",
        CHAT,
        object_of(Route.CHAT, "messages[].tool_calls[].function"),
        "what was called",
        is_required=True,
    ),
    _honoured("messages[].tool_calls[].function.name", CHAT, text(1), "its name", is_required=True),
    _honoured(
        "messages[].tool_calls[].function.arguments", CHAT, text(), "a JSON object, as JSON text"
    ),
    Field(
        "messages[].tool_calls[].index",
        CHAT,
        Use.NEUTRAL,
        integer(0, MAX_MESSAGES),
        "as chunks have it; calls are counted as they stand",
    ),
    Field(
        "messages[].reasoning_content",
        CHAT,
        Use.HONOURED,
        text(),
        "of an assistant's message, where the template takes it",
        is_extension=True,
    ),
    _refused("messages[].audio", CHAT, "the model hears nothing"),
    _neutral("messages[].annotations", CHAT, ([],), "the model reads text alone"),
    _refused("messages[].refusal", CHAT, "send it as content"),
    _refused("messages[].function_call", CHAT, "use tool_calls"),
    _honoured(
        "prompt",
        COMPLETIONS,
        prompt,
        f"a string, token ids, or up to {MAX_PROMPTS} of either; control tokens written in a "
        "string stay text",
        is_required=True,
    ),
    _refused("suffix", COMPLETIONS, "the models here write behind a prompt only"),
    # What is answered.
    _honoured("stream", BOTH, boolean, "server-sent events"),
    _honoured(
        "stream_options", BOTH, object_of(Route.CHAT, "stream_options"), "only with `stream`"
    ),
    _honoured(
        "stream_options.include_usage", BOTH, boolean, "a chunk with the usage before `[DONE]`"
    ),
    _neutral(
        "stream_options.include_obfuscation", BOTH, (False,), "chunks are as long as their text"
    ),
    _honoured("n", BOTH, integer(1, 32), "1 to 32 answers to a prompt"),
    _honoured(
        "max_completion_tokens", CHAT, integer(1, _INT32), "unset: all the room in the context"
    ),
    _honoured(
        "max_tokens",
        CHAT,
        integer(1, _INT32),
        "the former name; both set need the same value",
    ),
    _honoured(
        "max_tokens",
        COMPLETIONS,
        integer(0, _INT32),
        "unset: 16; 0 only with `echo`, for the prompt alone",
    ),
    _honoured("logprobs", CHAT, boolean, "of each token; the model's, before sampling parameters"),
    _honoured("top_logprobs", CHAT, integer(0, 20), "0 to 20, with `logprobs`"),
    _honoured("logprobs", COMPLETIONS, integer(0, 20), "0 to 20, with `text_offset`"),
    _honoured("echo", COMPLETIONS, boolean, "the prompt before the answer, with its logprobs"),
    _honoured(
        "best_of", COMPLETIONS, integer(1, 32), "the value of `n` only: answers are not ranked"
    ),
    # How it is drawn.
    _honoured("temperature", BOTH, number(0, 100), "0 is greedy; unset: the model's default"),
    _honoured("top_p", BOTH, number(0, 1), "unset: the model's default"),
    _honoured("frequency_penalty", BOTH, number(-2, 2), ""),
    _honoured("presence_penalty", BOTH, number(-2, 2), ""),
    _honoured("logit_bias", BOTH, logit_bias, "up to 1,024 token ids, each -100 to 100"),
    _honoured(
        "seed",
        BOTH,
        integer(-_INT64 - 1, _INT64),
        "64 bits; a negative one counts as itself plus 2^64",
    ),
    _honoured("stop", BOTH, stop, f"a string, or up to {MAX_STOPS}"),
    # Tools.
    _honoured(
        "tools",
        CHAT,
        list_of(tool, MAX_TOOLS),
        "functions, where the server knows the format of the model's calls; `[]` is as if it were "
        "left out",
    ),
    _honoured("tools[].type", CHAT, one_of("function"), "`function`", is_required=True),
    _honoured(
        "tools[].function",
        CHAT,
        object_of(Route.CHAT, "tools[].function"),
        "",
        is_required=True,
    ),
    _honoured("tools[].function.name", CHAT, text(1, 256), "", is_required=True),
    _honoured("tools[].function.description", CHAT, text(), ""),
    _honoured("tools[].function.parameters", CHAT, json_object, "a JSON Schema"),
    _honoured(
        "tools[].function.strict",
        CHAT,
        boolean,
        "`true`: the arguments follow the schema; `n` is 1 then",
    ),
    _honoured(
        "tool_choice",
        CHAT,
        tool_choice,
        "`none` leaves the tools out of the prompt; `required` and a named function make the model "
        "write one call, whose arguments follow the schema; `n` is 1 then",
    ),
    _honoured("tool_choice.type", CHAT, one_of("function"), "`function`", is_required=True),
    _honoured(
        "tool_choice.function",
        CHAT,
        object_of(Route.CHAT, "tool_choice.function"),
        "",
        is_required=True,
    ),
    _honoured("tool_choice.function.name", CHAT, text(1), "", is_required=True),
    _honoured("parallel_tool_calls", CHAT, boolean, "`false`: the answer ends with its first call"),
    _refused("functions", CHAT, "use tools"),
    _refused("function_call", CHAT, "use tool_choice"),
    # Structured output.
    _honoured(
        "response_format",
        CHAT,
        object_of(Route.CHAT, "response_format"),
        "not together with tools that may be called",
    ),
    _honoured(
        "response_format.type",
        CHAT,
        one_of("text", "json_object", "json_schema"),
        "",
        is_required=True,
    ),
    _honoured(
        "response_format.json_schema",
        CHAT,
        object_of(Route.CHAT, "response_format.json_schema"),
        "with `type` `json_schema`",
    ),
    _honoured("response_format.json_schema.name", CHAT, text(1, 64), "", is_required=True),
    _honoured("response_format.json_schema.description", CHAT, text(), "not shown to the model"),
    _honoured(
        "response_format.json_schema.schema",
        CHAT,
        json_object,
        "a keyword that is not honoured is refused by its name",
        is_required=True,
    ),
    _honoured(
        "response_format.json_schema.strict", CHAT, boolean, "the schema is kept in any case"
    ),
    _extension(
        "structured_outputs",
        BOTH,
        object_of(Route.CHAT, "structured_outputs"),
        "one of its fields; not together with `response_format`",
    ),
    _extension("structured_outputs.json", BOTH, json_object, "a JSON Schema"),
    _extension("structured_outputs.regex", BOTH, text(1), "of the whole output"),
    _extension("structured_outputs.choice", BOTH, list_of(text(1), 1024, 1), "one of these texts"),
    _extension("structured_outputs.grammar", BOTH, text(1), "Lark, or the GBNF form of EBNF"),
    _extension("structured_outputs.json_object", BOTH, boolean, "any JSON object"),
    # Of the model and its template.
    _honoured(
        "reasoning_effort",
        CHAT,
        text(1, 64),
        "a variable of the chat template; refused where it takes none of that name",
    ),
    _extension("chat_template_kwargs", CHAT, json_object, "more variables of the template"),
    _extension(
        "add_generation_prompt", CHAT, boolean, "unset: true, the prompt opens the answer's turn"
    ),
    # More of how it is drawn, and of what is answered.
    _extension("top_k", BOTH, integer(-1, _INT32), "0 and -1 are off"),
    _extension("min_p", BOTH, number(0, 1), ""),
    _extension("repetition_penalty", BOTH, number(0.000001, 10), ""),
    _extension("min_tokens", BOTH, integer(0, _INT32), ""),
    _extension(
        "stop_token_ids",
        BOTH,
        list_of(integer(0, (1 << 32) - 1), MAX_STOP_IDS),
        f"up to {MAX_STOP_IDS}",
    ),
    _extension("ignore_eos", BOTH, boolean, ""),
    _extension("include_stop_str_in_output", BOTH, boolean, ""),
    _extension("cache_salt", BOTH, text(0, 256), "prefixes are shared under one salt only"),
    _extension("return_token_ids", BOTH, boolean, "`token_ids` in each choice"),
    _extension(
        "prompt_logprobs", BOTH, integer(0, 20), "in `prompt_logprobs` of the answer; no `stream`"
    ),
    # Who asks.
    _honoured("user", BOTH, text(0, 512), "stands in the gateway's log"),
    _honoured("safety_identifier", CHAT, text(0, 512), "stands in the gateway's log"),
    _honoured(
        "prompt_cache_key",
        CHAT,
        text(0, 512),
        "among replicas, one key leads to one replica; unset: those that begin alike do",
    ),
    _extension("prompt_cache_key", COMPLETIONS, text(0, 512), "as for chats"),
    _neutral(
        "prompt_cache_retention", CHAT, ("in_memory",), "prefixes stay while there is room for them"
    ),
    _refused("prompt_cache_options", CHAT, "prefixes are kept and found by themselves"),
    # Of OpenAI's own service.
    _refused("audio", CHAT, "the model speaks text alone"),
    _neutral("modalities", CHAT, (["text"],), "the model speaks text alone"),
    _refused("metadata", CHAT, "nothing is stored"),
    _neutral("store", CHAT, (False,), "nothing is stored"),
    _refused("moderation", CHAT, "there is no moderation model"),
    _refused("prediction", CHAT, "answers are not predicted"),
    _neutral("service_tier", CHAT, ("auto", "default"), "all requests are served alike"),
    _neutral("verbosity", CHAT, ("medium",), "say in a message how long the answer should be"),
    _refused("web_search_options", CHAT, "nothing is searched"),
    # Of vLLM, where they are sent without need.
    Field(
        "skip_special_tokens",
        BOTH,
        Use.NEUTRAL,
        only(True, reason="control tokens are never part of a text"),
        "`true` only: control tokens are never part of a text",
        is_extension=True,
    ),
    Field(
        "continue_final_message",
        CHAT,
        Use.NEUTRAL,
        only(False, reason="an answer is a turn of its own"),
        "`false` only: an answer is a turn of its own",
        is_extension=True,
    ),
)


def _rows() -> dict[tuple[Route, str], dict[str, Field]]:
    """By route and the path of the object that the fields are of."""
    rows: dict[tuple[Route, str], dict[str, Field]] = {}
    for row in FIELDS:
        parent, _, name = row.path.rpartition(".")
        for route in row.routes:
            rows.setdefault((route, parent), {})[name] = row
    return rows


ROWS: Final = _rows()
