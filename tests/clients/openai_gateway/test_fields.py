"""Every row of the table: values that it takes, values that it refuses, by which name."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from openai.types import completion_create_params as completions_params
from openai.types.chat import completion_create_params as chat_params

from slotwise_gateway.errors import ApiError
from slotwise_gateway.fields import FIELDS, MAX_PROMPTS, Field, Route, Use, read_object

CHAT = Route.CHAT
COMPLETIONS = Route.COMPLETIONS

FUNCTION = {"name": "f", "arguments": "{}"}
SCHEMA = {"name": "s", "schema": {"type": "object"}}
# Of each route, a body with every object that fields can be in.
BODIES: dict[Route, dict[str, Any]] = {
    CHAT: {
        "model": "m",
        "messages": [
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "a"}],
                "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}],
            }
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
        "stream_options": {},
        "structured_outputs": {},
    },
    COMPLETIONS: {
        "model": "m",
        "prompt": "p",
        "stream_options": {},
        "structured_outputs": {},
    },
}

NUMBERS_AS_TEXT = ["1", True, [], {}]
TEXT = [1, True, [], {}]
BOOLEAN = [1, "true", [], {}]
OBJECT = [1, "a", True, []]
COUNT = ["1", 1.5, True, [], -2]

# Of each path: values taken, and values refused; of both routes unless one is named.
VALUES: dict[str | tuple[Route, str], tuple[list[Any], list[Any]]] = {
    "model": (["m"], [*TEXT, ""]),
    "messages": ([[{"role": "user", "content": "a"}]], [*OBJECT, {}, [1]]),
    "messages[].role": (
        ["system", "developer", "user", "assistant", "tool"],
        [*TEXT, "function", "", "User"],
    ),
    "messages[].content": (
        ["", "a", [{"type": "text", "text": "a"}]],
        [1, True, {}, [], [1], ["a"], [{"type": "image_url", "image_url": {"url": "x"}}]],
    ),
    "messages[].content[].type": (["text"], [1, "image_url", "input_audio", "file", "refusal"]),
    "messages[].content[].text": (["", "a"], TEXT),
    "messages[].name": (["a"], TEXT),
    "messages[].tool_call_id": (["a"], TEXT),
    "messages[].tool_calls": ([[], [{"function": FUNCTION}]], [1, "a", {}, [1], [{}]]),
    "messages[].tool_calls[].id": (["a"], TEXT),
    "messages[].tool_calls[].type": (["function"], ["custom", 1]),
    "messages[].tool_calls[].function": ([FUNCTION], [*OBJECT, {}]),
    "messages[].tool_calls[].function.name": (["a"], [*TEXT, ""]),
    "messages[].tool_calls[].function.arguments": (["", "{}"], TEXT),
    "messages[].tool_calls[].index": ([0, 7], [-1, "0", True]),
    "messages[].reasoning_content": (["a"], TEXT),
    "messages[].audio": ([], [{"id": "a"}, 1]),
    "messages[].annotations": ([[]], [[{}], {}, 1]),
    "messages[].refusal": ([], ["no", 1]),
    "messages[].function_call": ([], [FUNCTION, "auto"]),
    "prompt": (
        ["a", ["a", "b"], [1, 2], [[1], [2, 3]], [0, (1 << 32) - 1]],
        [
            *(1, True, {}, "", [], [""], [[]], ["a", 1], [1, "a"], [1, True], [[1], "a"]),
            *([1.5], [-1], [1 << 32], [[1], [-1]], ["a"] * (MAX_PROMPTS + 1), [None]),
        ],
    ),
    "suffix": ([], ["a", 1]),
    "stream": ([True, False], BOOLEAN),
    "stream_options": ([{}], OBJECT),
    "stream_options.include_usage": ([True, False], BOOLEAN),
    "stream_options.include_obfuscation": ([False], [True, 0, "a"]),
    "n": ([1, 32, 2.0], [*COUNT, 0, 33]),
    "max_completion_tokens": ([1, 100_000], [*COUNT, 0, 1 << 40]),
    (CHAT, "max_tokens"): ([1, 100_000], [*COUNT, 0, 1 << 40]),
    (COMPLETIONS, "max_tokens"): ([0, 1, 100_000], [*COUNT, 1 << 40]),
    (CHAT, "logprobs"): ([True, False], BOOLEAN),
    "top_logprobs": ([0, 20], [*COUNT, 21]),
    (COMPLETIONS, "logprobs"): ([0, 20], [*COUNT, 21]),
    "echo": ([True, False], BOOLEAN),
    "best_of": ([1, 32], [*COUNT, 0]),
    "temperature": ([0, 0.5, 100], [*NUMBERS_AS_TEXT, -0.1, 101, 10**400]),
    "top_p": ([0, 0.5, 1], [*NUMBERS_AS_TEXT, -0.1, 1.1]),
    "frequency_penalty": ([-2, 0, 2], [*NUMBERS_AS_TEXT, -2.1, 2.1]),
    "presence_penalty": ([-2, 0, 2], [*NUMBERS_AS_TEXT, -2.1, 2.1]),
    "logit_bias": (
        [{}, {"5": 1, "007": -100}],
        [*OBJECT, {"a": 1}, {"-1": 1}, {"1": "x"}, {"1": 101}, {"1": 1, "01": 1}, {"²": 1}],
    ),
    "seed": ([0, -1, -(1 << 63), (1 << 63) - 1], ["1", 1.5, True, -(1 << 63) - 1, 1 << 63]),
    "stop": (["a", [], ["a"] * 16], [1, True, {}, "", [""], [1], ["a"] * 17]),
    "tools": ([[], BODIES[CHAT]["tools"]], [1, "a", {}, [1], [{}], [{"type": "custom"}]]),
    "tools[].type": (["function"], [1, "custom"]),
    "tools[].function": ([{"name": "f"}], [*OBJECT, {}]),
    "tools[].function.name": (["f", "f" * 256], [*TEXT, "", "f" * 257]),
    "tools[].function.description": (["", "d"], TEXT),
    "tools[].function.parameters": ([{}, {"type": "object"}], OBJECT),
    "tools[].function.strict": ([True, False], BOOLEAN),
    "tool_choice": (
        ["none", "auto", "required", BODIES[CHAT]["tool_choice"]],
        [1, True, [], "any", {}, {"type": "allowed_tools"}, {"type": "custom"}],
    ),
    "tool_choice.type": (["function"], [1, "custom"]),
    "tool_choice.function": ([{"name": "f"}], [*OBJECT, {}]),
    "tool_choice.function.name": (["f"], [*TEXT, ""]),
    "parallel_tool_calls": ([True, False], BOOLEAN),
    "functions": ([], [[], [{}]]),
    "function_call": ([], ["auto", "none"]),
    "response_format": ([{"type": "text"}], [*OBJECT, {}]),
    "response_format.type": (["text", "json_object", "json_schema"], [1, "xml"]),
    "response_format.json_schema": ([SCHEMA], [*OBJECT, {}, {"name": "s"}]),
    "response_format.json_schema.name": (["s"], [*TEXT, "", "s" * 65]),
    "response_format.json_schema.description": (["d"], TEXT),
    "response_format.json_schema.schema": ([{}, {"type": "object"}], OBJECT),
    "response_format.json_schema.strict": ([True, False], BOOLEAN),
    "structured_outputs": ([{}], OBJECT),
    "structured_outputs.json": ([{}], OBJECT),
    "structured_outputs.regex": (["a"], [*TEXT, ""]),
    "structured_outputs.choice": ([["a"]], [1, "a", {}, [], [""], [1]]),
    "structured_outputs.grammar": (["a"], [*TEXT, ""]),
    "structured_outputs.json_object": ([True, False], BOOLEAN),
    "reasoning_effort": (["low"], [*TEXT, ""]),
    "chat_template_kwargs": ([{}, {"a": 1}], OBJECT),
    "add_generation_prompt": ([True, False], BOOLEAN),
    "top_k": ([-1, 0, 50], [*NUMBERS_AS_TEXT, -2, 1.5]),
    "min_p": ([0, 1], [*NUMBERS_AS_TEXT, -0.1, 1.1]),
    "repetition_penalty": ([0.5, 10], [*NUMBERS_AS_TEXT, 0, 10.1]),
    "min_tokens": ([0, 5], COUNT),
    "stop_token_ids": ([[], [0, 5]], [1, "a", {}, [-1], ["a"], [1.5], [1 << 32], [1] * 1025]),
    "ignore_eos": ([True, False], BOOLEAN),
    "include_stop_str_in_output": ([True, False], BOOLEAN),
    "cache_salt": (["", "a"], [*TEXT, "a" * 257]),
    "return_token_ids": ([True, False], BOOLEAN),
    "prompt_logprobs": ([0, 20], [*COUNT, 21]),
    "user": (["", "u"], [*TEXT, "u" * 513]),
    "safety_identifier": (["u"], [*TEXT, "u" * 513]),
    "prompt_cache_key": (["k"], [*TEXT, "k" * 513]),
    "prompt_cache_retention": (["in_memory"], ["24h", 1]),
    "prompt_cache_options": ([], [{}, {"mode": "explicit"}]),
    "audio": ([], [{"voice": "a", "format": "wav"}]),
    "modalities": ([["text"]], [["text", "audio"], [], "text"]),
    "metadata": ([], [{}, {"a": "b"}]),
    "store": ([False], [True, 0]),
    "moderation": ([], [{"model": "m"}]),
    "prediction": ([], [{"type": "content", "content": "a"}]),
    "service_tier": (["auto", "default"], ["flex", "priority", 1]),
    "verbosity": (["medium"], ["low", "high", 1]),
    "web_search_options": ([], [{}]),
    "skip_special_tokens": ([True], [False, 1]),
    "continue_final_message": ([False], [True, 0]),
}


def rows() -> list[tuple[Route, Field]]:
    return [(route, row) for row in FIELDS for route in Route if route in row.routes]


def values_of(route: Route, row: Field) -> tuple[list[Any], list[Any]]:
    return VALUES.get((route, row.path)) or VALUES[row.path]


def body_with(route: Route, path: str, value: Any) -> dict[str, Any]:
    """The route's body with the value at the path."""
    body = copy.deepcopy(BODIES[route])
    *parents, name = path.split(".")
    place = body
    for parent in parents:
        place = place[parent.removesuffix("[]")]
        if parent.endswith("[]"):
            place = place[0]
    place[name] = value
    return body


def cases(which: int) -> list[Any]:
    return [
        pytest.param(route, row, value, id=f"{route.value} {row.path} {str(value)[:30]}")
        for route, row in rows()
        for value in values_of(route, row)[which]
    ]


def test_every_row_is_tested():
    needed = {(route, row.path) for route, row in rows()}
    tested = set()
    for key in VALUES:
        path = key[1] if isinstance(key, tuple) else key
        routes = [key[0]] if isinstance(key, tuple) else list(Route)
        tested |= {(route, path) for route in routes if (route, path) in needed}
        assert any((route, path) in needed for route in routes), f"{key} is no row"
    assert tested == needed
    for route, row in rows():
        taken, refused = values_of(route, row)
        assert refused, row.path
        assert bool(taken) == (row.use is not Use.REFUSED), row.path


@pytest.mark.parametrize(("route", "row", "value"), cases(0))
def test_values_that_are_taken(route, row, value):
    found = read_object(route, "", "", body_with(route, row.path, value))
    for part in row.path.split("."):
        name = part.removesuffix("[]")
        if isinstance(found, str):
            return  # the text that parts were joined to
        if row.use is Use.NEUTRAL and part == row.path.rpartition(".")[2]:
            assert name not in found
            return
        found = found[name]
        if part.endswith("[]") and isinstance(found, list):
            found = found[0]


@pytest.mark.parametrize(("route", "row", "value"), cases(1))
def test_values_that_are_refused_by_name(route, row, value):
    with pytest.raises(ApiError) as raised:
        read_object(route, "", "", body_with(route, row.path, value))
    error = raised.value
    assert error.status == 400
    name = row.path.replace("[]", ".0")
    assert error.param is not None
    assert error.param == name or error.param.startswith(f"{name}."), error.param
    assert error.message.startswith(f"{error.param}: ")
    assert len(error.message) < 400


@pytest.mark.parametrize(
    ("route", "row"), [pytest.param(*each, id=f"{each[0].value} {each[1].path}") for each in rows()]
)
def test_null_is_as_if_left_out(route, row):
    body = body_with(route, row.path, None)
    if not row.is_required:
        read_object(route, "", "", body)
        return
    with pytest.raises(ApiError, match="is missing") as raised:
        read_object(route, "", "", body)
    assert raised.value.param == row.path.replace("[]", ".0")


@pytest.mark.parametrize(
    ("route", "path"),
    sorted({(route, row.path.rpartition(".")[0]) for route, row in rows()}, key=str),
)
def test_unknown_fields_are_refused_by_name(route, path):
    name = f"{path}.frob" if path else "frob"
    with pytest.raises(ApiError, match="is no known field") as raised:
        read_object(route, "", "", body_with(route, name, None))
    assert raised.value.param == name.replace("[]", ".0")
    assert raised.value.code == "unknown_parameter"


@pytest.mark.parametrize(
    ("route", "name", "advice"),
    [
        (CHAT, "temprature", "is 'temperature' meant?"),
        (CHAT, "prompt", "of /v1/chat/completions"),
        (COMPLETIONS, "messages", "of /v1/completions"),
        (CHAT, "x" * 5000, "is no known field"),
    ],
)
def test_advice_for_unknown_fields(route, name, advice):
    with pytest.raises(ApiError, match=re.escape(advice)) as raised:
        read_object(route, "", "", body_with(route, name, 1))
    assert len(raised.value.message) < 500


def openai_names(*kinds: type) -> set[str]:
    return {name for kind in kinds for name in kind.__annotations__}


@pytest.mark.parametrize(
    ("route", "names"),
    [
        (
            CHAT,
            openai_names(
                chat_params.CompletionCreateParamsBase,
                chat_params.CompletionCreateParamsStreaming,
            ),
        ),
        (
            COMPLETIONS,
            openai_names(
                completions_params.CompletionCreateParamsBase,
                completions_params.CompletionCreateParamsStreaming,
            ),
        ),
    ],
)
def test_every_field_of_the_openai_sdk_has_a_row(route, names):
    ours = {row.path for row in FIELDS if route in row.routes and "." not in row.path}
    assert names <= ours
    extensions = {row.path for row in FIELDS if row.is_extension and "." not in row.path}
    assert ours - names <= extensions


def test_text_parts_are_joined_as_they_stand():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    body = body_with(CHAT, "messages[].content", parts)
    assert read_object(CHAT, "", "", body)["messages"][0]["content"] == "a b"


def test_stops_and_biases():
    body = {**BODIES[CHAT], "stop": "a", "logit_bias": {"7": 1}}
    values = read_object(CHAT, "", "", body)
    assert values["stop"] == ["a"]
    assert values["logit_bias"] == {7: 1.0}


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ApiError, match=r"\.\.\.; true or false is needed"):
        read_object(CHAT, "", "", {**BODIES[CHAT], "stream": "x" * 10_000})
    with pytest.raises(ApiError, match="very many digits is out of range"):
        read_object(CHAT, "", "", {**BODIES[CHAT], "n": 10**4000})
