from __future__ import annotations

import asyncio
import logging

import pytest
from clients.scripted_server import SERVICE
from grpc_health.v1 import health_pb2

from slotwise_gateway.config import Config
from slotwise_gateway.errors import ApiError
from slotwise_gateway.upstream import State, Upstream


class Seen:
    """What an Upstream told of losses."""

    def __init__(self) -> None:
        self.losses: list[ApiError] = []
        self.changed = asyncio.Event()

    def __call__(self, error: ApiError) -> None:
        self.losses.append(error)
        self.changed.set()

    async def next(self) -> ApiError:
        async with asyncio.timeout(30):
            await self.changed.wait()
        self.changed.clear()
        return self.losses[-1]


async def test_the_first_word_is_waited_for(served):
    upstream = Upstream(Config(server=served.address), Seen())
    try:
        assert upstream.state is State.UNKNOWN
        await upstream.check_ready()
        assert upstream.state is State.SERVING
    finally:
        await upstream.close()


class Warned(logging.Handler):
    """Waits for a warning of the upstream's."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.message = asyncio.get_running_loop().create_future()

    def emit(self, record: logging.LogRecord) -> None:
        if not self.message.done():
            self.message.set_result(record.getMessage())


@pytest.fixture
async def warned():
    handler, logger = Warned(), logging.getLogger("slotwise_gateway.upstream")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


async def test_a_server_that_is_not_there(monkeypatch, warned):
    monkeypatch.setattr("slotwise_gateway.upstream.FIRST_ANSWER_S", 0.01)
    upstream = Upstream(Config(server="127.0.0.1:1"), Seen())
    try:
        with pytest.raises(ApiError, match="no answer from the model's server yet") as raised:
            await upstream.check_ready()
        assert raised.value.status == 503
        async with asyncio.timeout(30):
            told = await warned.message
    finally:
        await upstream.close()
    assert "no answer from 127.0.0.1:1: " in told
    assert "refused" in told
    assert told.endswith("; it is waited for")


async def test_the_model_is_asked_for_once_in_each_life_of_the_server(served):
    seen = Seen()
    upstream = Upstream(Config(server=served.address), seen)
    try:
        await upstream.check_ready()
        client = upstream.client(None)
        first = await upstream.model(client)
        assert await upstream.model(client) is first
        served.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert "not ready" in (await seen.next()).message
        assert await upstream.model(client) is not first
    finally:
        await upstream.close()


async def test_a_server_that_is_lost_and_comes_back(lossy, warned):
    seen = Seen()
    upstream = Upstream(Config(server=lossy.address), seen)
    try:
        await upstream.check_ready()
        for break_connection in lossy.script.break_connections:
            break_connection()
        assert "is lost" in (await seen.next()).message
        assert f"{lossy.address}: " in warned.message.result()
        async with asyncio.timeout(30):
            while upstream.state is not State.SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0)
    finally:
        await upstream.close()


async def test_whose_token_goes_along(served):
    upstream = Upstream(Config(server=served.address, token="own"), Seen())
    try:
        await upstream.client("caller").load()
        await upstream.client(None).load()
        assert served.script.tokens == ["Bearer caller", "Bearer own"]
    finally:
        await upstream.close()
