"""The HTTP port that Prometheus scrapes: GET /metrics, one answer a connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable

from .config import ConfigError, join_address
from .metrics import CONTENT_TYPE

# Scrapers are few, and quick.
MAX_CONNECTIONS = 32
_MAX_HEAD_BYTES = 16 << 10
_TIMEOUT_S = 10.0
# For so long an answer is given again: whoever asks without a pause gets little of the loop's time.
KEPT_S = 0.1

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def metrics_port(host: str, port: int, text: Callable[[], bytes]) -> AsyncIterator[str]:
    """Serves while the block runs; gives host:port. ConfigError when the port cannot be had."""
    serving = _Serving(text)
    try:
        server = await asyncio.start_server(serving.answer, host, port, limit=_MAX_HEAD_BYTES)
    except OSError as error:
        where = join_address(host, port)
        raise ConfigError(
            f"metrics_port: cannot listen on {where}: {error.strerror or error}; choose another "
            "--metrics-port, 0 takes a free one"
        ) from error
    try:
        yield join_address(host, server.sockets[0].getsockname()[1])
    finally:
        server.close()
        serving.close()


class _Serving:
    def __init__(self, text: Callable[[], bytes]) -> None:
        self._text = text
        self._kept = b""
        self._kept_until_s = -math.inf
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes a connection. One too many is closed at once: the others end by their time."""
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._converse(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # It has gone, is too slow, or is no HTTP: nobody is there to be told.
            log.debug("a connection to the port for metrics was given up")
        finally:
            writer.transport.abort()

    def _response(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != b"/metrics":
            return _message("404 Not Found", b"there is /metrics here\n")
        if method not in (b"GET", b"HEAD"):
            return _message(
                "405 Method Not Allowed", b"/metrics takes GET\n", "Allow: GET, HEAD\r\n"
            )
        try:
            body = self._body()
        except Exception:
            log.exception("metrics cannot be told")
            return _message("500 Internal Server Error", b"the server's log says more\n")
        message = _message("200 OK", body, f"Content-Type: {CONTENT_TYPE}\r\n")
        return message if method == b"GET" else message[: -len(body)]

    def _body(self) -> bytes:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._kept_until_s:
            self._kept = self._text()
            # From its end on: slow text is told no more often.
            self._kept_until_s = asyncio.get_running_loop().time() + KEPT_S
        return self._kept


def _message(status: str, body: bytes, headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
