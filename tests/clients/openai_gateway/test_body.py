from __future__ import annotations

import asyncio
import json

import pytest

from slotwise_gateway import body as reading
from slotwise_gateway.body import ClientGoneError, Room, kind_of, parse_object, read_json
from slotwise_gateway.config import Limits
from slotwise_gateway.errors import ApiError

JSON_TYPE = [(b"content-type", b"application/json")]


def receive(*messages):
    """An ASGI receive that gives these, and then waits for ever."""
    left = list(messages)

    async def next_message():
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return next_message


def part(content: bytes, more: bool = False):
    return {"type": "http.request", "body": content, "more_body": more}


async def read(*messages, headers=JSON_TYPE, limits=None, take=lambda num_bytes: None):
    return await read_json({"headers": headers}, receive(*messages), limits or Limits(), take)


async def test_a_body_in_parts():
    assert await read(part(b'{"a"', True), part(b": 1}")) == {"a": 1}


async def test_a_body_that_is_parsed_beside_the_loop(monkeypatch):
    threads = []
    real = asyncio.to_thread

    async def to_thread(function, *arguments):
        threads.append(function)
        return await real(function, *arguments)

    monkeypatch.setattr(reading.asyncio, "to_thread", to_thread)
    text = "x" * reading.SMALL_BYTES
    assert await read(part(json.dumps({"a": text}).encode())) == {"a": text}
    assert threads == [parse_object]


@pytest.mark.parametrize(
    "value",
    ["application/json", "Application/JSON", "application/json; charset=utf-8"],
)
async def test_good_types(value):
    assert await read(part(b"{}"), headers=[(b"content-type", value.encode())]) == {}


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ([], "content-type"),
        ([(b"content-type", b"text/plain")], "content-type"),
        ([(b"content-type", b"application/json; charset=latin-1")], "content-type"),
        ([*JSON_TYPE, (b"content-encoding", b"gzip")], "content-encoding"),
    ],
)
async def test_other_types(headers, param):
    with pytest.raises(ApiError) as raised:
        await read(part(b"{}"), headers=headers)
    assert (raised.value.status, raised.value.param) == (415, param)


async def test_a_length_that_is_too_large_is_refused_unread():
    headers = [*JSON_TYPE, (b"content-length", b"600000000")]
    with pytest.raises(ApiError, match="600000000 bytes; at most 67108864") as raised:
        await read(headers=headers)
    assert (raised.value.status, raised.value.headers) == (413, {"Connection": "close"})


async def test_a_body_without_a_length_is_refused_at_the_limit():
    limits = Limits(max_body_bytes=10)
    assert await read(part(b'{"a":', True), part(b"1234}"), limits=limits) == {"a": 1234}
    with pytest.raises(ApiError, match="more; at most 10") as raised:
        await read(part(b'{"a":', True), part(b"12345}", True), limits=limits)
    assert raised.value.status == 413


async def test_bodies_of_all_requests_have_one_bound():
    room = Room(20)
    body = b'{"a": 12345}'
    with room.share() as take:
        assert await read(part(body), take=take) == {"a": 12345}
        with room.share() as other, pytest.raises(ApiError) as told:
            await read(part(body[:6], True), part(body[6:]), take=other)
        assert told.value.status == 503
        assert told.value.headers["Connection"] == "close"
        assert int(told.value.headers["Retry-After"]) >= 1
        # What was refused has given back the part that it had.
        with room.share() as small:
            assert await read(part(b'{"a": 1}'), take=small) == {"a": 1}
    with room.share() as take:
        assert await read(part(body), take=take) == {"a": 12345}


async def test_a_slow_body():
    with pytest.raises(ApiError, match=r"within 0\.01 s; 4 bytes did") as raised:
        await read(part(b'{"a"', True), limits=Limits(body_s=0.01))
    assert (raised.value.status, raised.value.headers) == (408, {"Connection": "close"})


async def test_a_client_that_leaves():
    with pytest.raises(ClientGoneError):
        await read(part(b'{"a"', True), {"type": "http.disconnect"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "at line 1, column 2"),
        (b"{} x", "Extra data"),
        (b"[]", "is an array; a JSON object"),
        (b"null", "is null"),
        (b'"a"', "is a string"),
        (b"1", "is a number"),
        (b"true", "is a boolean"),
        (b'{"a": "\xff"}', "byte 7 of the body is not UTF-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "1e999 is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' is there twice"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' is there twice"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a": [{"b": "x\\uDC00"}]}', "surrogate"),
        (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "128 levels"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_object(content, words):
    with pytest.raises(ApiError, match=words) as raised:
        parse_object(content)
    assert (raised.value.status, raised.value.code) == (400, "invalid_json")


def test_pairs_of_surrogates_are_characters():
    assert parse_object(b'{"a": "\\ud83d\\ude00 \\\\ud800"}') == {"a": "\U0001f600 \\ud800"}


def test_depth_up_to_the_limit():
    depth = reading.MAX_DEPTH - 1
    assert parse_object(b'{"a":' + b"[" * depth + b"]" * depth + b"}")


def test_too_many_values(monkeypatch):
    monkeypatch.setattr(reading, "MAX_VALUES", 5)
    assert parse_object(b'{"a": [1, 2, 3, 4]}') == {"a": [1, 2, 3, 4]}
    with pytest.raises(ApiError, match="6 values; at most 5") as raised:
        parse_object(b'{"a": [1, 2, 3, 4, 5]}')
    assert raised.value.status == 413


def test_commas_in_a_text_are_no_values(monkeypatch):
    monkeypatch.setattr(reading, "MAX_VALUES", 5)
    assert parse_object(b'{"a": ",,,,,,[[[[{{{{\\",,,,"}') == {"a": ',,,,,,[[[[{{{{",,,,'}


@pytest.mark.parametrize("content", [b'"' + b'\\"' * 200_000, b'"\\' * 200_000])
def test_quotes_without_end_take_no_time(monkeypatch, content):
    """Were each one looked at to the end, this would take minutes."""
    monkeypatch.setattr(reading, "MAX_VALUES", 0)
    with pytest.raises(ApiError):
        parse_object(b'{"a": [1],' + content)


def test_kinds():
    values = [None, True, 1, 1.5, "a", [], {}]
    words = ["null", "a boolean", "a number", "a number", "a string", "an array", "an object"]
    assert [kind_of(value) for value in values] == words
