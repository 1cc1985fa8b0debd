"""HTTP/1.1 written by hand: what no good library sends, and answers as they came."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

WAIT_S = 60
# Closing sends a reset, not an orderly end.
_LINGER_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Answer:
    """Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Of the body, which must have the shape of OpenAI's errors and nothing else."""
        assert self.headers["content-type"].startswith("application/json"), self
        (name,) = self.json
        error = self.json[name]
        assert name == "error"
        assert sorted(error) == ["code", "message", "param", "type"], error
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        for key in ("param", "code"):
            assert error[key] is None or isinstance(error[key], str), error
        return error


def request(
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str | None] | None = None,
) -> bytes:
    """The bytes of a request; a body that is no bytes is sent as JSON. A header of None is left
    out."""
    content = b"" if body is None else body
    if not isinstance(content, bytes):
        content = json.dumps(content).encode()
    lines: dict[str, str | None] = {"Host": "gateway"}
    if body is not None:
        lines |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
    lines |= headers or {}
    head = [f"{method} {path} HTTP/1.1"]
    head += [f"{name}: {value}" for name, value in lines.items() if value is not None]
    return "\r\n".join([*head, "", ""]).encode() + content


class Connection:
    """One connection; requests are sent and answers read as the test likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, content: bytes) -> None:
        self._writer.write(content)
        async with asyncio.timeout(WAIT_S):
            await self._writer.drain()

    async def head(self) -> Answer:
        """Status line and headers of the next answer; its body is still to come."""
        async with asyncio.timeout(WAIT_S):
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.partition(":") for line in lines[1:] if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        return Answer(int(lines[0].split()[1]), headers)

    async def answer(self) -> Answer:
        """The next answer, whole."""
        head = await self.head()
        if head.headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self.chunks()])
        else:
            async with asyncio.timeout(WAIT_S):
                body = await self._reader.readexactly(int(head.headers.get("content-length", 0)))
        return Answer(head.status, head.headers, body)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Of a chunked body, to its end."""
        while True:
            async with asyncio.timeout(WAIT_S):
                size = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
                chunk = (await self._reader.readexactly(size + 2))[:-2]
            if not chunk:
                return
            yield chunk

    async def events(self) -> AsyncIterator[str]:
        """The data of each server-sent event; comments are left out."""
        text = b""
        async for chunk in self.chunks():
            text += chunk
            *events, text = text.split(b"\n\n")
            for event in events:
                if not event.startswith(b":"):
                    assert event.startswith(b"data: "), event
                    yield event.removeprefix(b"data: ").decode()
        assert text == b"", text

    async def at_end(self) -> bool:
        """Whether nothing more comes before the other side closes."""
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                return await self._reader.read() == b""
        return True

    def reset(self) -> None:
        """As when the client's process is killed; nothing where it is closed."""
        if self._writer.is_closing():
            return
        link = self._writer.get_extra_info("socket")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()


@contextlib.asynccontextmanager
async def connection(
    address: tuple[str, int], buffer_bytes: int | None = None
) -> AsyncIterator[Connection]:
    """buffer_bytes: how much is taken in that nobody reads, roughly."""
    link = socket.socket()
    link.setblocking(False)
    if buffer_bytes is not None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    await asyncio.get_running_loop().sock_connect(link, address)
    limit = buffer_bytes or 1 << 24
    opened = Connection(*await asyncio.open_connection(sock=link, limit=limit))
    try:
        yield opened
    finally:
        opened.reset()


async def ask(
    address: tuple[str, int],
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str | None] | None = None,
) -> Answer:
    """One request on a connection of its own."""
    async with connection(address) as opened:
        await opened.send(request(method, path, body, headers))
        return await opened.answer()


async def until_ready(address: tuple[str, int], status: int = 200) -> None:
    """Until /ready of the gateway there says so; it hears of its server later than the test."""
    async with asyncio.timeout(WAIT_S):
        while (await ask(address, "GET", "/ready")).status != status:
            pass


def chunks_of(events: list[str]) -> list[dict[str, Any]]:
    """The JSON of a stream that ended well."""
    assert events[-1] == "[DONE]", events[-3:]
    return [json.loads(event) for event in events[:-1]]
