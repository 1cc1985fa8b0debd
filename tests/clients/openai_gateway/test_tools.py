"""Tool calls and reasoning that a model writes of its own accord, through the SDK; the fake worker
writes what it is told, in the format of Qwen3."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest
from clients.gateways import gateway_beside
from clients.openai_gateway.streams import idle
from clients.raw_http import until_ready
from openai import AsyncOpenAI

from integration.front import Front, running_front
from slotwise.v1 import inference_pb2 as pb

QUESTION = [{"role": "user", "content": "What is the weather in Köln?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER_CALL = CALL.replace("Köln", "Paris")
THOUGHT = "<think>\nhm, Köln\n</think>\n\n"
ASKED: dict[str, Any] = {"model": "front-model", "messages": QUESTION, "tools": [WEATHER]}


@contextlib.asynccontextmanager
async def writing(
    model, folder, text: str, asked: dict[str, Any], by_chars: bool
) -> AsyncIterator[tuple[Front, AsyncOpenAI]]:
    """A gateway before a worker that answers this question with this text, then ends."""
    encode = model.tokenizer.encode
    parts = list(text) if by_chars else [text]
    ids = [i for part in parts for i in encode(part, parse_control_tokens=not by_chars)]
    prompt_len = 0

    def script(tokens):
        place = len(tokens) - prompt_len
        return ids[place] if 0 <= place < len(ids) else 2

    async with (
        running_front(model, folder, script, num_slots=2, max_seq_len=2048) as front,
        gateway_beside(front.address) as gateway,
        AsyncOpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as client,
    ):
        prompt_len = await prompt_tokens(front, asked)
        yield front, client


async def prompt_tokens(front: Front, asked: dict[str, Any]) -> int:
    tools = [
        pb.Tool(
            name=tool["function"]["name"],
            parameters_json=json.dumps(tool["function"]["parameters"]),
        )
        for tool in asked.get("tools", [])
    ]
    chat = pb.Chat(messages=[pb.ChatMessage(**one) for one in asked["messages"]], tools=tools)
    return len((await front.stub.RenderChat(pb.RenderChatRequest(chat=chat))).token_ids)


def parts_of(chunks: Sequence[Any]) -> tuple[str, str, list[list[str]], list[str]]:
    """Reasoning, text, calls as name and arguments, and finish reasons of a stream."""
    reasoning = text = ""
    calls: list[list[str]] = []
    reasons = []
    for chunk in chunks:
        (choice,) = chunk.choices
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
        text += choice.delta.content or ""
        for part in choice.delta.tool_calls or []:
            if part.id:
                assert part.index == len(calls)
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
    return reasoning, text, calls, reasons


@pytest.mark.parametrize("by_chars", [False, True])
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "cities"),
    [
        (f"{THOUGHT}One moment.\n{CALL}", "hm, Köln", "One moment.", ["Köln"]),
        (f"{THOUGHT}{CALL}\n{OTHER_CALL}", "hm, Köln", "", ["Köln", "Paris"]),
        (f"{THOUGHT}It is sunny.", "hm, Köln", "It is sunny.", []),
        ("It is sunny.", "", "It is sunny.", []),
    ],
)
async def test_what_the_model_writes_is_told_apart(
    front_model, tmp_path, text, reasoning, content, cities, by_chars
):
    async with writing(front_model, tmp_path, text, ASKED, by_chars) as (_, client):
        whole = (await client.chat.completions.create(**ASKED)).choices[0]
        stream = await client.chat.completions.create(stream=True, **ASKED)
        streamed = parts_of([chunk async for chunk in stream])
    made = [
        [call.function.name, call.function.arguments] for call in whole.message.tool_calls or []
    ]
    assert [[name, json.loads(arguments)] for name, arguments in made] == [
        ["weather", {"city": city}] for city in cities
    ]
    assert (whole.message.content or "") == content
    assert ((whole.message.model_extra or {}).get("reasoning_content") or "") == reasoning
    assert whole.finish_reason == ("tool_calls" if cities else "stop")
    assert streamed == (reasoning, content, made, [whole.finish_reason])


async def test_without_tools_a_call_is_text_or_told_apart_by_the_format(front_model, tmp_path):
    """With tool_choice none no call is ever told, and the prompt has no tools."""
    asked = {**ASKED, "tool_choice": "none"}
    plain = {**ASKED, "tools": []}
    async with writing(front_model, tmp_path, f"Well. {CALL}", plain, False) as (_, client):
        choice = (await client.chat.completions.create(**asked)).choices[0]
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert choice.message.content.startswith("Well.")


async def test_the_helper_of_the_sdk_gathers_the_calls(front_model, tmp_path):
    text = f"{THOUGHT}One moment.\n{CALL}"
    async with (
        writing(front_model, tmp_path, text, ASKED, True) as (_, client),
        client.chat.completions.stream(**ASKED) as stream,
    ):
        kinds = {event.type async for event in stream}
        message = (await stream.get_final_completion()).choices[0].message
    assert {"content.delta", "tool_calls.function.arguments.delta"} <= kinds
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Köln"}


# What the SDK does to leave


async def test_closing_a_stream_frees_the_slot(front, front_client):
    meter = front.hold()
    ours = {"ignore_eos": True, "return_token_ids": True}
    stream = await front_client.chat.completions.create(
        model="front-model", messages=QUESTION, stream=True, extra_body=ours
    )
    meter.allow(3)
    async for chunk in stream:
        if (chunk.choices[0].model_extra or {}).get("token_ids"):
            break
    await stream.close()
    await idle(front, cancelled=1, error=0)


async def test_leaving_a_stream_in_its_block_frees_the_slot(front, front_client):
    front.hold()
    stream = await front_client.completions.create(
        model="front-model", prompt="hello", stream=True, max_tokens=1000
    )
    async with stream:
        await front.until(lambda load: load.num_running == 1)
    await idle(front, cancelled=1, error=0)


async def test_a_call_that_times_out_frees_the_slot(front, front_client):
    """Not streamed: the SDK closes the connection when its own time is up."""
    front.hold()
    patient = front_client.with_options(timeout=2.0)
    call = asyncio.ensure_future(
        patient.chat.completions.create(model="front-model", messages=QUESTION)
    )
    await front.until(lambda load: load.num_running == 1)
    with pytest.raises(openai.APITimeoutError):
        await call
    await idle(front, cancelled=1, error=0)


async def test_a_cancelled_task_frees_the_slot(front, front_client):
    front.hold()
    call = asyncio.ensure_future(
        front_client.chat.completions.create(model="front-model", messages=QUESTION)
    )
    await front.until(lambda load: load.num_running == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await idle(front, cancelled=1, error=0)


async def test_a_full_queue_and_a_server_that_drains(front_model, tmp_path):
    """429 and 503, as errors of the SDK, with the time to wait."""
    async with (
        running_front(front_model, tmp_path, num_slots=1, max_queue_len=1) as front,
        gateway_beside(front.address) as gateway,
        AsyncOpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as client,
    ):
        meter = front.hold()
        asked = {"model": "front-model", "prompt": "hello", "max_tokens": 2}
        first = asyncio.ensure_future(client.completions.create(**asked))
        await front.until(lambda load: load.num_running == 1)
        second = asyncio.ensure_future(client.completions.create(**asked))
        await front.until(lambda load: load.num_waiting == 1)
        with pytest.raises(openai.RateLimitError) as full:
            await client.completions.create(**asked)
        assert full.value.code == "queue_full"
        assert float(full.value.response.headers["retry-after"]) > 0
        draining = asyncio.ensure_future(front.engine.drain(60))
        await until_ready(gateway.host_port, 503)
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(**asked)
        assert refused.value.status_code == 503
        meter.allow(100)
        for call in (first, second):
            assert (await call).usage.completion_tokens >= 1
        await draining
