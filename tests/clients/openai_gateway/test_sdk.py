"""A conversation through the SDK of OpenAI, as its users write one, with a real server behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionToolParam
from pydantic import BaseModel, ConfigDict, Field

from slotwise.v1 import inference_pb2 as pb

MODEL = "tiny"
QUESTION = [{"role": "user", "content": "What is the weather in Köln?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Köln", "Paris"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Köln", "Paris"]
    days: int = Field(ge=1, le=9)


def by_grpc(server, messages: list[dict], **options) -> pb.CompleteResponse:
    """The same question asked without the gateway."""
    chat = pb.Chat(messages=[pb.ChatMessage(**message) for message in messages])
    sampling = pb.SamplingParams(temperature=0)
    asked = pb.GenerateRequest(chat=chat, sampling=sampling, max_new_tokens=24, **options)
    return server.stub.Complete(asked, timeout=60)


def test_a_whole_answer(client, server):
    got = client.chat.completions.create(messages=QUESTION, **GREEDY)
    want = by_grpc(server, QUESTION, parse_output=True)
    (choice,) = got.choices
    assert (choice.index, choice.message.role) == (0, "assistant")
    assert choice.message.content == want.choices[0].text
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "length"
    assert got.usage.prompt_tokens == want.accepted.prompt_tokens
    assert got.usage.completion_tokens == 24
    assert got.usage.total_tokens == want.accepted.prompt_tokens + 24
    assert (got.object, got.model) == ("chat.completion", MODEL)
    assert got.id.startswith("chatcmpl-")
    assert got.created > 1_700_000_000
    assert got.system_fingerprint


def test_a_streamed_answer_is_the_whole_one(client):
    whole = client.chat.completions.create(messages=QUESTION, **GREEDY)
    chunks = list(client.chat.completions.create(messages=QUESTION, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not [c for c in chunks[1:] if c.choices[0].delta.role]
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {c.id for c in chunks} == {chunks[0].id} != {whole.id}
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert {(c.model, c.created) for c in chunks} == {(MODEL, chunks[0].created)}
    assert {c.system_fingerprint for c in chunks} == {whole.system_fingerprint}
    assert not [c for c in chunks if c.usage]


def test_usage_of_a_stream_when_asked_for(client):
    # Twice, so that the second finds the prompt in the cache.
    for _ in range(2):
        whole = client.chat.completions.create(messages=QUESTION, **GREEDY)
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        messages=QUESTION, stream=True, stream_options=options, **GREEDY
    )
    *chunks, last = stream
    assert last.choices == []
    assert last.usage.model_dump() == whole.usage.model_dump()
    assert last.usage.prompt_tokens_details.cached_tokens > 0
    assert {c.usage for c in chunks} == {None}
    assert all(c.choices for c in chunks)


def test_several_turns(client, server):
    """The answer goes back as it came; each turn is what gRPC would have answered."""
    messages: list[dict] = [{"role": "system", "content": "Be short."}]
    for question in ("Hello!", "And now?", "Good bye."):
        messages.append({"role": "user", "content": question})
        got = client.chat.completions.create(messages=messages, **GREEDY)
        want = by_grpc(server, messages, parse_output=True)
        message = got.choices[0].message
        assert message.content == want.choices[0].text
        assert got.usage.prompt_tokens == want.accepted.prompt_tokens
        messages.append({"role": "assistant", "content": message.content})


def test_content_in_parts_and_the_developers_role(client):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "up?"}]
    for plain, other in (
        ({"role": "user", "content": "What is up?"}, {"role": "user", "content": parts}),
        (
            {"role": "system", "content": "Be short."},
            {"role": "developer", "content": "Be short."},
        ),
    ):
        texts = [
            client.chat.completions.create(messages=[first, QUESTION[0]], **GREEDY)
            for first in (plain, other)
        ]
        assert texts[0].choices[0].message.content == texts[1].choices[0].message.content
        assert texts[0].usage.prompt_tokens == texts[1].usage.prompt_tokens


# Tools


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        ({"type": "function", "function": {"name": "clock"}}, {"clock"}),
    ],
)
def test_a_forced_call_is_made_streamed_and_not(client, choice, names):
    options = {**GREEDY, "max_tokens": 400, "tools": [WEATHER, CLOCK], "tool_choice": choice}
    # Some seeds, since the model's weights are random.
    for seed in range(3):
        options |= {"temperature": 1, "seed": seed}
        whole = client.chat.completions.create(messages=QUESTION, **options)
        (made,) = whole.choices
        assert made.finish_reason == "tool_calls"
        assert made.message.tool_calls
        for call in made.message.tool_calls:
            assert call.type == "function"
            assert call.id
            assert call.function.name in names
            arguments = json.loads(call.function.arguments)
            if call.function.name == "weather":
                Weather.model_validate(arguments)
            else:
                assert arguments == {}
        streamed = joined_calls(
            client.chat.completions.create(messages=QUESTION, stream=True, **options)
        )
        assert streamed == [
            (call.function.name, call.function.arguments) for call in made.message.tool_calls
        ]


def joined_calls(stream) -> list[tuple[str, str]]:
    """Name and arguments of the calls of a stream, by the rules of OpenAI's deltas."""
    calls: list[list[str]] = []
    reasons = []
    for chunk in stream:
        (choice,) = chunk.choices
        for part in choice.delta.tool_calls or []:
            assert bool(part.id) == bool(part.function.name) == (part.index == len(calls))
            if part.id:
                assert part.type == "function"
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert reasons == ["tool_calls"]
    return [(name, arguments) for name, arguments in calls]


def test_a_call_is_answered_and_the_talk_goes_on(client, server):
    """What comes back is rendered as the same chat is over gRPC."""
    options = {**GREEDY, "temperature": 1, "seed": 0, "tools": [WEATHER]}
    forced = {"tool_choice": "required", "max_tokens": 400}
    first = client.chat.completions.create(messages=QUESTION, **(options | forced))
    message = first.choices[0].message
    answers = [
        {"role": "tool", "tool_call_id": call.id, "content": f"sunny, {place}"}
        for place, call in enumerate(message.tool_calls)
    ]
    messages = [*QUESTION, message.model_dump(exclude_none=True), *answers]
    got = client.chat.completions.create(messages=messages, **options)
    calls = [
        pb.ToolCall(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
        for call in message.tool_calls
    ]
    function = WEATHER["function"]
    chat = pb.Chat(
        messages=[
            pb.ChatMessage(**QUESTION[0]),
            pb.ChatMessage(role="assistant", tool_calls=calls),
            *(pb.ChatMessage(**answer) for answer in answers),
        ],
        tools=[
            pb.Tool(
                name=function["name"],
                description=function["description"],
                parameters_json=json.dumps(function["parameters"]),
            )
        ],
    )
    asked = pb.GenerateRequest(
        chat=chat,
        sampling=pb.SamplingParams(temperature=1, seed=0),
        max_new_tokens=24,
        parse_output=True,
    )
    want = server.stub.Complete(asked, timeout=60)
    assert got.usage.prompt_tokens == want.accepted.prompt_tokens
    assert (got.choices[0].message.content or "") == want.choices[0].text


def test_no_tools_are_called_when_none_is_chosen(client):
    options = {**GREEDY, "tools": [WEATHER], "tool_choice": "none"}
    got = client.chat.completions.create(messages=QUESTION, **options)
    assert got.choices[0].message.tool_calls is None


# JSON


def test_any_json_object(client):
    form = {"type": "json_object"}
    options = {**GREEDY, "max_tokens": 300, "temperature": 1}
    complete = 0
    for seed in range(4):
        got = client.chat.completions.create(
            messages=QUESTION, response_format=form, seed=seed, **options
        )
        assert got.choices[0].message.content.lstrip().startswith("{")
        if got.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(got.choices[0].message.content), dict)
            complete += 1
    assert complete


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema(client, stream):
    schema = {"name": "weather", "schema": Weather.model_json_schema(), "strict": True}
    got = client.chat.completions.create(
        messages=QUESTION,
        response_format={"type": "json_schema", "json_schema": schema},
        stream=stream,
        **(GREEDY | {"max_tokens": 300}),
    )
    if stream:
        text = "".join(c.choices[0].delta.content or "" for c in got)
    else:
        text = got.choices[0].message.content
    Weather.model_validate_json(text)


def test_parse_gives_the_users_own_type(client):
    got = client.chat.completions.parse(
        messages=QUESTION, response_format=Weather, **(GREEDY | {"max_tokens": 300})
    )
    assert isinstance(got.choices[0].message.parsed, Weather)
    assert got.choices[0].finish_reason == "stop"


def test_parse_of_a_streamed_answer(client):
    with client.chat.completions.stream(
        messages=QUESTION, response_format=Weather, **(GREEDY | {"max_tokens": 300})
    ) as stream:
        kinds = {event.type for event in stream}
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(parsed, Weather)


def test_tools_made_of_the_users_own_types(client):
    tool = openai.pydantic_function_tool(Weather, name="weather")
    got = client.chat.completions.parse(
        messages=QUESTION,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        **(GREEDY | {"temperature": 1, "seed": 0, "max_tokens": 400}),
    )
    (call, *_) = got.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


# Sampling


def test_logprobs(client, server):
    options = {**GREEDY, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    got = client.chat.completions.create(messages=QUESTION, **options)
    entries = got.choices[0].logprobs.content
    want = by_grpc(server, QUESTION, logprobs=3).choices[0].logprobs[:6]
    assert len(entries) == 6
    for entry, one in zip(entries, want, strict=True):
        assert entry.logprob == pytest.approx(one.token.logprob, abs=1e-6)
        assert bytes(entry.bytes) == one.token.text
        assert len(entry.top_logprobs) == 3
        # Greedy: the token is the likeliest.
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert [bytes(top.bytes) for top in entry.top_logprobs] == [b.text for b in one.best]
    streamed = [
        entry
        for chunk in client.chat.completions.create(messages=QUESTION, stream=True, **options)
        for entry in (chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else [])
    ]
    assert [e.model_dump() for e in streamed] == [e.model_dump() for e in entries]


def test_logprobs_without_alternatives(client):
    options = {**GREEDY, "max_tokens": 3, "logprobs": True}
    got = client.chat.completions.create(messages=QUESTION, **options)
    assert [entry.top_logprobs for entry in got.choices[0].logprobs.content] == [[]] * 3
    got = client.chat.completions.create(messages=QUESTION, **(options | {"logprobs": False}))
    assert got.choices[0].logprobs is None


def test_several_answers(client):
    options = {**GREEDY, "temperature": 1, "n": 3, "seed": 11}
    options["extra_body"] = {"return_token_ids": True}
    whole = client.chat.completions.create(messages=QUESTION, **options)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    one = client.chat.completions.create(messages=QUESTION, **(options | {"n": 1}))
    assert whole.usage.prompt_tokens == one.usage.prompt_tokens
    assert texts[0] == one.choices[0].message.content
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == sum(len(ids_of(choice)) for choice in whole.choices)
    streamed, roles, reasons = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for chunk in client.chat.completions.create(messages=QUESTION, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            reasons[choice.index] += choice.finish_reason is not None
    assert streamed == texts
    assert (roles, reasons) == ([1, 1, 1], [1, 1, 1])


def ids_of(choice) -> list[int]:
    return choice.model_extra["token_ids"]


def test_a_seed_makes_it_the_same_again(client):
    options = {**GREEDY, "temperature": 1}

    def text(seed: int) -> str:
        got = client.chat.completions.create(messages=QUESTION, seed=seed, **options)
        return got.choices[0].message.content

    texts = {seed: text(seed) for seed in (0, 1, -1, 2**63 - 1, -(2**63))}
    assert len(set(texts.values())) == len(texts)
    assert {seed: text(seed) for seed in texts} == texts


def test_stop_strings(client):
    whole = client.chat.completions.create(messages=QUESTION, **GREEDY).choices[0].message.content
    stop = whole[10:13]
    want = whole[: whole.index(stop)]
    for given in (stop, [stop], ["never to be found", stop]):
        got = client.chat.completions.create(messages=QUESTION, stop=given, **GREEDY)
        assert got.choices[0].message.content == want
        assert got.choices[0].finish_reason == "stop"


def test_max_completion_tokens(client):
    options = {key: value for key, value in GREEDY.items() if key != "max_tokens"}
    got = client.chat.completions.create(messages=QUESTION, max_completion_tokens=5, **options)
    assert got.usage.completion_tokens == 5


def test_a_biased_token_takes_over(client):
    options = {**GREEDY, "extra_body": {"return_token_ids": True}}
    got = client.chat.completions.create(messages=QUESTION, logit_bias={"70": 100}, **options)
    assert ids_of(got.choices[0]) == [70] * 24


# Completions of a plain text


def test_a_legacy_completion(client, server):
    asked = pb.GenerateRequest(
        text="the sea and", sampling=pb.SamplingParams(temperature=0), max_new_tokens=24
    )
    want = server.collect(asked)
    got = client.completions.create(prompt="the sea and", **GREEDY)
    assert (got.object, got.model) == ("text_completion", MODEL)
    assert got.id.startswith("cmpl-")
    assert [choice.text for choice in got.choices] == [want.text]
    assert got.usage.prompt_tokens == want.accepted.prompt_tokens
    assert got.usage.completion_tokens == len(want.token_ids)
    chunks = list(client.completions.create(prompt="the sea and", stream=True, **GREEDY))
    assert "".join(c.choices[0].text for c in chunks) == want.text
    assert chunks[-1].choices[0].finish_reason == "length"
    echoed = client.completions.create(prompt="the sea and", echo=True, **GREEDY)
    assert echoed.choices[0].text == "the sea and" + want.text


def test_every_form_of_a_prompt(client, server):
    texts = ["the sea", "and the sky"]
    ids = [list(server.stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids) for text in texts]
    one = [client.completions.create(prompt=text, **GREEDY).choices[0].text for text in texts]
    for prompt in (texts, ids):
        got = client.completions.create(prompt=prompt, **GREEDY)
        assert [(choice.index, choice.text) for choice in got.choices] == list(enumerate(one))
        assert got.usage.prompt_tokens == sum(len(part) for part in ids)
        assert got.usage.completion_tokens == 48
        streamed = ["", ""]
        for chunk in client.completions.create(prompt=prompt, stream=True, **GREEDY):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == one
    assert client.completions.create(prompt=ids[0], **GREEDY).choices[0].text == one[0]
    got = client.completions.create(prompt=texts, n=2, **GREEDY)
    assert [(choice.index, choice.text) for choice in got.choices] == list(
        enumerate([one[0], one[0], one[1], one[1]])
    )


def test_legacy_logprobs(client):
    options = {**GREEDY, "max_tokens": 8}
    got = client.completions.create(prompt="the sea", logprobs=2, **options)
    choice = got.choices[0]
    table = choice.logprobs
    assert len(table.tokens) == len(table.token_logprobs) == len(table.text_offset) == 8
    assert len(table.top_logprobs) == 8
    assert all(value <= 0 for value in table.token_logprobs)
    assert table.text_offset[0] in (0, len("the sea"))
    assert table.text_offset == sorted(table.text_offset)
    echoed = client.completions.create(prompt="the sea", logprobs=2, echo=True, **options)
    table = echoed.choices[0].logprobs
    assert table.token_logprobs[0] is None
    assert table.text_offset[0] == 0
    num_prompt = echoed.usage.prompt_tokens
    assert len(table.tokens) == num_prompt + 8
    assert "".join(table.tokens[:num_prompt]) == "the sea"
    assert table.token_logprobs[num_prompt:] == pytest.approx(
        choice.logprobs.token_logprobs, abs=1e-5
    )


# Models, ids, errors


def test_models(client):
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {MODEL, "gpt-4o"}
    assert client.models.retrieve(MODEL).id == MODEL
    assert {model.object for model in models.values()} == {"model"}
    got = client.chat.completions.create(messages=QUESTION, **(GREEDY | {"model": "gpt-4o"}))
    assert got.choices[0].message.content is not None
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-5")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_the_clients_own_request_id(client):
    named = {"X-Request-Id": "mine-1234"}
    got = client.chat.completions.with_raw_response.create(
        messages=QUESTION, extra_headers=named, **GREEDY
    )
    assert got.headers["x-request-id"] == "mine-1234"
    assert got.parse().id == "chatcmpl-mine-1234"
    bad = {"X-Request-Id": "not a good id " + "x" * 200}
    got = client.chat.completions.with_raw_response.create(
        messages=QUESTION, extra_headers=bad, **GREEDY
    )
    made = got.headers["x-request-id"]
    assert made != bad["X-Request-Id"]
    assert got.parse()._request_id == made
    assert made in got.parse().id


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [WEATHER], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ],
)
def test_bad_requests_name_their_field(client, options, param):
    asked: dict[str, Any] = {"messages": QUESTION, **GREEDY, **options}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked)
    assert refused.value.param is not None
    assert refused.value.param.startswith(param)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.status_code == 400
    assert refused.value.request_id
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(stream=True, **asked)
    assert refused.value.param.startswith(param)


def test_a_schema_that_cannot_be(client):
    schema = {"name": "bad", "schema": {"type": "no such type"}}
    form = {"type": "json_schema", "json_schema": schema}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=QUESTION, response_format=form, **GREEDY)
    assert refused.value.param.startswith("response_format")


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(messages=QUESTION, **(GREEDY | {"model": "gpt-5"}))
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert MODEL in refused.value.message


def test_nobody_there():
    with (
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()


# Asyncio


async def test_eight_streams_of_one_async_client(gateway):
    """What each gives is what it gives alone."""

    async def text(client: AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            messages=[{"role": "user", "content": f"Number {number}?"}],
            model=MODEL,
            max_tokens=40,
            seed=number,
            stream=True,
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async with AsyncOpenAI(base_url=gateway.base_url, api_key="x", max_retries=0) as client:
        alone = [await text(client, number) for number in range(8)]
        together = await asyncio.gather(*(text(client, number) for number in range(8)))
    assert together == alone
    assert len(set(alone)) == 8
