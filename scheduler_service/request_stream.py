"""The events of one request, from the engine to whoever serves it."""

from __future__ import annotations

import asyncio

from .request import Event, FinishedEvent


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
