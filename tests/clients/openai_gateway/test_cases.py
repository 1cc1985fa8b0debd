"""The cases of the bug list that are the gateway's too, with their right values."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path

import grpc
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
    num_steps,
    start,
    token_ids,
)
from clients.raw_http import Connection, ask, chunks_of, connection, request, until_ready
from tokenizer_files import write_model

from integration.front import OPTIONS, WAIT_S, Front, running_front
from scheduler_service.service import load_model
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

STRICT = """\
{%- for message in messages %}
    {%- set wanted = 'user' if loop.index0 % 2 == 0 else 'assistant' %}
    {%- if message.role != wanted %}
        {{- raise_exception('roles must alternate user, assistant') }}
    {%- endif %}
    {%- if message.content is none %}{{- raise_exception('content is none') }}{%- endif %}
    {%- if message.tool_calls is defined %}{{- raise_exception('there are calls') }}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
USER = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "Be short."}


def writing(token_ids: list[int], prompt_len: int = 3):
    """A script that answers a prompt of so many ids with these, and then with 300."""

    def script(tokens):
        place = len(tokens) - prompt_len
        return token_ids[place] if place < len(token_ids) else 300

    return script


# B03: the first part of a stop string leaks.


@pytest.mark.parametrize(
    ("text", "max_tokens", "want", "reason"),
    [
        ("ABC DEFGHIJ KLM", 15, "ABC ", "stop"),
        # What was held back comes at the end.
        ("ABC DEF", 7, "ABC DEF", "length"),
    ],
)
async def test_b03_stop_strings_do_not_leak(front_model, tmp_path, text, max_tokens, want, reason):
    encode = front_model.tokenizer.encode
    ids = [i for char in text for i in encode(char)]
    body = completion(max_tokens, stop=["DEFGHIJ"])
    async with (
        running_front(front_model, tmp_path, writing(ids), num_slots=1) as front,
        gateway_beside(front.address) as gateway,
    ):
        whole = (await ask(gateway.host_port, "POST", COMPLETIONS, body)).json["choices"][0]
        async with connection(gateway.host_port) as opened:
            await start(opened, body)
            chunks = chunks_of([event async for event in opened.events()])
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces) == whole["text"] == want
    assert all(want.startswith("".join(pieces[: i + 1])) for i in range(len(pieces)))
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == reason


# B08: a template's refusal is the caller's error.


async def test_b08_a_templates_words_reach_the_caller(tmp_path):
    folder = tmp_path / "strict"
    folder.mkdir()
    model = load_model(write_model(folder, STRICT), "")
    async with (
        running_front(model, tmp_path, writing([], 0), num_slots=1) as front,
        gateway_beside(front.address) as gateway,
    ):

        async def chat(*messages: dict) -> tuple[int, dict]:
            body = {"model": "strict", "messages": messages, "max_tokens": 2, "ignore_eos": True}
            answer = await ask(gateway.host_port, "POST", CHAT, body)
            return answer.status, answer.json if answer.status == 200 else answer.error

        assistant = {"role": "assistant", "content": "hi"}
        for messages in ((USER, USER), (USER, assistant, SYSTEM)):
            status, error = await chat(*messages)
            assert (status, error["type"]) == (400, "invalid_request_error")
            assert error["param"] == "messages"
            assert "roles must alternate user, assistant" in error["message"]
        # Null and empty are absent, as the template sees them.
        for odd in ({"tool_calls": []}, {"content": None}, {"content": None, "tool_calls": []}):
            status, answer = await chat(USER, assistant | odd, USER)
            assert (status, answer["choices"][0]["finish_reason"]) == (200, "length"), odd
        await idle(front, error=0, length=3)


# B09: the client is gone, the slot still busy.


async def lose(connections: list[Connection], how: str) -> None:
    for opened in connections:
        opened.reset() if how == "killed" else opened.close()


@pytest.mark.parametrize("how", ["killed", "closed"])
async def test_b09_streams_whose_clients_are_gone(front, front_gateway, how):
    """Eight, after five tokens; then a ninth starts at once."""
    meter = front.hold()
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for number in range(8):
            opened = await stack.enter_async_context(connection(front_gateway.host_port))
            await start(opened, completion(2000, seed=number))
            clients.append(opened)
        # Some have several steps; others were sent before the last client came.
        meter.allow(8)
        for opened in clients:
            await token_ids(opened.events(), 5)
        assert (await metrics(front_gateway))["slotwise:num_requests_running"] == 8
        await at_rest(front)
        before = num_steps(front)
        await lose(clients, how)
        await idle(front, cancelled=8, error=0, length=0)
        assert num_steps(front) <= before + 2
        assert (await metrics(front_gateway))["slotwise:num_requests_running"] == 0
        await a_ninth_starts(front, front_gateway, meter)


async def at_rest(front: Front) -> None:
    """Until the worker stands at its gate."""
    async with asyncio.timeout(WAIT_S):
        while not front.worker.num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def all_accepted(front: Front, count: int) -> None:
    await front.until(lambda load: load.requests.accepted == count)


async def a_ninth_starts(front: Front, gateway: Gateway, meter) -> None:
    """With its own tokens, and as the only one that runs."""
    async with connection(gateway.host_port) as opened:
        await start(opened, completion(4, seed=9))
        # The step that its predecessors were in, and its own.
        meter.allow(2)
        load = await front.until(lambda load: load.num_running == 1 or load.requests.length == 1)
        assert load.num_waiting == 0
        meter.allow(40)
        chunks = chunks_of([event async for event in opened.events()])
    assert ids_of(chunks) == alone(4, seed=9)
    await idle(front, cancelled=8, length=1)


@pytest.mark.parametrize("how", ["killed", "closed"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_b09_whole_answers_whose_clients_are_gone(front, front_gateway, how, path):
    meter = front.hold()
    body = completion(2000)
    if path == CHAT:
        del body["prompt"]
        body["messages"] = [USER]
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for number in range(8):
            opened = await stack.enter_async_context(connection(front_gateway.host_port))
            await opened.send(request("POST", path, body | {"seed": number}))
            clients.append(opened)
        await all_accepted(front, 8)
        # Those that came after the first command take their slots in a later one.
        meter.allow(8)
        await front.until(lambda load: load.num_generated_tokens >= 40)
        await at_rest(front)
        before = num_steps(front)
        await lose(clients, how)
        await idle(front, cancelled=8, error=0, length=0)
        assert num_steps(front) <= before + 2
        await a_ninth_starts(front, front_gateway, meter)


async def test_b09_clients_that_leave_the_queue(front, front_gateway):
    """Nobody computes for them; those before them run on."""
    meter = front.hold()
    before = front.worker.worker.num_prefills
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for number in range(12):
            opened = await stack.enter_async_context(connection(front_gateway.host_port))
            await start(opened, completion(500, seed=number))
            clients.append(opened)
        await all_accepted(front, 12)
        meter.allow(2)
        load = await front.until(lambda load: load.num_running == 8)
        assert load.num_waiting == 4
        await lose(clients[8:], "killed")
        load = await front.until(lambda load: load.num_waiting == 0)
        assert (load.num_running, load.requests.cancelled) == (8, 4)
        front.release()
        for opened in clients[:8]:
            assert len(ids_of(chunks_of([event async for event in opened.events()]))) == 500
        await idle(front, cancelled=4, length=8)
        assert front.worker.worker.num_prefills - before == 8


async def test_b09_cancel_over_grpc_by_the_id_of_the_header(front, front_gateway):
    """The stream ends with its reason; so does a whole answer."""
    meter = front.hold()
    async with connection(front_gateway.host_port) as opened:
        await opened.send(
            request("POST", COMPLETIONS, completion(stream=True), {"X-Request-Id": "mine"})
        )
        head = await opened.head()
        assert head.headers["x-request-id"] == "mine"
        meter.allow(20)
        events = opened.events()
        await token_ids(events, 1)
        async with grpc.aio.insecure_channel(front.address, OPTIONS) as channel:
            stub = rpc.InferenceStub(channel)
            await stub.Cancel(pb.CancelRequest(request_id="mine"), timeout=WAIT_S)
        rest = [event async for event in events]
        await idle(front, cancelled=1, error=0)
    last = json.loads(rest[-2] if rest[-1] == "[DONE]" else rest[-1])
    assert "error" in last or last["choices"][0]["finish_reason"]


# B15: tiny max_tokens and off by one.


@pytest.mark.parametrize("count", [1, 2, 3, 16])
async def test_b15_exactly_the_tokens_asked_for(front, front_gateway, count):
    want = alone(count)
    whole = (await ask(front_gateway.host_port, "POST", COMPLETIONS, completion(count))).json
    (choice,) = whole["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (want, "length")
    assert whole["usage"]["completion_tokens"] == count
    assert whole["usage"]["prompt_tokens"] == 3
    async with connection(front_gateway.host_port) as opened:
        await start(opened, completion(count, stream_options={"include_usage": True}))
        chunks = chunks_of([event async for event in opened.events()])
    assert ids_of(chunks) == want
    assert chunks[-1]["usage"] == whole["usage"] | chunks[-1]["usage"]
    assert chunks[-1]["usage"]["completion_tokens"] == count
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == choice["text"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_b15_none_at_all_is_refused_by_name(front, front_gateway, path, stream):
    body = completion(0, stream=stream)
    if path == CHAT:
        del body["prompt"]
        body["messages"] = [USER]
    answer = await ask(front_gateway.host_port, "POST", path, body)
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")
    await idle(front, accepted=0)


# B17: an empty prompt.


async def test_b17_empty_prompts_hurt_nobody(front, front_gateway):
    """Refused by name, streamed or not; the stream that runs beside them is untouched."""
    meter = front.hold()
    async with connection(front_gateway.host_port) as opened:
        await start(opened, completion(30))
        await front.until(lambda load: load.num_running == 1)
        for stream in (False, True):
            for prompt in ("", [], [""], [[]], ["a", ""], [[5], []]):
                body = completion(5, prompt=prompt, stream=stream)
                answer = await ask(front_gateway.host_port, "POST", COMPLETIONS, body)
                assert answer.status == 400, prompt
                assert answer.error["param"].startswith("prompt"), prompt
            body = {"model": "front-model", "messages": [], "stream": stream}
            answer = await ask(front_gateway.host_port, "POST", CHAT, body)
            assert (answer.status, answer.error["param"]) == (400, "messages")
        meter.allow(1000)
        chunks = chunks_of([event async for event in opened.events()])
    assert ids_of(chunks) == alone(30)
    # One prompt of two is good, and is not run without the other.
    await idle(front, length=1, error=0, cancelled=0)


# B36: ready before the warm-up ends.


async def test_b36_ready_when_the_server_is(front_model, tmp_path):
    """No door claims it before; what is asked early is refused, and does not hang."""
    async with (
        running_front(front_model, tmp_path, start=False, num_slots=1) as front,
        gateway_beside(front.address) as gateway,
    ):
        front.worker.load_gate.clear()
        starting = asyncio.ensure_future(front.engine.start())
        async with asyncio.timeout(WAIT_S):
            while not front.worker.configures:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await assert_not_ready(gateway)
        # One real step is due before it is ready.
        front.worker.step_gate.clear()
        front.worker.load_gate.set()
        await assert_not_ready(gateway)
        front.worker.step_gate.set()
        await starting
        await until_ready(gateway.host_port)
        models = await ask(gateway.host_port, "GET", "/v1/models")
        assert [model["id"] for model in models.json["data"]] == ["front-model"]
        answer = await ask(gateway.host_port, "POST", COMPLETIONS, completion(2))
        assert answer.json["usage"]["completion_tokens"] == 2


async def assert_not_ready(gateway: Gateway) -> None:
    assert (await ask(gateway.host_port, "GET", "/health")).status == 200
    ready = await ask(gateway.host_port, "GET", "/ready")
    assert (ready.status, ready.error["type"]) == (503, "service_unavailable")
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/front-model", None),
        ("POST", COMPLETIONS, completion(2)),
        ("POST", COMPLETIONS, completion(2, stream=True)),
        ("POST", CHAT, {"model": "front-model", "messages": [USER]}),
    ):
        answer = await ask(gateway.host_port, method, path, body)
        assert (answer.status, answer.error["type"]) == (503, "service_unavailable"), path
        assert int(answer.headers["retry-after"]) > 0
    assert (await ask(gateway.host_port, "GET", "/metrics")).status in (200, 503)


async def test_b36_a_server_that_is_not_there_yet(front_model, tmp_path):
    """The gateway may be started first."""
    # Held all the time, so that nobody else listens there.
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        async with gateway_beside(f"127.0.0.1:{held.getsockname()[1]}") as gateway:
            await assert_not_ready(gateway)


# B39: big messages.


@pytest.fixture
async def big_front(front_model, tmp_path):
    options = {"max_seq_len": 1 << 20, "max_step_tokens": 1 << 15, "num_slots": 1}
    async with running_front(front_model, tmp_path, **options) as running:
        yield running


@pytest.fixture
async def big_gateway(big_front):
    async with gateway_beside(big_front.address) as running:
        yield running


def peak_bytes(gateway: Gateway) -> int:
    """The most memory that the gateway's process has had."""
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


@pytest.mark.slow
async def test_b39_64k_ids_with_20_logprobs_each(big_gateway):
    prompt = [500] * (1 << 16)
    body = completion(1, prompt=prompt, echo=True, logprobs=20)
    answer = await ask(big_gateway.host_port, "POST", COMPLETIONS, body)
    assert answer.status == 200, answer.body[:1000]
    assert answer.json["usage"]["prompt_tokens"] == 1 << 16
    table = answer.json["choices"][0]["logprobs"]
    assert len(table["token_logprobs"]) == (1 << 16) + 1
    assert table["token_logprobs"][0] is None
    assert len(answer.body) > 4 << 20
    assert peak_bytes(big_gateway) < 512 << 20


@pytest.mark.slow
async def test_b39_a_text_of_5_mb(big_front, big_gateway):
    """Others are answered meanwhile."""
    text = "hello world " * (5_000_000 // 12)
    body = completion(1, prompt=text)
    call = asyncio.ensure_future(ask(big_gateway.host_port, "POST", COMPLETIONS, body))
    answered = 0
    while not call.done():
        assert (await ask(big_gateway.host_port, "GET", "/health")).status == 200
        answered += 1
    answer = await call
    assert answer.status == 200, answer.body[:1000]
    assert answer.json["usage"]["prompt_tokens"] > 400_000
    assert answered > 5
    chat = {"model": "front-model", "messages": [{"role": "user", "content": text}]}
    answer = await ask(big_gateway.host_port, "POST", CHAT, chat | {"max_tokens": 1})
    assert answer.status == 200, answer.body[:1000]
    await idle(big_front, length=2)
    assert peak_bytes(big_gateway) < 256 << 20


async def test_b39_600_mb_are_refused_by_their_length(front_gateway):
    """Before they are sent."""
    await ask(front_gateway.host_port, "GET", "/health")
    before = peak_bytes(front_gateway)
    async with connection(front_gateway.host_port) as opened:
        length = {"Content-Length": str(600 << 20), "Content-Type": "application/json"}
        await opened.send(request("POST", CHAT, None, length))
        answer = await opened.answer()
        assert (answer.status, answer.error["type"]) == (413, "invalid_request_error")
        assert str(64 << 20) in answer.error["message"] or "64 MiB" in answer.error["message"]
        assert await opened.at_end()
    assert peak_bytes(front_gateway) - before < 4 << 20


async def test_b39_600_mb_in_chunks_are_refused_at_the_limit(front_gateway):
    """And cost no more memory than the limit."""
    await ask(front_gateway.host_port, "GET", "/health")
    before = peak_bytes(front_gateway)
    async with connection(front_gateway.host_port) as opened:
        head = {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}
        await opened.send(request("POST", CHAT, None, head))
        answering = asyncio.ensure_future(opened.answer())
        chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not answering.done() and sent < 600:
                await opened.send(chunk)
                sent += 1
        answer = await answering
        assert (answer.status, answer.error["type"]) == (413, "invalid_request_error")
        assert 64 <= sent < 100
    assert peak_bytes(front_gateway) - before < 80 << 20
    # Two at once, and the one that is good is answered.
    answer = await ask(front_gateway.host_port, "POST", COMPLETIONS, completion(2))
    assert answer.json["usage"]["completion_tokens"] == 2
