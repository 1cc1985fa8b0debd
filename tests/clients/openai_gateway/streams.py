"""Streams that the tests start, follow and lose, on connections of their own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from clients.gateways import Gateway
from clients.raw_http import Connection, ask, request

from fakes import tokens_alone
from integration.front import VOCAB_SIZE, Front
from scheduler_service.request import Request, Sampling
from slotwise.v1 import inference_pb2 as pb

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def alone(num_tokens: int, seed: int = 7) -> list[int]:
    """The ids of this completion on the fake worker when nothing else runs."""
    sampling = Sampling(temperature=1, top_p=1, top_k=0, min_p=0, seed=seed)
    asked = Request("r", (11, 12, 13), sampling, num_tokens, frozenset(), 0)
    return tokens_alone(asked, VOCAB_SIZE)


def completion(num_tokens: int = 1500, **fields: Any) -> dict[str, Any]:
    """Of three ids, that no end id ends."""
    return {
        "model": "front-model",
        "prompt": [11, 12, 13],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 1,
        "seed": 7,
        **fields,
    }


async def start(connection: Connection, body: dict[str, Any], path: str = COMPLETIONS) -> None:
    """Sends it, and returns when the stream has begun."""
    await connection.send(request("POST", path, {"stream": True, **body}))
    head = await connection.head()
    assert head.status == 200, await connection.answer()
    assert head.headers["content-type"].startswith("text/event-stream")


async def token_ids(events: AsyncIterator[str], at_least: int) -> list[int]:
    """The ids of the stream's next chunks, until there are so many."""
    got: list[int] = []
    async for event in events:
        assert event != "[DONE]", got
        for choice in json.loads(event)["choices"]:
            got += choice.get("token_ids") or []
        if len(got) >= at_least:
            return got
    raise AssertionError(f"the stream ended after {got}")


def ids_of(chunks: Sequence[dict[str, Any]], index: int = 0) -> list[int]:
    """All ids of a choice."""
    return [
        token_id
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
        for token_id in choice.get("token_ids") or []
    ]


async def metrics(gateway: Gateway) -> dict[str, float]:
    """Samples by name and labels, as in the text."""
    answer = await ask(gateway.host_port, "GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    lines = [line for line in answer.body.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def idle(front: Front, **counts: int) -> pb.GetLoadResponse:
    """Waits until nothing runs or waits; these requests have ended since the start."""
    load = await front.until(lambda load: load.num_running == load.num_waiting == 0)
    got = {name: getattr(load.requests, name) for name in counts}
    assert got == counts
    return load


def num_steps(front: Front) -> int:
    """That the worker was told to run since its start."""
    return sum(command.num_steps for command in front.worker.commands)
