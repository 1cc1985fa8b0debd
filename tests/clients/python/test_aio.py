from __future__ import annotations

import asyncio
import gc

import grpc
import pytest
from clients.scripted_server import SERVICE, WORDS, bad_field, queue_full
from grpc_health.v1 import health_pb2

from slotwise_client import (
    Accepted,
    AsyncClient,
    Chat,
    DeadlineError,
    Delta,
    Finished,
    Health,
    InvalidArgumentError,
    QueueFullError,
    SlotState,
    Tool,
    UnavailableError,
)

TIMEOUT_S = 60


@pytest.fixture
async def client(served):
    async with AsyncClient(served.address) as connected:
        yield connected


async def ended(served) -> bool:
    return await asyncio.to_thread(served.script.ended.wait, TIMEOUT_S)


async def test_a_stream_is_accepted_then_deltas_then_finished(client):
    events = [event async for event in client.generate("x", timeout=TIMEOUT_S)]
    assert isinstance(events[0], Accepted)
    assert "".join(event.text for event in events[1:-1]) == "".join(WORDS)
    assert isinstance(events[-1], Finished)


async def test_many_streams_at_once(client):
    async def text(i: int) -> tuple[str, str]:
        stream = client.chat("q", request_id=f"r{i}", timeout=TIMEOUT_S)
        deltas = [event async for event in stream if isinstance(event, Delta)]
        return deltas[0].request_id, "".join(delta.text for delta in deltas)

    answers = await asyncio.gather(*(text(i) for i in range(8)))
    assert answers == [(f"r{i}", "".join(WORDS)) for i in range(8)]


async def test_several_answers_whole_and_streamed(client):
    answer = await client.complete("x", n=2, timeout=TIMEOUT_S)
    assert [one.index for one in answer.choices] == [0, 1]
    stream = client.chat("q", n=2, tools=[Tool("find")], parse_output=True, timeout=TIMEOUT_S)
    events = [event async for event in stream]
    assert [event.index for event in events if isinstance(event, Finished)] == [0, 1]
    assert events[1].reasoning_text == "Let me see."


async def test_flushing_tells_what_was_forgotten(client):
    assert await client.flush_cache(timeout=TIMEOUT_S) == 42


async def test_dropping_the_stream_cancels_the_call(served, client):
    served.script.blocked = True
    async for event in client.generate("x"):
        if isinstance(event, Delta):
            break
    gc.collect()
    assert await ended(served)


async def test_close_ends_the_iteration(served, client):
    served.script.blocked = True
    events = []
    async with client.generate("x") as stream:
        async for event in stream:
            events.append(event)
            if isinstance(event, Delta):
                stream.close()
    assert [type(event) for event in events] == [Accepted, Delta]
    assert await ended(served)


async def test_close_from_another_task_ends_the_iteration(served, client):
    served.script.blocked = True
    stream = client.generate("x", timeout=TIMEOUT_S)

    async def collect() -> list:
        return [event async for event in stream]

    reader = asyncio.create_task(collect())
    assert await asyncio.to_thread(served.script.first_delta.wait, TIMEOUT_S)
    stream.close()
    assert len(await asyncio.wait_for(reader, TIMEOUT_S)) <= 2


async def test_cancelling_the_reading_task_cancels_the_call(served, client):
    served.script.blocked = True

    async def collect() -> list:
        return [event async for event in client.generate("x")]

    reader = asyncio.create_task(collect())
    assert await asyncio.to_thread(served.script.first_delta.wait, TIMEOUT_S)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await ended(served)


async def test_the_small_calls(served, client):
    assert (await client.complete("x", timeout=TIMEOUT_S)).text == "".join(WORDS)
    assert await client.tokenize("ab") == [97, 98]
    assert await client.detokenize([99, 100]) == "cd"
    assert (await client.render_chat(Chat.of("q"))).token_ids == (1, 2)
    assert (await client.model_info()).name == "script"
    assert (await client.server_info()).version == "9.9"
    assert (await client.load()).prefill_step_ns == 7
    assert (await client.slots())[1].state is SlotState.DECODE
    await client.cancel("some")
    assert served.script.requests[-1].request_id == "some"


async def test_errors_are_the_same_as_of_the_synchronous_client(served, client):
    served.script.error = bad_field("text", "is empty")
    with pytest.raises(InvalidArgumentError) as refused:
        [event async for event in client.generate("", timeout=TIMEOUT_S)]
    assert refused.value.field == "text"
    served.script.error = queue_full(2, 0)
    with pytest.raises(QueueFullError) as full:
        await client.complete("x", timeout=TIMEOUT_S)
    assert full.value.retry_after == 2


async def test_no_server_names_the_address():
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            await client.model_info(timeout=TIMEOUT_S)


async def test_health_and_waiting(served, client):
    assert await client.health() is Health.SERVING
    assert await client.health("nothing") is Health.UNKNOWN_SERVICE
    await client.wait_ready(TIMEOUT_S)
    served.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    with pytest.raises(DeadlineError, match=r"not ready after 0\.2 s"):
        await client.wait_ready(0.2)


async def test_one_connection_for_several_callers(served, client):
    """What the others send, and what they have seen of the server, is theirs together."""
    ann, bob = client.with_token("ann"), client.with_token("bob")
    await asyncio.gather(ann.load(), bob.load(), client.load())
    assert sorted(map(str, served.script.tokens)) == ["Bearer ann", "Bearer bob", "None"]
    assert ann._connection.life is client._connection.life
    assert len([event async for event in bob.generate("x")]) == 1 + len(WORDS) + 1
    served.script.blocked = True
    stream = ann.generate("x")
    assert isinstance(await anext(stream), Accepted)
    await client.close()
    assert await ended(served)
    # Closing cancels it, and nobody tries to read it on.
    assert [event async for event in stream if isinstance(event, Finished)] == []
    with pytest.raises(grpc.aio.UsageError):
        await ann.load()


async def test_a_caller_whose_token_cannot_be_sent(client):
    with pytest.raises(ValueError, match="printable"):
        client.with_token("a b")
    async with AsyncClient("elsewhere:1") as far:
        with pytest.raises(ValueError, match="unencrypted"):
            far.with_token("a")
        assert far.with_token(None).target == "elsewhere:1"
    async with AsyncClient("elsewhere:1", insecure_token=True) as far:
        assert far.with_token("a")._connection.metadata == (("authorization", "Bearer a"),)
        assert far._connection.metadata == ()


async def test_health_as_it_changes(served, client):
    watch = client.watch_health()
    assert await anext(watch) is Health.SERVING
    served.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert await anext(watch) is Health.NOT_SERVING
    await watch.aclose()
    assert await anext(client.watch_health("no.such.service")) is Health.UNKNOWN_SERVICE


async def test_health_of_a_server_that_is_lost(lossy):
    async with AsyncClient(lossy.address) as client:
        watch = client.watch_health()
        assert await anext(watch) is Health.SERVING
        for break_connection in lossy.script.break_connections:
            break_connection()
        with pytest.raises(UnavailableError):
            await anext(watch)
