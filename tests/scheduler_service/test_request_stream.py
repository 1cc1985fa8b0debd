from __future__ import annotations

import asyncio

import pytest
from scheduler_driver import make_request

from scheduler_service.request import FinishedEvent, FinishReason, TokenEvent, choice_id
from scheduler_service.request_stream import RequestStreams


def end(request_id):
    return FinishedEvent(request_id, FinishReason.LENGTH, 1, 2, 0, 0, 0, 0)


def token(request_id, index):
    return TokenEvent(request_id, index, (7,))


async def test_events_come_in_order_and_end_once():
    streams = RequestStreams()
    request = make_request("a")
    stream = streams.open([request], 3)
    assert (stream.call_id, stream.queue_position, request in streams) == ("a", 3, True)
    assert make_request("a") not in streams
    streams.tell([token("a", 0), token("a", 1), end("a")])
    assert request not in streams
    assert [event async for event in stream] == [token("a", 0), token("a", 1), end("a")]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_what_is_ready_is_taken_without_waiting():
    streams = RequestStreams()
    stream = streams.open([make_request("a")], 0)
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
    stream = streams.open([make_request("a")], 0)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    streams.tell([end("a")])
    async with asyncio.timeout(60):
        assert await reader == end("a")


async def test_waiting_for_all_to_end():
    streams = RequestStreams()
    await streams.wait_all_ended()
    streams.open([make_request("a")], 0)
    streams.open([make_request("b")], 0)
    waiter = asyncio.create_task(streams.wait_all_ended())
    streams.tell([end("a")])
    await asyncio.sleep(0)
    assert not waiter.done()
    assert [request.request_id for request in streams.requests()] == ["b"]
    streams.tell([end("b")])
    async with asyncio.timeout(60):
        await waiter
    assert len(streams) == 0


async def test_a_call_of_several_answers_ends_behind_the_last_one():
    streams = RequestStreams()
    names = ["a", choice_id("a", 1), choice_id("a", 2)]
    stream = streams.open([make_request(name) for name in names], 0)
    assert (stream.call_id, len(streams)) == ("a", 3)
    events = [token(names[1], 0), end(names[1]), token("a", 0), end("a")]
    streams.tell(events)
    assert [await anext(stream) for _ in range(3)] == events[:3]
    assert stream.take_ready() == events[3:]
    assert [request.request_id for request in streams.requests()] == names[2:]
    streams.tell([end(names[2])])
    assert [event async for event in stream] == [end(names[2])]
