"""Eight streams at once through the gateway: the tokens and the text of gRPC, in one batch."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from clients.openai_gateway.streams import (
    CHAT,
    COMPLETIONS,
    completion,
    ids_of,
    metrics,
    start,
    token_ids,
)
from clients.raw_http import ask, chunks_of, connection
from openai import AsyncOpenAI

from integration.streams import Generation
from scheduler_service.step import DecodeRow
from slotwise.v1 import inference_pb2 as pb

MODEL = "tiny"
NUM_TOKENS = 60
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 1234},
    "penalties": {
        "temperature": 1,
        "seed": 5,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
    },
}
OURS = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}


def question(number: int) -> str:
    return f"Question number {number}: what is {number} times {number + 1}?" + " So?" * number


@pytest.mark.parametrize("kind", SAMPLINGS)
async def test_eight_streams_are_those_of_grpc(server, gateway, kind):
    """Chats and plain texts."""
    sampling, ours = SAMPLINGS[kind], OURS if kind == "penalties" else {}

    def want(number: int) -> Generation:
        asked = pb.GenerateRequest(
            sampling=pb.SamplingParams(**sampling, **ours), max_new_tokens=NUM_TOKENS
        )
        if number % 2:
            asked.text = question(number)
        else:
            asked.chat.messages.add(role="user", content=question(number))
        return server.collect(asked)

    async def through_the_gateway(client: AsyncOpenAI, number: int) -> tuple[list[int], str]:
        options: dict[str, Any] = {"model": MODEL, "max_tokens": NUM_TOKENS, **sampling}
        options["extra_body"] = {"return_token_ids": True, **ours}
        ids, text = [], ""
        if number % 2:
            stream = await client.completions.create(
                prompt=question(number), stream=True, **options
            )
            async for chunk in stream:
                text += chunk.choices[0].text
                ids += (chunk.choices[0].model_extra or {}).get("token_ids") or []
        else:
            messages = [{"role": "user", "content": question(number)}]
            stream = await client.chat.completions.create(messages=messages, stream=True, **options)
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                ids += (chunk.choices[0].model_extra or {}).get("token_ids") or []
        return ids, text

    wanted = await asyncio.to_thread(lambda: [want(number) for number in range(8)])
    async with AsyncOpenAI(base_url=gateway.base_url, api_key="x", max_retries=0) as client:
        got = await asyncio.gather(*(through_the_gateway(client, n) for n in range(8)))
    assert [ids for ids, _ in got] == [one.token_ids for one in wanted]
    assert [text for _, text in got] == [one.text for one in wanted]
    assert len({tuple(ids) for ids, _ in got}) == 8


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_eight_streams_run_in_one_batch(front, front_gateway, path):
    """The gauge peaks at eight, and the worker computes all of them in a step."""
    meter = front.hold()
    assert (await metrics(front_gateway))["slotwise:num_requests_running"] == 0
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for number in range(8):
            opened = await stack.enter_async_context(connection(front_gateway.host_port))
            body = completion(1000, seed=number)
            if path == CHAT:
                del body["prompt"]
                body["messages"] = [{"role": "user", "content": "hello"}]
            await start(opened, body, path)
            clients.append(opened)
        # Each has up to some tens of steps.
        meter.allow(4)
        streams = [opened.events() for opened in clients]
        for events in streams:
            await token_ids(events, 2)
        running = await metrics(front_gateway)
        assert running["slotwise:num_requests_running"] == 8
        assert running["slotwise:num_requests_waiting"] == 0
        assert running["slotwise_gateway:open_streams"] == 8
        front.release()
        for events in streams:
            assert [event async for event in events][-1] == "[DONE]"
    sizes = {len(command.rows) for command in front.worker.commands}
    assert max(sizes) == 8
    full = [command for command in front.worker.commands if len(command.rows) == 8]
    assert any(all(isinstance(row, DecodeRow) for row in command.rows) for command in full)
    await front.until(lambda load: load.num_running == 0)
    idle = await metrics(front_gateway)
    assert idle["slotwise:num_requests_running"] == 0
    assert idle['slotwise:request_success_total{finished_reason="length"}'] == 8
    assert idle["slotwise:generation_tokens_total"] == 8 * 1000


async def test_whole_answers_are_batched_too(front, front_gateway):
    """Eight that wait on one gateway at a time, and a prompt of eight parts."""
    meter = front.hold()
    calls = [
        asyncio.ensure_future(
            ask(front_gateway.host_port, "POST", COMPLETIONS, completion(500, seed=number))
        )
        for number in range(4)
    ]
    several = completion(500, prompt=[[11, 12, 13]] * 2, n=2, seed=100)
    calls.append(asyncio.ensure_future(ask(front_gateway.host_port, "POST", COMPLETIONS, several)))
    await front.until(lambda load: load.num_running + load.num_waiting == 8)
    meter.allow(2)
    await front.until(lambda load: load.num_running == 8)
    front.release()
    answers = [await call for call in calls]
    assert [len(answer.json["choices"]) for answer in answers] == [1, 1, 1, 1, 4]
    assert [choice["index"] for choice in answers[4].json["choices"]] == [0, 1, 2, 3]


async def test_chunks_join_to_the_whole_answer(front, front_gateway):
    """Each token once, in whole characters."""
    body = completion(300)
    whole = (await ask(front_gateway.host_port, "POST", COMPLETIONS, body)).json["choices"][0]
    async with connection(front_gateway.host_port) as opened:
        await start(opened, body)
        chunks = chunks_of([event async for event in opened.events()])
    assert ids_of(chunks) == whole["token_ids"]
    assert len(whole["token_ids"]) == 300
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
