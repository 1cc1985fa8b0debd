"""Bad requests of every kind: OpenAI's shape of errors, the right status, the field by its name;
and a stream that runs beside them, whose tokens do not change."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from clients.gateways import Gateway, gateway_beside
from clients.openai_gateway.streams import (
    CHAT,
    COMPLETIONS,
    alone,
    completion,
    idle,
    ids_of,
    metrics,
    start,
)
from clients.raw_http import Answer, ask, chunks_of, connection, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as params
from openai.types.chat import completion_create_params as chat_params

from integration.front import Front

MODEL = "front-model"
MESSAGES = [{"role": "user", "content": "hello"}]
GOOD_CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
GOOD = {COMPLETIONS: completion(2), CHAT: GOOD_CHAT}
# More than a few commands of the worker, each of up to some tens of steps.
BESIDE = 400


@contextlib.asynccontextmanager
async def beside_a_stream(front: Front, gateway: Gateway) -> AsyncIterator[None]:
    """Through the gateway too; it begins before and ends after, with the tokens it has alone."""
    meter = front.hold()
    async with connection(gateway.host_port) as opened:
        await start(opened, completion(BESIDE))
        await front.until(lambda load: load.num_running == 1)
        meter.allow(2)
        yield
        front.release()
        chunks = chunks_of([event async for event in opened.events()])
    assert ids_of(chunks) == alone(BESIDE)


def check_refused(answer: Answer, status: int, param: str | None = None) -> None:
    assert answer.status == status, (answer.status, answer.body[:500])
    error = answer.error
    if status in (400, 413, 415):
        assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param, error


# Bodies


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_bodies_that_are_no_object_of_json(front, front_gateway, path):
    good = json.dumps(GOOD[path])[:-1]
    bodies = [
        b"",
        b" ",
        b"{",
        b"not json",
        b"[]",
        b"null",
        b"5",
        b'"text"',
        json.dumps(GOOD[path]).encode()[:-1],
        json.dumps(GOOD[path]).encode() + b"{}",
        f'{good}, "temperature": NaN}}'.encode(),
        f'{good}, "temperature": Infinity}}'.encode(),
        f'{good}, "temperature": -Infinity}}'.encode(),
        f'{good}, "temperature": 1e999}}'.encode(),
        f'{good}, "temperature": 01}}'.encode(),
        f'{good}, "temperature": 1, "temperature": 0}}'.encode(),
        f"{good}, 'temperature': 1}}".encode(),
        f'{good}, "user": "\xff"}}'.encode("latin-1"),
        f'{good}, "user": "\\ud800"}}'.encode(),
        f'{good}, "user": "\\ud800", "seed": 1}}'.encode(),
        f'{good}, "metadata": {"[" * 100_000}'.encode(),
        f'{good}, "metadata": {"[" * 5000}{"]" * 5000}}}'.encode(),
        f'{good}, "seed": {"9" * 5000}}}'.encode(),
        json.dumps(GOOD[path]).encode("utf-16"),
        b"\x1f\x8b\x08\x00" + b"\x00" * 20,
    ]
    async with beside_a_stream(front, front_gateway):
        for body in bodies:
            answer = await ask(front_gateway.host_port, "POST", path, body)
            check_refused(answer, 400)
    await idle(front, length=1, error=0, accepted=1)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_duplicate_keys_are_named(front_gateway, path):
    text = json.dumps(GOOD[path])[:-1] + ', "seed": 1, "seed": 2}'
    text = text.replace('"seed": 7, ', "")
    answer = await ask(front_gateway.host_port, "POST", path, text.encode())
    check_refused(answer, 400)
    assert "seed" in answer.error["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": "application/json; charset=utf-16"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Content-Type": None}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "APPLICATION/JSON"}, 200),
    ],
)
async def test_content_types(front, front_gateway, headers, status):
    for path, body in GOOD.items():
        answer = await ask(front_gateway.host_port, "POST", path, body, headers)
        if status == 200:
            assert answer.status == 200
        else:
            check_refused(answer, status)


# Fields

# A value of every kind of JSON, and numbers at and beyond the edges.
KINDS: list[Any] = [
    True,
    -1,
    1.5,
    2**31,
    2**64,
    -(2**63) - 1,
    1e300,
    "text",
    "",
    [],
    [None],
    ["text"],
    [[[]]],
    [-1],
    [1.5],
    [True],
    {},
    {"a": 1},
    {"type": 5},
    {"type": "text"},
    {"1": "x"},
    {"-1": 1},
    {"x": 1},
]
EXTENSIONS = [
    *("stream", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids"),
    *("ignore_eos", "include_stop_str_in_output", "cache_salt", "structured_outputs"),
    "return_token_ids",
]
OF_CHAT = ["chat_template_kwargs", "add_generation_prompt"]
# All that the SDK sends, and ours.
FIELDS = {
    CHAT: [*chat_params.CompletionCreateParamsBase.__annotations__, *EXTENSIONS, *OF_CHAT],
    COMPLETIONS: [*params.CompletionCreateParamsBase.__annotations__, *EXTENSIONS],
}


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_values_of_every_kind_for_every_field(front, front_gateway, path):
    """Honoured, or refused with 400 under the field's own name."""
    # Answers are at most two tokens long, whatever the field does.
    gate = asyncio.Semaphore(16)

    async def one(field: str, value: object) -> None:
        body = GOOD[path] | {"max_tokens": 2, field: value}
        async with gate, connection(front_gateway.host_port) as opened:
            await opened.send(request("POST", path, body))
            answer = await opened.answer()
        where = f"{field}={value!r}: {answer.status} {answer.body[:300]!r}"
        if answer.status == 200:
            return
        assert answer.status == (404 if field == "model" and value == "text" else 400), where
        error = answer.error
        assert error["param"] is not None, where
        # One that goes together with another may name that one.
        names = {field, *PARTNERS.get(field, ())}
        assert error["param"].split(".")[0].split("[")[0] in names, where

    async with beside_a_stream(front, front_gateway):
        front.release()
        await asyncio.gather(*(one(f, v) for f in FIELDS[path] for v in KINDS))
    await idle(front, error=0)


PARTNERS = {
    "max_tokens": ("min_tokens",),
    "max_completion_tokens": ("max_tokens",),
    "stream_options": ("stream",),
    "top_logprobs": ("logprobs",),
    "tools": ("tool_choice",),
    "best_of": ("n",),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_unknown_fields_are_refused_by_their_names(front_gateway, path):
    other = {COMPLETIONS: "messages", CHAT: "prompt"}[path]
    for name in ("no_such_field", "Temperature", "temperature ", "", "best_off", "ключ", other):
        answer = await ask(front_gateway.host_port, "POST", path, GOOD[path] | {name: 1})
        check_refused(answer, 400, name)
        assert repr(name) in answer.error["message"] or f"{name}" in answer.error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([MESSAGES[0], {"role": 5, "content": ""}], "messages.1.role"),
        ([MESSAGES[0], "text"], "messages.1"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": "a", "mood": "good"}], "messages.0.mood"),
        ([{"role": "tool", "content": "a"}], "messages.0.tool_call_id"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}],
            "messages.0.tool_calls.0.function",
        ),
    ],
)
async def test_faults_inside_messages_are_named_by_their_place(front_gateway, messages, param):
    body = GOOD_CHAT | {"messages": messages}
    check_refused(await ask(front_gateway.host_port, "POST", CHAT, body), 400, param)


async def test_required_fields(front_gateway):
    for path, body in GOOD.items():
        for name in ("model", "messages" if path == CHAT else "prompt"):
            left = {key: value for key, value in body.items() if key != name}
            check_refused(await ask(front_gateway.host_port, "POST", path, left), 400, name)
        answer = await ask(front_gateway.host_port, "POST", path, body | {"model": "gpt-5"})
        check_refused(answer, 404, "model")
        assert answer.error["code"] == "model_not_found"


# Methods and paths


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", CHAT, 405, {"POST"}),
        ("PUT", COMPLETIONS, 405, {"POST"}),
        ("DELETE", "/v1/models", 405, {"GET", "HEAD"}),
        ("POST", "/health", 405, {"GET", "HEAD"}),
        ("GET", "/v1", 404, None),
        ("POST", "/v1/embeddings", 404, None),
        ("POST", "/v1/responses", 404, None),
        ("GET", "/v1/models/", 404, None),
        ("GET", "/v1/chat/completions/../../../etc/passwd", 404, None),
        ("GET", "/%00", 404, None),
        ("POST", "/v1/chat/completions/", 404, None),
    ],
)
async def test_wrong_methods_and_paths(front_gateway, method, path, status, allow):
    answer = await ask(front_gateway.host_port, method, path, {} if method == "POST" else None)
    check_refused(answer, status)
    if allow is not None:
        assert set(answer.headers["allow"].replace(" ", "").split(",")) <= allow
        assert answer.headers["allow"]


# The wire


async def test_what_is_no_http(front, front_gateway):
    """Answered 400 or closed; nobody else notices."""
    contents = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: five\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n",
    ]
    async with beside_a_stream(front, front_gateway):
        for content in contents:
            async with connection(front_gateway.host_port) as opened:
                with contextlib.suppress(ConnectionError):
                    await opened.send(content)
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                    head = await opened.head()
                    assert 400 <= head.status < 500, content[:60]
                    assert head.headers.get("connection", "close") != "keep-alive"
        assert (await ask(front_gateway.host_port, "GET", "/health")).status == 200


async def test_requests_one_after_another_on_a_connection(front, front_gateway):
    """Sent before the answers are read; errors between them keep the connection."""
    async with connection(front_gateway.host_port) as opened:
        await opened.send(
            request("POST", COMPLETIONS, completion(3, seed=1))
            + request("POST", COMPLETIONS, completion(3, seed=1, temperature=-1))
            + request("GET", "/nowhere")
            + request("POST", COMPLETIONS, completion(3, seed=2, stream=True))
            + request("GET", "/health")
        )
        assert (await opened.answer()).json["choices"][0]["token_ids"] == alone(3, seed=1)
        check_refused(await opened.answer(), 400, "temperature")
        check_refused(await opened.answer(), 404)
        assert (await opened.head()).status == 200
        assert ids_of(chunks_of([event async for event in opened.events()])) == alone(3, seed=2)
        assert (await opened.answer()).status == 200
    await idle(front, length=2, error=0)


async def test_expect_100_continue(front_gateway):
    """As curl sends big bodies: asked for only when they are wanted."""
    content = json.dumps(completion(2)).encode()
    head = {"Content-Length": str(len(content)), "Content-Type": "application/json"}
    async with connection(front_gateway.host_port) as opened:
        await opened.send(request("POST", COMPLETIONS, None, head | {"Expect": "100-continue"}))
        assert (await opened.head()).status == 100
        await opened.send(content)
        assert (await opened.answer()).status == 200


@pytest.fixture
async def hasty_gateway(front) -> AsyncIterator[Gateway]:
    """A second for heads and bodies."""
    async with gateway_beside(
        front.address, "--body-timeout", "1", "--headers-timeout", "1"
    ) as running:
        yield running


async def test_slow_senders_are_let_go(front, hasty_gateway):
    """Of a body: with 408. Those who send in time on the same gateway are served, and a stream
    may last as long as it likes."""
    async with beside_a_stream(front, hasty_gateway), connection(hasty_gateway.host_port) as slow:
        content = request("POST", COMPLETIONS, completion(2))
        await slow.send(content[:-10])
        answer = await slow.answer()
        check_refused(answer, 408)
        assert await slow.at_end()
        assert (await ask(hasty_gateway.host_port, "GET", "/health")).status == 200
    await idle(front, length=1, error=0, accepted=1)


async def test_a_body_that_drips_is_not_waited_for(front, hasty_gateway):
    """The time is for all of it, not for each piece."""
    async with connection(hasty_gateway.host_port) as slow:
        body = completion(2, user="x" * 100_000)
        content = request("POST", COMPLETIONS, body)
        answering = asyncio.ensure_future(slow.answer())
        for place in range(len(content)):
            if answering.done():
                break
            with contextlib.suppress(ConnectionError):
                await slow.send(content[place : place + 1])
            await asyncio.sleep(0.001)
        check_refused(await answering, 408)


@pytest.mark.parametrize(
    "content", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "]
)
async def test_heads_that_never_end_are_let_go(hasty_gateway, content):
    async with connection(hasty_gateway.host_port) as slow:
        await slow.send(content)
        # With or without an answer; it is the end that counts.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            assert (await slow.head()).status == 408
        assert (await ask(hasty_gateway.host_port, "GET", "/health")).status == 200


# Clients that do not read, and that go away


async def test_a_client_that_does_not_read_is_cut_off(front):
    """Its stream has some MB; nobody waits for it, and its slot is free again."""
    body = completion(1800, stream=True, n=6, logprobs=20)
    async with (
        gateway_beside(front.address, "--body-timeout", "1") as gateway,
        beside_a_stream(front, gateway),
        connection(gateway.host_port, buffer_bytes=4096) as deaf,
    ):
        await deaf.send(request("POST", COMPLETIONS, body))
        await front.until(lambda load: load.requests.accepted == 7)
        front.release()
        # The one beside ends by itself.
        async with asyncio.timeout(180):
            while (await metrics(gateway))["slotwise_gateway:open_streams"] > 0:
                pass
        got = b""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await deaf.head()
            async for chunk in deaf.chunks():
                got = chunk
        assert b"[DONE]" not in got
    await idle(front, error=0)


async def test_a_silent_stream_says_that_it_lives(front):
    """By comments, which every client of server-sent events leaves out."""
    front.hold()
    async with (
        gateway_beside(front.address, "--keep-alive", "0.1") as gateway,
        connection(gateway.host_port) as opened,
    ):
        await start(opened, completion(20))
        comments = 0
        chunks = opened.chunks()
        async for chunk in chunks:
            assert chunk.startswith(b":")
            assert chunk.endswith(b"\n\n")
            comments += 1
            if comments == 2:
                break
        front.release()
        assert ids_of(chunks_of([event async for event in opened.events()])) == alone(20)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_may_leave_in_every_phase(front, front_gateway, stream):
    """In the head, in the body, when it waits, before and after the first token, at the end."""
    content = request("POST", COMPLETIONS, completion(3, stream=stream))
    head = content.index(b"\r\n\r\n") + 4
    async with beside_a_stream(front, front_gateway):
        for sent in (1, head - 2, head, head + 10, len(content) - 1):
            async with connection(front_gateway.host_port) as opened:
                await opened.send(content[:sent])
        load = await front.load()
        assert (load.num_running, load.requests.accepted) == (1, 1)
        async with connection(front_gateway.host_port) as opened:
            await opened.send(content)
            await front.until(lambda load: load.requests.accepted == 2)
        await front.until(lambda load: load.requests.cancelled == 1)
        front.release()
        async with connection(front_gateway.host_port) as opened:
            await opened.send(content)
            await opened.head()
        await front.until(lambda load: load.num_running == load.num_waiting == 0)
    load = await front.load()
    assert load.requests.error == 0
    assert load.requests.accepted == load.requests.length + load.requests.cancelled
    assert "Traceback" not in "".join(front_gateway.log)


# Anything at all

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
PIECES = st.sampled_from(
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"type": "function", "function": {"name": "f", "parameters": {}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
        {"regex": "a+"},
        {"include_usage": True},
        ["a", "b"],
        [[5, 6], [7]],
    ]
)


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """A good request, some of whose fields are anything, and some fields that nobody knows."""
    values = VALUES | PIECES | st.lists(PIECES, max_size=2)
    fields = st.sampled_from(FIELDS[path]) | st.text(max_size=10)
    changed = st.dictionaries(fields, values, max_size=3)
    return changed.map(lambda change: GOOD[path] | change)


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_anything_at_all_is_answered_in_the_right_shape(front, front_gateway, path):
    """Never 500; and the server's own counters know of no fault."""
    loop = asyncio.get_running_loop()

    @settings(max_examples=600, suppress_health_check=list(HealthCheck), database=None)
    @given(bodies(path))
    def run(body: dict[str, Any]) -> None:
        asyncio.run_coroutine_threadsafe(one(body), loop).result(60)

    async def one(body: dict[str, Any]) -> None:
        async with connection(front_gateway.host_port) as opened:
            content = json.dumps(body).encode()
            await opened.send(request("POST", path, content))
            answer = await opened.answer()
        if answer.status == 200:
            if not answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.json["choices"]
            return
        assert answer.status in (400, 404), (body, answer)
        assert answer.error["type"] == "invalid_request_error" or answer.status == 404

    await asyncio.to_thread(run)
    await idle(front, error=0)
    assert "Traceback" not in "".join(front_gateway.log)
