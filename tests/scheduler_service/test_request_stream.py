from __future__ import annotations

import asyncio

import pytest
from scheduler_driver import make_request

from scheduler_service.request import FinishedEvent, FinishReason, TokenEvent
from scheduler_service.request_stream import RequestStreams


def end(request_id):
    return FinishedEvent(request_id, FinishReason.LENGTH, 1, 2, 0, 0, 0, 0)


def token(request_id, index):
    return TokenEvent(request_id, index, (7,))


async def test_events_come_in_order_and_end_once():
    streams = RequestStreams()
    stream = streams.open(make_request("a"), 3)
    assert (stream.request_id, stream.queue_position, "a" in streams) == ("a", 3, True)
    streams.tell([token("a", 0), token("a", 1), end("a")])
    assert "a" not in streams
    assert [event async for event in stream] == [token("a", 0), token("a", 1), end("a")]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_what_is_ready_is_taken_without_waiting():
    streams = RequestStreams()
    stream = streams.open(make_request("a"), 0)
    assert stream.take_ready() == []
    streams.tell([token("a", 0), token("a", 1)])
    assert await anext(stream) == token("a", 0)
    assert stream.take_ready() == [token("a", 1)]
    streams.tell([end("a")])
    assert stream.take_ready() == [end("a")]
    assert stream.take_ready() == []
    assert [event async for event in stream] == []


async def test_a_reader_waits_for_events():
    streams = RequestStreams()
    stream = streams.open(make_request("a"), 0)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    streams.tell([end("a")])
    async with asyncio.timeout(20):
        assert await reader == end("a")


async def test_waiting_for_all_to_end():
    streams = RequestStreams()
    await streams.wait_all_ended()
    streams.open(make_request("a"), 0)
    streams.open(make_request("b"), 0)
    waiter = asyncio.create_task(streams.wait_all_ended())
    streams.tell([end("a")])
    await asyncio.sleep(0)
    assert not waiter.done()
    assert [request.request_id for request in streams.requests()] == ["b"]
    streams.tell([end("b")])
    async with asyncio.timeout(20):
        await waiter
    assert len(streams) == 0
