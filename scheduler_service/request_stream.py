"""The events of one request, from the engine to whoever serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from .request import Event, FinishedEvent, Request


class RequestStream:
    """Async iterator of a request's events: TokenEvents, then exactly one FinishedEvent, then end.

    It never blocks the engine: events wait in memory (a few bytes a token) until they are read.
    Dropping the stream does not cancel the request; `Engine.cancel` does. One reader at a time.
    """

    def __init__(self, request_id: str, queue_position: int) -> None:
        self.request_id = request_id
        # Requests ahead in the queue when this one was accepted.
        self.queue_position = queue_position
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = False

    def push(self, event: Event) -> None:
        """For the engine: adds an event."""
        self._events.put_nowait(event)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        event = await self._events.get()
        self._ended = isinstance(event, FinishedEvent)
        return event

    def take_ready(self) -> list[Event]:
        """Events that are here now, without waiting: lets a reader join several into one."""
        ready: list[Event] = []
        while not self._ended and not self._events.empty():
            event = self._events.get_nowait()
            self._ended = isinstance(event, FinishedEvent)
            ready.append(event)
        return ready


class RequestStreams:
    """All live requests with their streams, by request id."""

    def __init__(self) -> None:
        self._live: dict[str, tuple[Request, RequestStream]] = {}
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def requests(self) -> list[Request]:
        """The live requests, in order of `open`."""
        return [request for request, _ in self._live.values()]

    def open(self, request: Request, queue_position: int) -> RequestStream:
        """A stream for a request that was accepted."""
        stream = RequestStream(request.request_id, queue_position)
        self._live[request.request_id] = (request, stream)
        self._all_ended.clear()
        return stream

    def tell(self, events: Iterable[Event]) -> None:
        """Hands events to their streams; a FinishedEvent takes its stream out of the table."""
        for event in events:
            _, stream = self._live[event.request_id]
            stream.push(event)
            if isinstance(event, FinishedEvent):
                del self._live[event.request_id]
        if not self._live:
            self._all_ended.set()

    async def wait_all_ended(self) -> None:
        """Waits until no request is live."""
        await self._all_ended.wait()
