"""Which prompts the gateway sends where."""

from __future__ import annotations

import asyncio

import pytest
from clients.scripted_server import SERVICE
from grpc_health.v1 import health_pb2

from slotwise_client import Chat, Message
from slotwise_gateway import upstream as module
from slotwise_gateway.config import Config
from slotwise_gateway.routing_key import routing_key
from slotwise_gateway.upstream import State, Upstream


def key(*turns: tuple[str, str], salt: str | None = None, cache_key: str | None = None) -> str:
    return routing_key(Chat([Message(*turn) for turn in turns]), cache_key, salt)


SYSTEM = ("system", "Be brief. " * 1000)
FIRST = key(SYSTEM, ("user", "Why?"))


def test_a_conversation_stays():
    assert key(SYSTEM, ("user", "Why?"), ("assistant", "So."), ("user", "And?")) == FIRST


@pytest.mark.parametrize(
    "other",
    [
        key(SYSTEM, ("user", "Who?")),
        key(("system", "Be long."), ("user", "Why?")),
        key(SYSTEM, ("user", "Why?"), salt="tenant"),
        key(SYSTEM, ("user", "Why?"), cache_key="mine"),
        # Parts are told apart where they meet.
        key(("system", SYSTEM[1][:-1]), ("user", SYSTEM[1][-1] + "Why?")),
    ],
)
def test_another_one_goes_its_own_way(other):
    assert other != FIRST


def test_the_caller_decides():
    assert key(("user", "a"), cache_key="ä" * 512) == key(("user", "b"), cache_key="ä" * 512)
    assert key(("user", "a"), cache_key="") == key(("user", "a"))


def test_a_prompt_that_grows_stays_once_it_is_long():
    assert routing_key("a" * 600, None, None) == routing_key("a" * 700, None, None)
    assert routing_key("a", None, None) != routing_key("b", None, None)
    assert routing_key([1, 2], None, None) != routing_key([12], None, None)
    assert routing_key(list(range(200)), None, None) == routing_key(list(range(300)), None, None)


def test_text_that_is_no_unicode_has_a_key():
    assert key(("user", "\ud800")) != key(("user", "\ud801"))


async def until(upstream: Upstream, state: State) -> None:
    async with asyncio.timeout(60):
        while upstream.state is not state:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_behind_a_balancer_one_unready_answer_is_no_loss(served, monkeypatch):
    """The next question reaches another replica; who keeps saying no is believed in the end."""
    monkeypatch.setattr(module, "ASK_S", 0.01)
    losses = []
    upstream = Upstream(Config(server=served.address, balanced=True), losses.append)
    try:
        await until(upstream, State.SERVING)
        monkeypatch.setattr(module, "UNREADY_S", 1e6)
        asked, seen = upstream._asked, []

        async def noting():
            seen.append(await asked())
            return seen[-1]

        monkeypatch.setattr(upstream, "_asked", noting)
        served.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        async with asyncio.timeout(60):
            while State.NOT_SERVING not in seen:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert upstream.state is State.SERVING
        assert losses == []
        monkeypatch.setattr(module, "UNREADY_S", 0.0)
        await until(upstream, State.NOT_SERVING)
        assert losses
    finally:
        await upstream.close()
