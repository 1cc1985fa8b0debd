"""What becomes of a chat's body."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slotwise_client import Chat, Message, ModelInfo, Sampling, Tool, ToolCall
from slotwise_gateway.chat import read_chat
from slotwise_gateway.errors import ApiError
from slotwise_gateway.tool_turn import ToolPlan

DEFAULTS = Sampling(1.0, 1.0, 0, 0.0, None, 0.0, 0.0, 1.0, {})
INFO = ModelInfo("m", "t", (), 512, 64, 63, (2,), None, True, DEFAULTS, "f", "qwen3")
PLAIN = replace(INFO, output_format="")
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(name: str, **more):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def read(info=INFO, **fields):
    return read_chat({"model": "m", "messages": [USER], **fields}, info)


def refusal(info=INFO, **fields) -> ApiError:
    with pytest.raises(ApiError) as raised:
        read(info, **fields)
    assert raised.value.status == 400
    return raised.value


def test_a_bare_chat():
    job = read(PLAIN)
    assert job.prompts == (Chat((Message("user", "hi"),)),)
    assert job.options == {}
    assert (job.num_choices, job.is_rendered, job.plan) == (1, False, None)
    assert not any((job.looks.streams, job.looks.include_usage, job.looks.logprobs))


def test_what_is_known_of_the_format_is_told_apart():
    assert read().options == {"parse_output": True}


def test_options_by_their_names():
    job = read(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        frequency_penalty=1,
        presence_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"7": 3},
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        include_stop_str_in_output=True,
        min_tokens=2,
        cache_salt="s",
        n=3,
        prompt_logprobs=4,
        max_completion_tokens=9,
        seed=7,
        user="u",
    )
    assert job.options == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "frequency_penalty": 1.0,
        "presence_penalty": -1.0,
        "repetition_penalty": 1.5,
        "logit_bias": {7: 3.0},
        "stop": ["a", "b"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "include_stop_in_output": True,
        "min_new_tokens": 2,
        "cache_salt": "s",
        "n": 3,
        "prompt_logprobs": 4,
        "max_new_tokens": 9,
        "seed": 7,
        "parse_output": True,
    }
    assert job.told_stops == {"a", "b", 4}
    assert (job.user, job.num_choices, job.looks.prompt_logprobs) == ("u", 3, True)


@pytest.mark.parametrize(
    ("seed", "sent"),
    [(0, 0), (5, 5), ((1 << 63) - 1, (1 << 63) - 1), (-1, (1 << 64) - 1), (-(1 << 63), 1 << 63)],
)
def test_seeds_are_mapped_one_to_one(seed, sent):
    assert read(seed=seed).options["seed"] == sent


def test_looks():
    looks = read(
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        return_token_ids=True,
    ).looks
    assert looks.streams
    assert looks.include_usage
    assert looks.logprobs
    assert looks.token_ids


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_either_name_of_the_limit(fields, name):
    job = read(**fields)
    assert job.options["max_new_tokens"] == 5
    assert job.names.of("max_new_tokens") == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
        ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools.2.function.name"),
        (
            {
                "tools": [tool("f")],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice.function.name",
        ),
        ({"tools": [tool("f")], "tool_choice": "required", "n": 2}, "n"),
        ({"tools": [tool("f", strict=True)], "n": 2}, "n"),
        ({"tools": [tool("f")], "response_format": {"type": "json_object"}}, "response_format"),
        (
            {"tools": [tool("f")], "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {
                "response_format": {
                    "type": "text",
                    "json_schema": {"name": "s", "schema": {}},
                }
            },
            "response_format.json_schema",
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"regex": "a"},
            },
            "response_format",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
            "reasoning_effort",
        ),
    ],
)
def test_what_does_not_go_together(fields, param):
    assert refusal(**fields).param == param


# Messages


def test_a_conversation():
    turns = [
        {"role": "developer", "content": "d"},
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}], "name": "n"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "audio": None,
            "function_call": None,
            "annotations": [],
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "content": "t", "tool_call_id": "c"},
        {"role": "assistant", "content": "a", "tool_calls": []},
        {"role": "assistant"},
    ]
    assert read(messages=turns).chat.messages == (
        Message("system", "d"),
        Message("system", "s"),
        Message("user", "u", name="n"),
        Message("assistant", None, tool_calls=(ToolCall("c", "f", "{}"),), reasoning_content="r"),
        Message("tool", "t", tool_call_id="c"),
        Message("assistant", "a"),
        Message("assistant"),
    )


@pytest.mark.parametrize(
    ("turn", "param"),
    [
        ({"role": "user"}, "messages.1.content"),
        ({"role": "system", "content": None}, "messages.1.content"),
        ({"role": "tool", "tool_call_id": "c"}, "messages.1.content"),
        ({"role": "tool", "content": "t"}, "messages.1.tool_call_id"),
        (
            {"role": "user", "content": "u", "tool_calls": [{"function": {"name": "f"}}]},
            "messages.1.tool_calls",
        ),
        (
            {"role": "user", "content": "u", "reasoning_content": "r"},
            "messages.1.reasoning_content",
        ),
    ],
)
def test_messages_that_lack_something(turn, param):
    assert refusal(messages=[USER, turn]).param == param


def test_template_variables():
    job = read(reasoning_effort="low", add_generation_prompt=False)
    assert job.chat.template_kwargs == {"reasoning_effort": "low"}
    assert job.chat.omit_generation_prompt
    assert job.names.of("chat.template_kwargs_json") == "reasoning_effort"
    job = read(reasoning_effort="low", chat_template_kwargs={"a": 1})
    assert job.chat.template_kwargs == {"a": 1, "reasoning_effort": "low"}
    assert job.names.of("chat.template_kwargs_json") == "chat_template_kwargs"
    assert read(chat_template_kwargs={}).chat.template_kwargs is None


# Tools

F = Tool("f", None, SCHEMA)
G = Tool("g", "d", SCHEMA)
BOTH = [tool("f"), tool("g", description="d")]


def test_tools_that_the_model_may_call_as_it_likes():
    job = read(tools=BOTH)
    assert job.chat.tools == (F, G)
    assert job.plan is None
    assert job.options == {"parse_output": True}


def test_one_call_at_most():
    job = read(tools=BOTH, parallel_tool_calls=False, stop="x")
    assert job.options["stop"] == ["x", "</tool_call>"]
    assert job.told_stops == {"x"}
    assert "stop" not in read(parallel_tool_calls=False).options


def test_none_leaves_the_tools_out():
    for info in (INFO, PLAIN):
        job = read(info, tools=BOTH, tool_choice="none")
        assert job.chat.tools == ()
        assert job.plan is None


def test_without_tools_a_call_is_text():
    assert read().hides_calls
    assert read(tools=BOTH, tool_choice="none").hides_calls
    assert not read(tools=BOTH).hides_calls
    assert not read(tools=BOTH, tool_choice="required").hides_calls
    assert not read(PLAIN).hides_calls


def test_forced_calls():
    job = read(tools=BOTH, tool_choice="required")
    assert job.chat.tools == (F, G)
    assert job.plan == ToolPlan(((0, F), (1, G)), is_forced=True, is_single=True)
    assert "parse_output" not in job.options
    named = {"type": "function", "function": {"name": "g"}}
    job = read(tools=BOTH, tool_choice=named)
    assert job.chat.tools == (F, G)
    assert job.plan == ToolPlan(((1, G),), is_forced=True, is_single=True)


def test_strict_tools():
    """The schemas of those that are not strict are not kept to."""
    job = read(tools=[tool("f", strict=True), tool("g", strict=False)])
    free = Tool("g", None, None)
    assert job.plan == ToolPlan(((0, F), (1, free)), is_forced=False, is_single=False)
    assert job.chat.tools == (F, Tool("g", None, SCHEMA))
    job = read(tools=[tool("f", strict=True)], parallel_tool_calls=False)
    assert job.plan is not None
    assert job.plan.is_single
    assert "stop" not in job.options


def test_tools_where_nothing_is_known_of_the_format():
    assert refusal(PLAIN, tools=BOTH).param == "tools"
    assert read(PLAIN, tools=[]).chat.tools == ()


# Structured output


@pytest.mark.parametrize(
    ("fields", "option", "grpc_name", "name"),
    [
        (
            {"response_format": {"type": "json_object"}},
            {"json_object": True},
            "json_object",
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
                }
            },
            {"json_schema": SCHEMA},
            "json_schema",
            "response_format.json_schema.schema",
        ),
        (
            {"structured_outputs": {"json": SCHEMA}},
            {"json_schema": SCHEMA},
            "json_schema",
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"regex": "a+"}},
            {"regex": "a+"},
            "regex",
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            {"choice": ["a", "b"]},
            "choice.texts[1]",
            "structured_outputs.choice.1",
        ),
        (
            {"structured_outputs": {"grammar": "start: x", "json_object": False}},
            {"grammar": "start: x"},
            "grammar",
            "structured_outputs.grammar",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            {"json_object": True},
            "json_object",
            "structured_outputs.json_object",
        ),
    ],
)
def test_constraints(fields, option, grpc_name, name):
    job = read(**fields)
    # Of the answer alone: nothing is left to be told apart.
    assert job.options == option
    assert job.is_rendered
    assert job.names.of(grpc_name) == name
    assert not read(PLAIN, **fields).is_rendered


def test_a_format_that_asks_for_nothing():
    job = read(response_format={"type": "text"}, tools=BOTH)
    assert job.options == {"parse_output": True}
