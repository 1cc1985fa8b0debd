"""The application on a port, before a scripted gRPC server."""

from __future__ import annotations

import asyncio
import json

import pytest
from clients.openai_gateway.in_process import gateway_for
from clients.raw_http import ask, chunks_of, connection, request, until_ready
from clients.scripted_server import (
    BLOCKED_S,
    SERVICE,
    Script,
    bad_field,
    queue_full,
    scripted_server,
    status,
)
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2

from slotwise_gateway import generation
from slotwise_gateway.config import Limits
from slotwise_gateway.errors import unavailable

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY = {"model": "script", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "script", "prompt": "hi"}


@pytest.fixture
def served():
    with scripted_server() as server:
        yield server


@pytest.fixture
async def address(served):
    async with gateway_for(served.address, model_aliases=("gpt",)) as (_, address):
        yield address


def asked(served, kind="GenerateRequest"):
    return [one for one in served.script.requests if type(one).__name__ == kind]


async def test_a_whole_chat(served, address):
    headers = {"X-Request-Id": "mine", "Authorization": "Bearer secret"}
    answer = await ask(address, "POST", CHAT, {**BODY, "temperature": 0}, headers)
    assert answer.status == 200
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json["id"] == "chatcmpl-mine"
    assert (answer.json["model"], answer.json["system_fingerprint"]) == ("script", "f00")
    (choice,) = answer.json["choices"]
    assert choice["message"]["content"] == "The capital is Paris."
    assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
    (sent,) = asked(served)
    assert sent.request_id == "mine"
    assert sent.chat.messages[0].content == "hi"
    assert sent.sampling.temperature == 0
    # Each call of it is the caller's own.
    assert served.script.tokens == ["Bearer secret"] * 2


async def test_a_streamed_chat(address):
    body = {**BODY, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    async with connection(address) as opened:
        await opened.send(request("POST", CHAT, body))
        head = await opened.head()
        assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert head.headers["x-accel-buffering"] == "no"
        chunks = chunks_of([event async for event in opened.events()])
        # The connection can be used again.
        await opened.send(request("GET", "/health"))
        assert (await opened.answer()).status == 200
    texts = ["", ""]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["The capital is Paris."] * 2
    assert chunks[-1]["usage"]["completion_tokens"] == 10


async def test_completions_of_several_prompts(served, address):
    body = {**PROMPT, "prompt": [[97], [5]], "echo": True}
    answer = await ask(address, "POST", COMPLETIONS, body, {"X-Request-Id": "r"})
    texts = [choice["text"] for choice in answer.json["choices"]]
    assert texts == ["aThe capital is Paris.", "\x05The capital is Paris."]
    assert sorted(one.request_id for one in asked(served)) == ["r-0", "r-1"]
    async with connection(address) as opened:
        await opened.send(
            request("POST", COMPLETIONS, {**PROMPT, "prompt": ["a", "b"], "stream": True})
        )
        await opened.head()
        chunks = chunks_of([event async for event in opened.events()])
    indexes = {choice["index"] for chunk in chunks for choice in chunk["choices"]}
    assert indexes == {0, 1}


async def test_an_alias_is_the_model_by_another_name(address):
    answer = await ask(address, "POST", CHAT, {**BODY, "model": "gpt"})
    assert answer.json["model"] == "script"
    answer = await ask(address, "POST", CHAT, {**BODY, "model": "gpt-4"})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (
        404,
        "model",
        "model_not_found",
    )
    assert (await ask(address, "POST", CHAT, {**BODY, "model": ""})).status == 400


async def test_models(served, address):
    answer = await ask(address, "GET", "/v1/models", headers={"Authorization": "Bearer t"})
    assert [card["id"] for card in answer.json["data"]] == ["script", "gpt"]
    assert served.script.tokens[-1] == "Bearer t"
    assert (await ask(address, "GET", "/v1/models/gpt")).json["object"] == "model"
    assert (await ask(address, "GET", "/v1/models/other")).error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "code", "allow"),
    [
        ("GET", "/v1", 404, None),
        ("POST", f"{CHAT}/", 404, None),
        ("GET", CHAT, 405, "POST"),
        ("DELETE", "/v1/models", 405, "GET, HEAD"),
    ],
)
async def test_other_paths_and_methods(address, method, path, code, allow):
    answer = await ask(address, method, path)
    assert (answer.status, answer.headers.get("allow")) == (code, allow)
    assert path in answer.error["message"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("error", "code", "param"),
    [
        (bad_field("sampling.top_p", "2 is out of range"), 400, "top_p"),
        (queue_full(2, 0), 429, None),
        (status(code_pb2.INTERNAL, "a bug"), 500, None),
        (status(code_pb2.PERMISSION_DENIED, "no"), 403, None),
        (status(code_pb2.UNAUTHENTICATED, "who"), 401, None),
        (status(code_pb2.DEADLINE_EXCEEDED, "late"), 504, None),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_errors_of_the_server(served, address, error, code, param, streams):
    assert (await ask(address, "POST", CHAT, BODY)).status == 200
    served.script.error = error
    answer = await ask(address, "POST", CHAT, {**BODY, "stream": streams})
    assert (answer.status, answer.error["param"]) == (code, param)


async def test_ready_and_models_while_the_server_is_not(served, address):
    assert (await ask(address, "GET", "/ready")).status == 200
    async with gateway_for(served.address) as (gateway, other):
        served.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        async with asyncio.timeout(30):
            while gateway.upstream.state.name == "SERVING":  # noqa: ASYNC110
                await asyncio.sleep(0)
        for method, path, body in (
            ("GET", "/ready", None),
            ("GET", "/v1/models", None),
            ("POST", CHAT, BODY),
        ):
            answer = await ask(other, method, path, body)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert "not ready" in answer.error["message"]
        assert (await ask(other, "GET", "/health")).status == 200
        served.health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await until_ready(other)


async def test_metrics(served, address):
    await ask(address, "POST", CHAT, BODY)
    await ask(address, "POST", CHAT, {})
    text = (await ask(address, "GET", "/metrics")).body.decode()
    lines = text.splitlines()
    for line in (
        "slotwise:num_requests_running 1.0",
        f'slotwise_gateway:requests_total{{route="{CHAT}",status="200"}} 1.0',
        f'slotwise_gateway:requests_total{{route="{CHAT}",status="400"}} 1.0',
        "slotwise_gateway:open_streams 0.0",
        "slotwise_gateway:server_up 1.0",
    ):
        assert line in lines, line
    served.script.error = status(code_pb2.INTERNAL, "a bug")
    lines = (await ask(address, "GET", "/metrics")).body.decode().splitlines()
    assert "slotwise_gateway:server_up 0.0" in lines
    served.script.error = status(code_pb2.UNAUTHENTICATED, "who")
    assert (await ask(address, "GET", "/metrics")).status == 401


async def test_a_token_that_may_not_be_passed_on(served):
    """The way to the server is plain, and not known to be local."""
    async with gateway_for(served.address) as (gateway, address):
        object.__setattr__(gateway.config, "server", "elsewhere:50051")
        assert not gateway.config.may_send_tokens
        headers = {"Authorization": "Bearer secret"}
        assert (await ask(address, "POST", CHAT, BODY, headers)).status == 200
        assert served.script.tokens == [None, None]
        served.script.error = status(code_pb2.UNAUTHENTICATED, "who")
        answer = await ask(address, "POST", CHAT, BODY, headers)
        assert answer.status == 500
        assert "--insecure-tokens" in answer.error["message"]


async def test_what_runs_when_the_gateway_ends(served):
    served.script.blocked = True
    async with gateway_for(served.address) as (gateway, address), connection(address) as opened:
        await opened.send(request("POST", CHAT, {**BODY, "stream": True}))
        await opened.head()
        events = opened.events()
        assert json.loads(await anext(events))["choices"][0]["delta"]["role"] == "assistant"
        assert json.loads(await anext(events))["choices"][0]["delta"]["content"] == "The"
        gateway.drain()
        answer = await ask(address, "POST", CHAT, BODY)
        assert answer.status == 503
        assert "shuts down" in answer.error["message"]
        assert (await ask(address, "GET", "/ready")).status == 503
        waiting = asyncio.create_task(gateway.wait_idle())
        gateway.end_runs()
        (last,) = [event async for event in events]
        assert json.loads(last)["error"]["code"] == "service_unavailable"
        async with asyncio.timeout(30):
            await waiting


async def test_a_client_that_leaves_frees_the_slot(served, address):
    served.script.blocked = True
    async with connection(address) as opened:
        await opened.send(request("POST", CHAT, {**BODY, "stream": True}, {"X-Request-Id": "r"}))
        await opened.head()
    assert await asyncio.to_thread(served.script.ended.wait, 30)
    async with asyncio.timeout(30):
        while not asked(served, "CancelRequest"):  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert asked(served, "CancelRequest")[0].request_id == "r"


async def test_a_silent_stream_says_that_it_lives(served):
    served.script.blocked = True
    running = gateway_for(served.address, keep_alive_s=0.05)
    async with running as (_, address), connection(address) as opened:
        await opened.send(request("POST", CHAT, {**BODY, "stream": True}))
        await opened.head()
        chunks = opened.chunks()
        async with asyncio.timeout(30):
            while await anext(chunks) != b": waiting\n\n":
                pass


async def test_a_client_that_does_not_read_is_cut_off(served, monkeypatch):
    """The slot of an answer that nobody takes is free again."""
    monkeypatch.setattr(generation, "COMMENT", b":" + b" " * (1 << 20) + b"\n\n")
    served.script.blocked = True
    settings = {"keep_alive_s": 0.01, "limits": Limits(body_s=0.1)}
    running = gateway_for(served.address, **settings)
    async with running as (_, address), connection(address) as opened:
        await opened.send(request("POST", CHAT, {**BODY, "stream": True}))
        assert await asyncio.to_thread(served.script.ended.wait, 30)


async def test_what_the_server_has_not_taken_when_it_is_lost(served):
    """It would be tried again for a minute, and the caller could go elsewhere."""

    class Never(Script):
        def Generate(self, request, context):  # noqa: N802
            self.first_delta.set()
            context.add_callback(self.ended.set)
            self.ended.wait(BLOCKED_S)
            yield from ()

    with scripted_server(Never()) as server:
        async with gateway_for(server.address) as (gateway, address):
            asking = asyncio.create_task(ask(address, "POST", CHAT, BODY))
            assert await asyncio.to_thread(server.script.first_delta.wait, 30)
            gateway._end_waiting(unavailable("it is lost"))
            answer = await asking
            assert (answer.status, answer.error["message"]) == (503, "it is lost")


async def test_a_fault_of_the_gateway(served, monkeypatch):
    async with gateway_for(served.address) as (gateway, address):
        monkeypatch.setattr(gateway.upstream, "client", None)
        answer = await ask(address, "POST", CHAT, BODY)
        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert answer.headers["x-request-id"]
        assert (await ask(address, "GET", "/health")).status == 200
