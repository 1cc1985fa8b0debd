"""A TCP relay in the middle of a connection: it delays, holds and cuts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any

_READ_BYTES = 1 << 16
# Closing sends a reset, not an orderly end.
_LINGER_RESET = struct.pack("ii", 1, 0)


class Relay:
    """Listens on a port of 127.0.0.1 of its own and hands all on to `target`.

    A partition drops no byte in the middle of a stream, as TCP would not: it holds all, both ways,
    and whoever dials waits. Threads may call every method.
    """

    def __init__(
        self,
        target: tuple[str, int],
        make_socket: Callable[[], socket.socket] | None = None,
    ) -> None:
        """make_socket gives the TCP socket that dials the target, for example one that belongs to
        another network namespace."""
        self._target = target
        self._make_socket = make_socket or _tcp_socket
        self._delay_s = 0.0
        self._open: asyncio.Event
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port: int = self._call(self._listen())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def delay(self, seconds: float) -> None:
        """From now on each piece arrives so much later, each way; 0: at once."""
        self._delay_s = seconds

    def hold(self) -> None:
        """Nothing passes any more, and new connections are not made."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def release(self) -> None:
        """What was held arrives."""
        self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> int:
        """Resets every connection; their number."""
        return self._call(self._cut())

    def close(self) -> None:
        self._call(self._cut())
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> int:
        self._open = asyncio.Event()
        self._open.set()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = server
        return server.sockets[0].getsockname()[1]

    async def _cut(self) -> int:
        cut = list(self._writers)
        for writer in cut:
            with contextlib.suppress(OSError):
                link = writer.get_extra_info("socket")
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            writer.transport.abort()
        return len(cut) // 2

    async def _end(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            await self._open.wait()
            link = self._make_socket()
            await self._loop.sock_connect(link, self._target)
            far_reader, far_writer = await asyncio.open_connection(sock=link)
            writers.append(far_writer)
            self._writers.update(writers)
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._writers.difference_update(writers)
            for one in writers:
                one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one side ends; then OSError, so that the other way ends too."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def take() -> None:
            while piece := await reader.read(_READ_BYTES):
                await pieces.put((self._loop.time() + self._delay_s, piece))
            raise ConnectionError("the end of the stream")

        async def give() -> None:
            while True:
                due, piece = await pieces.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await self._open.wait()
                writer.write(piece)
                await writer.drain()

        await asyncio.gather(take(), give())


def _tcp_socket() -> socket.socket:
    link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    link.setblocking(False)
    return link
