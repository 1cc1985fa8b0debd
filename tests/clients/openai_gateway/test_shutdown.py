"""B41 at the gateway: a signal cuts no stream that may end; what an end looks like otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from clients.gateways import Gateway, gateway_beside
from clients.openai_gateway.streams import (
    CHAT,
    COMPLETIONS,
    alone,
    completion,
    idle,
    ids_of,
    start,
    token_ids,
)
from clients.raw_http import Connection, ask, chunks_of, connection, request, until_ready
from openai import APIError, AsyncOpenAI

from integration.front import Front


@contextlib.asynccontextmanager
async def eight_streams(
    front: Front, gateway: Gateway, num_tokens: int
) -> AsyncIterator[list[tuple[Connection, AsyncIterator[str]]]]:
    """Held, with some tokens each; a command has up to some tens of steps."""
    meter = front.hold()
    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for number in range(8):
            opened = await stack.enter_async_context(connection(gateway.host_port))
            await start(opened, completion(num_tokens, seed=number))
            streams.append((opened, opened.events()))
        meter.allow(4)
        for _, events in streams:
            await token_ids(events, 1)
        yield streams


async def test_streams_end_whole_and_new_ones_go_elsewhere(front):
    async with (
        gateway_beside(front.address, "--grace", "3600") as gateway,
        connection(gateway.host_port) as whole,
    ):
        async with eight_streams(front, gateway, 1000) as streams:
            ready = await ask(gateway.host_port, "GET", "/ready")
            assert ready.status == 200
            # One whole answer is on its way too; it waits in the queue.
            await whole.send(request("POST", COMPLETIONS, completion(5)))
            await front.until(lambda load: load.num_waiting == 1)
            gateway.terminate()
            await until_ready(gateway.host_port, 503)
            ready = await ask(gateway.host_port, "GET", "/ready")
            assert (ready.status, ready.error["type"]) == (503, "service_unavailable")
            assert "shuts down" in ready.error["message"]
            assert (await ask(gateway.host_port, "GET", "/health")).status == 200
            for path in (COMPLETIONS, CHAT):
                refused = await ask(gateway.host_port, "POST", path, completion(5))
                assert (refused.status, refused.error["type"]) == (503, "service_unavailable")
                assert int(refused.headers["retry-after"]) > 0
            assert gateway.process.poll() is None
            front.release()
            for number, (_, events) in enumerate(streams):
                rest = chunks_of([event async for event in events])
                want = alone(1000, seed=number)
                got = ids_of(rest)
                assert got == want[-len(got) :]
            assert (await whole.answer()).json["usage"]["completion_tokens"] == 5
        assert await asyncio.to_thread(gateway.end) == 0
        await idle(front, length=9, cancelled=0, error=0)


async def test_a_passed_grace_ends_streams_with_an_error(front):
    async with gateway_beside(front.address, "--grace", "0.2") as gateway:
        async with eight_streams(front, gateway, 1500) as streams:
            gateway.terminate()
            for _, events in streams:
                last = [event async for event in events][-1]
                error = json.loads(last)["error"]
                assert error["type"] == "service_unavailable"
                assert sorted(error) == ["code", "message", "param", "type"]
        assert await asyncio.to_thread(gateway.end) == 0
        await idle(front, cancelled=8, length=0)


async def test_the_sdk_raises_what_the_event_says(front):
    front.hold()
    async with gateway_beside(front.address, "--grace", "0.2") as gateway:
        async with AsyncOpenAI(base_url=gateway.base_url, api_key="x", max_retries=0) as client:
            stream = await client.completions.create(
                model="front-model", prompt="hello", max_tokens=100, stream=True
            )
            await front.until(lambda load: load.num_running == 1)
            gateway.terminate()
            with pytest.raises(APIError) as ended:
                async for _ in stream:
                    pass
        assert ended.value.type == "service_unavailable"
        assert await asyncio.to_thread(gateway.end) == 0


async def test_a_second_signal_ends_at_once(front):
    """In spite of a long grace; nobody is left in a slot."""
    async with gateway_beside(front.address, "--grace", "3600") as gateway:
        async with eight_streams(front, gateway, 1500) as streams:
            gateway.terminate()
            await until_ready(gateway.host_port, 503)
            gateway.terminate()
            for opened, events in streams:
                # An error event or a broken connection, and no end that looks good.
                got = []
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                    got = [event async for event in events]
                assert "[DONE]" not in got
                opened.reset()
        assert await asyncio.to_thread(gateway.end) == 0
        await idle(front, cancelled=8, length=0)


async def test_an_idle_gateway_ends_at_once(front):
    """Also with connections that are kept open."""
    async with gateway_beside(front.address, "--grace", "3600") as gateway:
        async with connection(gateway.host_port) as opened:
            await opened.send(request("GET", "/health"))
            assert (await opened.answer()).status == 200
            gateway.terminate()
            assert await opened.at_end()
        assert await asyncio.to_thread(gateway.end) == 0
        assert gateway.events[0]["event"] == "ready"


async def test_the_servers_own_drain_reaches_the_clients(front, front_gateway):
    """New requests are told to go elsewhere; those that run end."""
    async with eight_streams(front, front_gateway, 1000) as streams:
        draining = asyncio.ensure_future(front.engine.drain(60))
        await until_ready(front_gateway.host_port, 503)
        refused = await ask(front_gateway.host_port, "POST", COMPLETIONS, completion(5))
        assert (refused.status, refused.error["type"]) == (503, "service_unavailable")
        front.release()
        for _, events in streams:
            assert [event async for event in events][-1] == "[DONE]"
        await draining
