"""What the gateway's clients do not notice: a server that is killed and comes back, lost
connections, workers that die."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from clients.gateways import Gateway, gateway_beside, running_gateway
from clients.openai_gateway.streams import (
    CHAT,
    COMPLETIONS,
    alone,
    completion,
    ids_of,
    start,
    token_ids,
)
from clients.raw_http import WAIT_S, ask, chunks_of, connection, until_ready
from free_ports import fixed_port

from chaos.relay import Relay
from fakes import CORRUPTED
from integration.front import running_front
from integration.servers import Server, running_server
from slotwise.v1 import inference_pb2 as pb

# So many that a busy machine does not come to their end before the test has seen their begin.
NUM_TOKENS = 2400
NUM_STREAMS = 3


def body(seed: int) -> dict:
    return completion(NUM_TOKENS, model="tiny", prompt=[5, 6, 7], seed=seed)


def wanted(server: Server, seed: int) -> list[int]:
    """By gRPC, without a break."""
    asked = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        sampling=pb.SamplingParams(temperature=1, seed=seed),
        max_new_tokens=NUM_TOKENS,
        ignore_eos=True,
    )
    return server.collect(asked).token_ids


@pytest.mark.slow
async def test_streams_outlive_a_killed_server(server, chat_checkpoint, tmp_path):
    """With a journal: every token once, also of whole answers; the gateway is not ready meanwhile,
    and is again afterwards."""
    asked = (asyncio.to_thread(wanted, server, n) for n in range(NUM_STREAMS + 1))
    want = await asyncio.gather(*asked)
    port = fixed_port()
    flags = ["--journal", str(tmp_path / "journal"), "--num-slots", "4", "--threads", "1"]
    first = running_server(chat_checkpoint, *flags, port=port)
    killed = await asyncio.to_thread(first.__enter__)
    try:
        with running_gateway(killed.address) as gateway:
            seen = [asyncio.Event() for _ in range(NUM_STREAMS)]
            calls = [
                asyncio.ensure_future(read_whole(gateway, number, seen[number]))
                for number in range(NUM_STREAMS)
            ]
            address = gateway.host_port
            whole = asyncio.ensure_future(ask(address, "POST", COMPLETIONS, body(NUM_STREAMS)))
            async with asyncio.timeout(WAIT_S):
                for event in seen:
                    await event.wait()
            # What the server has not yet taken is refused when it is lost.
            await until_all_decode(killed)
            os.kill(killed.process.pid, signal.SIGKILL)
            await asyncio.to_thread(killed.process.wait)
            await until_ready(gateway.host_port, 503)
            assert (await ask(gateway.host_port, "GET", "/health")).status == 200
            second = running_server(chat_checkpoint, *flags, port=port)
            back = await asyncio.to_thread(second.__enter__)
            try:
                assert await asyncio.gather(*calls) == want[:NUM_STREAMS]
                assert (await whole).json["choices"][0]["token_ids"] == want[NUM_STREAMS]
                load = await asyncio.to_thread(back.stub.GetLoad, pb.GetLoadRequest())
                assert load.num_resumed >= 1
                await until_ready(gateway.host_port)
            finally:
                await asyncio.to_thread(second.__exit__, None, None, None)
    finally:
        await asyncio.to_thread(first.__exit__, None, None, None)


async def until_all_decode(server: Server) -> None:
    """For long enough that the gateway was told that the server has taken them."""
    num_decoding = 0
    async with asyncio.timeout(WAIT_S):
        while num_decoding < NUM_STREAMS + 1:
            slots = (await asyncio.to_thread(server.stub.ListSlots, pb.ListSlotsRequest())).slots
            num_decoding = sum(slot.generated_tokens >= 50 for slot in slots)


async def read_whole(gateway: Gateway, seed: int, has_begun: asyncio.Event) -> list[int]:
    """The ids of a stream, from its first to its end."""
    async with connection(gateway.host_port) as opened:
        await start(opened, body(seed))
        events = []
        async for event in opened.events():
            events.append(event)
            has_begun.set()
    return ids_of(chunks_of(events))


async def test_lost_connections_to_the_server_cost_no_token(front):
    """Cut again and again in mid-stream."""
    host, _, port = front.address.rpartition(":")
    relay = Relay((host, int(port)))
    try:
        async with gateway_beside(relay.address) as gateway:
            meter = front.hold()
            async with connection(gateway.host_port) as opened:
                await start(opened, completion(1500))
                events, got = opened.events(), []
                for _ in range(4):
                    meter.allow(3)
                    got += await token_ids(events, 1)
                    # What came may be from before the last cut.
                    async with asyncio.timeout(WAIT_S):
                        while not await asyncio.to_thread(relay.cut):
                            pass
                front.release()
                chunks = chunks_of([event async for event in events])
        assert got + ids_of(chunks) == alone(1500)
        load = await front.load()
        assert (load.requests.accepted, load.requests.length) == (1, 1)
    finally:
        relay.close()


async def test_a_worker_that_dies_costs_no_token(front, front_gateway):
    meter = front.hold()
    async with connection(front_gateway.host_port) as opened:
        await start(opened, completion(1500))
        meter.allow(3)
        events = opened.events()
        got = await token_ids(events, 1)
        await front.worker.die()
        front.release()
        await front.worker.start()
        chunks = chunks_of([event async for event in events])
    assert got + ids_of(chunks) == alone(1500)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_fault_in_the_middle_of_an_answer(front_model, tmp_path, path):
    """Of one whose logits are no numbers: 500, and of a stream an event, and no end that looks
    good. The next one is served."""

    def script(tokens):
        return CORRUPTED if tokens[0] != 99 and len(tokens) > 200 else 300

    body = completion(1000)
    if path == CHAT:
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "hello"}]
    async with (
        running_front(front_model, tmp_path, script, num_slots=1, max_seq_len=2048) as front,
        gateway_beside(front.address) as gateway,
    ):
        whole = await ask(gateway.host_port, "POST", path, body)
        assert (whole.status, whole.error["type"]) == (500, "server_error")
        async with connection(gateway.host_port) as opened:
            await start(opened, body, path)
            *before, last = [event async for event in opened.events()]
        assert ids_of([json.loads(event) for event in before])
        assert json.loads(last)["error"] == whole.error | {
            "message": json.loads(last)["error"]["message"]
        }
        good = await ask(gateway.host_port, "POST", COMPLETIONS, completion(300, prompt=[99]))
        assert good.json["usage"]["completion_tokens"] == 300
