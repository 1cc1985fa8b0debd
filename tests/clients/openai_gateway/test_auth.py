"""Who may call: tokens on their way through the gateway, and TLS on both its sides."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import openai
import pytest
from certificates import Authority
from clients.gateways import Gateway, gateway_beside, running_gateway
from clients.openai_gateway.streams import COMPLETIONS, completion
from clients.raw_http import ask, connection, request
from openai import AsyncOpenAI

from integration.front import WAIT_S, Front, running_front
from integration.servers import running_server
from scheduler_service.auth import Callers
from slotwise.v1 import inference_pb2 as pb

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
ENTRIES = [
    {"name": "alice", "token": ALICE, "max_running": 1, "max_waiting": 1},
    {"name": "bob", "token": BOB},
]


def write_tokens(folder: Path) -> Path:
    path = folder / "tokens.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(ENTRIES))
    return path


@pytest.fixture
async def front(front_model, tmp_path) -> AsyncIterator[Front]:
    """Two slots; alice may have one of them, and one more request may wait for her."""
    callers = Callers(write_tokens(tmp_path))
    options = {"num_slots": 2, "max_seq_len": 2048}
    async with running_front(front_model, tmp_path, callers=callers, **options) as running:
        yield running


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_a_callers_token_is_passed_on(front, front_gateway):
    for token in (ALICE, BOB):
        answer = await ask(
            front_gateway.host_port, "POST", COMPLETIONS, completion(2), bearer(token)
        )
        assert answer.status == 200
    assert "0123456789" not in "".join(front_gateway.log)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "Bearer ",
        "Bearer wrong-0123456789abcdef",
        "Basic YTpi",
        "bearer",
        ALICE,
        "Bearer " + "x" * 5000,
        "Bearer a b",
        "Bearer \u00e4",
    ],
)
async def test_missing_and_wrong_tokens(front_gateway, value):
    """401 in OpenAI's shape on every route that asks the server; also when others were told what it
    serves."""
    told = await ask(front_gateway.host_port, "GET", "/v1/models", None, bearer(BOB))
    assert told.status == 200
    good = await ask(front_gateway.host_port, "POST", COMPLETIONS, completion(1), bearer(BOB))
    assert good.status == 200
    for method, path, body in (
        ("POST", COMPLETIONS, completion(2)),
        ("POST", COMPLETIONS, completion(2, stream=True)),
        ("POST", "/v1/chat/completions", {"model": "front-model", "messages": []}),
        ("GET", "/v1/models", None),
    ):
        headers = {"Authorization": value}
        answer = await ask(front_gateway.host_port, method, path, body, headers)
        if path == "/v1/chat/completions" and answer.status == 400:
            continue  # What is wrong in itself may be told before.
        assert answer.status == 401, (value, path, answer)
        assert answer.error["type"] == "authentication_error"
        assert answer.error["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert "0123456789" not in answer.error["message"]


async def test_what_needs_no_token(front_gateway):
    for path in ("/health", "/ready"):
        assert (await ask(front_gateway.host_port, "GET", path)).status == 200


async def test_the_gateways_own_token_is_for_those_who_bring_none(front):
    env = {"SLOTWISE_TOKEN": BOB}
    async with gateway_beside(front.address, env=env) as gateway:
        answer = await ask(gateway.host_port, "POST", COMPLETIONS, completion(2))
        assert answer.status == 200
        wrong = await ask(
            gateway.host_port, "POST", COMPLETIONS, completion(2), bearer("wrong-0123456789")
        )
        assert wrong.status == 401
        metrics = await ask(gateway.host_port, "GET", "/metrics")
        assert b"slotwise:num_requests_running 0" in metrics.body


async def test_the_sdk_raises_its_own_errors(front, front_gateway):
    url = front_gateway.base_url
    meter = front.hold()
    async with AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.models.list()
        assert refused.value.code == "invalid_api_key"
    async with (
        connection(front_gateway.host_port) as running,
        connection(front_gateway.host_port) as waiting,
        AsyncOpenAI(base_url=url, api_key=ALICE, max_retries=0) as client,
    ):
        for opened in (running, waiting):
            body = completion(3, stream=True)
            await opened.send(request("POST", COMPLETIONS, body, bearer(ALICE)))
            assert (await opened.head()).status == 200
        with pytest.raises(openai.RateLimitError) as full:
            await client.completions.create(model="front-model", prompt="a", max_tokens=2)
        assert full.value.code == "queue_full"
        assert full.value.type == "rate_limit_error"
        assert float(full.value.response.headers["retry-after"]) > 0
        meter.allow(1000)
        for opened in (running, waiting):
            assert [event async for event in opened.events()][-1] == "[DONE]"


async def test_a_retry_of_the_sdk_succeeds(front, front_gateway):
    """It waits as it is told, by the header."""
    front.hold()
    url = front_gateway.base_url
    async with (
        connection(front_gateway.host_port) as first,
        connection(front_gateway.host_port) as second,
        AsyncOpenAI(base_url=url, api_key=ALICE, max_retries=5) as client,
    ):
        for opened in (first, second):
            body = completion(3, stream=True)
            await opened.send(request("POST", COMPLETIONS, body, bearer(ALICE)))
            assert (await opened.head()).status == 200
        tried = asyncio.ensure_future(
            client.completions.create(model="front-model", prompt="a", max_tokens=2)
        )
        await until(front, lambda load: load.requests.rejected_full > 0)
        front.release()
        assert (await asyncio.wait_for(tried, WAIT_S)).usage.completion_tokens >= 1


async def until(front: Front, condition: Callable[[pb.GetLoadResponse], bool]) -> None:
    """As of Front, with a token."""
    metadata = (("authorization", f"Bearer {BOB}"),)
    async with asyncio.timeout(WAIT_S):
        while True:
            asked = front.stub.GetLoad(pb.GetLoadRequest(), timeout=WAIT_S, metadata=metadata)
            if condition(await asked):
                return


async def test_another_callers_request_id(front, front_gateway):
    """A name in use is refused, and nothing of its owner's stream is told."""
    meter = front.hold()
    named = {"X-Request-Id": "mine"}
    async with connection(front_gateway.host_port) as opened:
        body = completion(3, stream=True)
        await opened.send(request("POST", COMPLETIONS, body, bearer(BOB) | named))
        assert (await opened.head()).status == 200
        answer = await ask(
            front_gateway.host_port, "POST", COMPLETIONS, completion(3), bearer(ALICE) | named
        )
        assert 400 <= answer.status < 500
        assert answer.error["type"]
        meter.allow(100)
        assert [event async for event in opened.events()][-1] == "[DONE]"


async def test_a_client_that_leaves_ends_its_own_request(front, front_gateway):
    """The cancel goes by the caller's token."""
    front.hold()
    for token in (ALICE, BOB):
        async with connection(front_gateway.host_port) as opened:
            body = completion(1000, stream=True)
            await opened.send(request("POST", COMPLETIONS, body, bearer(token)))
            assert (await opened.head()).status == 200
    await until(front, lambda load: load.num_running == load.num_waiting == 0)
    await until(front, lambda load: load.requests.cancelled == 2)


def test_tls_on_both_sides(chat_checkpoint, tmp_path):
    """Of the gateway's own port, and to a server that wants a certificate."""
    inner, outer = Authority(tmp_path, "inner"), Authority(tmp_path, "outer")
    port, web, own = inner.pair("port"), outer.pair("web"), inner.client("gateway")
    flags = ["--tls-cert", str(port.cert), "--tls-key", str(port.key)]
    flags += ["--tls-client-ca", str(inner.path), "--tokens", str(write_tokens(tmp_path))]
    https = ["--https-cert", str(web.cert), "--https-key", str(web.key)]
    tls = ["--tls-ca", str(inner.path), "--tls-cert", str(own.cert), "--tls-key", str(own.key)]
    flags += ["--num-slots", "1", "--threads", "1"]
    with (
        running_server(chat_checkpoint, *flags) as server,
        running_gateway(server.address, *https, *tls) as gateway,
    ):
        assert gateway.url.startswith("https://")
        assert over_tls(gateway, outer, BOB).usage.completion_tokens == 4
        with pytest.raises(openai.AuthenticationError):
            over_tls(gateway, outer, "wrong-0123456789abcdef")
        # Signed by another.
        with pytest.raises(openai.APIConnectionError):
            over_tls(gateway, inner, BOB)


def over_tls(gateway: Gateway, ca: Authority, token: str):
    http_client = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=ca.path))
    url = gateway.base_url
    with openai.OpenAI(
        base_url=url, api_key=token, max_retries=0, http_client=http_client
    ) as client:
        return client.completions.create(
            model="tiny", prompt="a", max_tokens=4, extra_body={"ignore_eos": True}
        )
