"""HTTP that uvicorn alone would wait for, gather, or not tell about."""

from __future__ import annotations

import asyncio

import pytest
from clients.openai_gateway.in_process import served
from clients.raw_http import connection, request

from slotwise_gateway import connection as connections
from slotwise_gateway.config import Config, Limits

# For headers, of which the first come in time on a busy machine too.
IN_TIME_S = 0.5


async def send_for_ever(opened) -> None:
    while True:
        await opened.send(bytes(1 << 16))
        await asyncio.sleep(0)


class Echo:
    """Answers with the body, or at once; `gone` is set when a client leaves."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.waits = asyncio.Event()
        self.num_requests = 0

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.num_requests += 1
        body = b""
        if scope["path"] == "/body":
            more = True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
        if scope["path"] == "/wait":
            self.waits.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()
            return
        headers = [(b"content-length", str(len(body)).encode())]
        if scope["path"] == "/refuse":
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def limits(**changes) -> Config:
    return Config(limits=Limits(**changes))


async def test_requests_in_a_row_and_pipelined():
    echo = Echo()
    async with served(echo, limits()) as address, connection(address) as opened:
        for text in (b"a", b"bc"):
            await opened.send(request("POST", "/body", text))
            assert (await opened.answer()).body == text
        await opened.send(request("POST", "/body", b"1") + request("POST", "/body", b"2"))
        assert [(await opened.answer()).body for _ in range(2)] == [b"1", b"2"]


async def test_what_comes_behind_the_last_request():
    last = request("POST", "/body", b"a", {"Connection": "close"})
    async with served(Echo(), limits()) as address, connection(address) as opened:
        await opened.send(last + request("GET", "/x"))
        assert (await opened.answer()).body == b"a"
        assert await opened.at_end()


UPGRADE = {
    "Connection": "Upgrade, HTTP2-Settings",
    "Upgrade": "h2c",
    "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
}


@pytest.mark.parametrize("size", [1, 1 << 16])
async def test_another_protocol_is_offered(size):
    """As by each request of Java's HttpClient."""
    async with served(Echo(), limits()) as address, connection(address) as opened:
        for text in (b"a", b"", b"bc"):
            sent = request("POST", "/body", text, UPGRADE)
            for begin in range(0, len(sent), size):
                await opened.send(sent[begin : begin + size])
            answer = await opened.answer()
            assert (answer.status, answer.body) == (200, text)
        await opened.send(request("POST", "/body", b"1", UPGRADE) + request("GET", "/x"))
        assert [(await opened.answer()).body for _ in range(2)] == [b"1", b""]


@pytest.mark.parametrize("sent", [b"", b"POST /bo", b"POST /body HTTP/1.1\r\nA: b\r\n"])
async def test_headers_that_do_not_come(sent):
    async with served(Echo(), limits(headers_s=0.05)) as address, connection(address) as opened:
        await opened.send(sent)
        answer = await opened.answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert len(answer.headers["x-request-id"]) == 32
        assert answer.headers["connection"] == "close"
        assert await opened.at_end()


async def test_headers_that_do_not_come_behind_a_request():
    config = limits(headers_s=IN_TIME_S)
    async with served(Echo(), config) as address, connection(address) as opened:
        await opened.send(request("GET", "/x"))
        assert (await opened.answer()).status == 200
        await opened.send(b"GET /y HTTP/1.1\r\n")
        assert (await opened.answer()).status == 408
        assert await opened.at_end()


async def test_line_breaks_keep_no_connection_open():
    """They belong to no request, and uvicorn would wait behind them for ever."""
    config = limits(headers_s=IN_TIME_S)
    async with served(Echo(), config) as address, connection(address) as opened:
        await opened.send(request("GET", "/x"))
        assert (await opened.answer()).status == 200
        await opened.send(b"\r\n")
        assert (await opened.answer()).status == 408
        assert await opened.at_end()


async def test_headers_that_do_not_come_behind_a_request_that_runs():
    echo, config = Echo(), limits(headers_s=IN_TIME_S)
    async with served(echo, config) as address, connection(address) as opened:
        await opened.send(request("GET", "/wait") + b"GET /x HTTP/1.1\r\nA:")
        assert await opened.at_end()
        async with asyncio.timeout(30):
            await echo.gone.wait()


async def test_an_idle_connection_is_closed_without_a_word():
    async with served(Echo(), limits(idle_s=0.05)) as address, connection(address) as opened:
        await opened.send(request("GET", "/x"))
        assert (await opened.answer()).status == 200
        assert await opened.at_end()


async def test_headers_without_end():
    async with served(Echo(), limits()) as address, connection(address) as opened:
        line = b"X: " + b"a" * 1000 + b"\r\n"
        await opened.send(b"GET /x HTTP/1.1\r\n")
        # In pieces, so that no piece by itself is too long.
        for _ in range(connections.MAX_HEADER_BYTES // len(line) + 2):
            await opened.send(line)
        answer = await opened.answer()
        assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
        assert await opened.at_end()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00",
        b"HELLO\r\n\r\n",
        b"GET /x HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n",
    ],
)
async def test_what_is_no_http(sent):
    async with served(Echo(), limits()) as address, connection(address) as opened:
        await opened.send(sent)
        answer = await opened.answer()
        assert (answer.status, answer.error["code"]) == (400, "bad_request")
        assert await opened.at_end()


async def test_more_connections_than_are_allowed():
    config = limits(max_connections=1)
    async with served(Echo(), config) as address, connection(address) as first:
        await first.send(request("GET", "/x"))
        assert (await first.answer()).status == 200
        async with connection(address) as second:
            answer = await second.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert await second.at_end()
        await first.send(request("GET", "/x"))
        assert (await first.answer()).status == 200


async def test_a_refusal_reaches_a_client_that_still_sends(monkeypatch):
    """A connection that is closed with bytes unread is reset, and the answer may be lost."""
    monkeypatch.setattr(connections, "LINGER_S", 60)
    async with served(Echo(), limits()) as address, connection(address) as opened:
        head = request("POST", "/refuse", b"", {"Content-Length": str(1 << 30)})
        await opened.send(head)
        answer = await opened.answer()
        assert answer.status == 200
        for _ in range(64):
            await opened.send(bytes(1 << 16))
        assert await opened.at_end()


async def test_a_client_that_lingers_for_ever_is_cut(monkeypatch):
    monkeypatch.setattr(connections, "LINGER_S", 0.05)
    async with served(Echo(), limits()) as address, connection(address) as opened:
        await opened.send(request("POST", "/refuse", b"", {"Content-Length": str(1 << 30)}))
        assert (await opened.answer()).status == 200
        with pytest.raises(ConnectionError):
            await send_for_ever(opened)


class Large:
    """Answers with more than fits into any buffer."""

    BODY = bytes(1 << 25)

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await Echo()(scope, receive, send)
            return
        headers = [(b"content-length", str(len(self.BODY)).encode()), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.BODY})


async def test_a_large_answer_that_nobody_reads(monkeypatch):
    monkeypatch.setattr(connections, "LINGER_S", 0.01)
    config = limits(body_s=0.05)
    async with served(Large(), config) as address:
        _, writer = await asyncio.open_connection(*address, limit=1)
        writer.write(request("GET", "/"))
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(wait_for_reset(writer), 60)


class Clockwork:
    """A transport with so many bytes unsent at each look, and a loop whose timers the test runs."""

    def __init__(self, *unsent: int) -> None:
        self._unsent = list(unsent)
        self.delays: list[float] = []
        self.due: list = []
        self.is_cut = False

    def get_write_buffer_size(self) -> int:
        return self._unsent.pop(0)

    def abort(self) -> None:
        self.is_cut = True

    def call_later(self, delay, function, *arguments) -> None:
        self.delays.append(delay)
        self.due.append((function, arguments))


@pytest.mark.parametrize(
    ("unsent", "delays"),
    [
        ([0, 0], [2.0]),
        # What was sent last is still on its way when nothing is left to send.
        ([9, 5, 5, 0, 0, 0], [30.0, 30.0, 2.0]),
        ([9, 9], [30.0]),
    ],
)
def test_a_connection_is_cut_when_nothing_more_is_taken(unsent, delays):
    clockwork = Clockwork(*unsent)
    made = connections.Connection.__new__(connections.Connection)
    made.transport = made.loop = clockwork
    made._end_after_last_bytes()
    while clockwork.due:
        assert not clockwork.is_cut
        function, arguments = clockwork.due.pop()
        function(*arguments)
    assert clockwork.is_cut
    assert clockwork.delays == delays


async def wait_for_reset(writer: asyncio.StreamWriter) -> None:
    """Writing tells when the other side has closed."""
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0)


async def test_a_client_that_leaves_with_requests_in_the_pipe():
    """That it has left is seen, though nothing of what it sent behind is read yet."""
    echo = Echo()
    async with served(echo, limits()) as address:
        async with connection(address) as opened:
            await opened.send(request("GET", "/wait") + request("GET", "/x"))
            async with asyncio.timeout(30):
                await echo.waits.wait()
        async with asyncio.timeout(30):
            await echo.gone.wait()


async def test_too_many_requests_in_the_pipe():
    echo = Echo()
    async with served(echo, limits()) as address, connection(address) as opened:
        await opened.send(request("GET", "/wait"))
        for _ in range(connections.MAX_PIPELINED + 1):
            await opened.send(request("GET", "/x"))
        assert await opened.at_end()
        async with asyncio.timeout(30):
            await echo.gone.wait()
    assert echo.num_requests == 1
