"""One HTTP connection: uvicorn's, with bounds of time, size and number that it does not have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.config import Config as ServerConfig
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from .caller import new_request_id
from .config import Limits
from .errors import ApiError, unavailable

MAX_HEADER_BYTES: Final = 64 << 10
# Requests that may come behind one that is being answered.
MAX_PIPELINED: Final = 8
# After the last byte of a response: time for it to reach a client that still sends.
LINGER_S: Final = 2.0


def connection_class(
    limits: Limits, count: Callable[[int], None] = lambda status: None
) -> type[HttpToolsProtocol]:
    """For `http` of uvicorn's settings. `count` is told the status of each refusal."""

    class LimitedConnection(Connection):
        LIMITS = limits

        def _count(self, status: int) -> None:
            count(status)

    return LimitedConnection


class Connection(HttpToolsProtocol):
    """Ends, with a word, what uvicorn would wait for or gather without end."""

    LIMITS: Limits = Limits()

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = _Parser(self)  # type: ignore[assignment]
        # While the headers of a request are awaited or come.
        self._headers_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        # The request that is being answered.
        self._running: RequestResponseCycle | None = None
        # What still comes is read and dropped: closing at once would reset the connection, and
        # take from the client what was said last.
        self._is_lingering = False
        self._last_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.LIMITS.max_connections:
            self._refuse(unavailable("too many connections are open; try again later"))
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_timer, self._last_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # uvicorn tells the request that came last, which may wait behind the one that is answered.
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        super().data_received(data)
        if self.transport.is_closing() or self._is_lingering:
            return
        if self._headers_timer is not None:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse(_too_large_headers())
        elif self.cycle is None or self.cycle.response_complete:
            # Something came that is no request yet.
            self._await_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._headers_timer is None:
            self._await_headers()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            # They come again, without the offer.
            return
        self._end_headers()
        super().on_headers_complete()
        self.cycle.transport = _Linger(self.transport, self._linger)  # type: ignore[assignment]
        if self.pipeline:
            # uvicorn would not read on, and so not see that the client has left.
            self.flow.resume_reading()
            if len(self.pipeline) > MAX_PIPELINED:
                self.transport.close()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            ApiError(HTTPStatus.BAD_REQUEST, "the request is no HTTP/1.1", code="bad_request")
        )

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_after_last_bytes()

    def _await_headers(self) -> None:
        self._num_header_bytes = 0
        self._headers_timer = self.loop.call_later(self.LIMITS.headers_s, self._headers_late)

    def _end_headers(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _headers_late(self) -> None:
        self._headers_timer = None
        self._refuse(
            ApiError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the headers did not come within {self.LIMITS.headers_s:g} s",
                code="request_timeout",
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Says why, and closes."""
        self._end_headers()
        if self.cycle is not None and not self.cycle.response_complete:
            # Another answer is being written there.
            self.transport.close()
            return
        body = error.body()
        status = HTTPStatus(error.status)
        self._count(status)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            # Of its own: what came as a header was not read, or is not to be trusted.
            "x-request-id": new_request_id(),
            **error.headers,
        }
        lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        self._linger()

    def _count(self, status: int) -> None:
        """A request was refused before it was one."""

    def _linger(self) -> None:
        """Closes after the client has had time to read."""
        if self.transport.is_closing() or self._is_lingering:
            return
        self._is_lingering = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._end_after_last_bytes()

    def _end_after_last_bytes(self) -> None:
        """Cuts the connection when its client takes nothing more, or has seen the end."""
        unsent = self.transport.get_write_buffer_size()
        wait_s = max(LINGER_S, self.LIMITS.body_s) if unsent else LINGER_S
        self._last_timer = self.loop.call_later(wait_s, self._cut_unless_read, unsent)

    def _cut_unless_read(self, unsent: int) -> None:
        if self.transport.get_write_buffer_size() < unsent:
            self._end_after_last_bytes()
        else:
            self.transport.abort()


class _Parser:
    """httptools' parser, for requests that offer another protocol too, as all of Java's HttpClient
    do. It takes what follows their headers for that protocol; they are parsed anew without the
    offer, which a server may pass over."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parser = _new_parser(connection)

    def feed_data(self, data: bytes) -> None:
        """HttpParserError."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.get_method() == b"CONNECT":
                raise httptools.HttpParserError("a tunnel") from None
            (num_read,) = upgrade.args
            head = self._head()
            self._parser = _new_parser(self._connection)
            self.feed_data(head + data[num_read:])

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return self._parser.should_upgrade()

    def _head(self) -> bytes:
        """Of the request that has come, without the offer."""
        version = self.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.get_method(), self._connection.url, version)]
        for name, value in self._connection.headers:
            if name != b"upgrade":
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])


def _new_parser(connection: Connection) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(connection)
    # As uvicorn has it: what comes behind the last request is no reason not to answer that.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


class _Linger:
    """A transport whose `close` is another one; for uvicorn, which closes after a last response."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close
        self.write = transport.write
        self.is_closing = transport.is_closing


def _too_large_headers() -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        f"the headers have more than {MAX_HEADER_BYTES} bytes",
        code="headers_too_large",
    )
