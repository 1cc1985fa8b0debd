"""The events of one call, from the engine to whoever serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from .request import Event, FinishedEvent, Request


class RequestStream:
    """Async iterator of a call's events, those of its answers mixed; it ends behind the last one.

    Of each answer: PromptLogprobsEvents, TokenEvents, then exactly one FinishedEvent. It never
    blocks the engine: events wait in memory (a few bytes a token) until they are read.
    Dropping the stream does not cancel the call; `Engine.cancel` does. One reader at a time.
    """

    def __init__(self, call_id: str, queue_position: int, num_answers: int = 1) -> None:
        self.call_id = call_id
        # Requests ahead in the queue when this one was accepted.
        self.queue_position = queue_position
        # Answers whose last event was not read.
        self._num_open = num_answers
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def push(self, event: Event) -> None:
        """For the engine: adds an event."""
        self._events.put_nowait(event)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        if not self._num_open:
            raise StopAsyncIteration
        return self._note(await self._events.get())

    def take_ready(self) -> list[Event]:
        """Events that are here now, without waiting: lets a reader join several into one."""
        ready: list[Event] = []
        while self._num_open and not self._events.empty():
            ready.append(self._note(self._events.get_nowait()))
        return ready

    def _note(self, event: Event) -> Event:
        self._num_open -= isinstance(event, FinishedEvent)
        return event


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

    def open(self, requests: Sequence[Request], queue_position: int) -> RequestStream:
        """A stream for the answers to a call that was accepted."""
        stream = RequestStream(requests[0].call_id, queue_position, len(requests))
        self._live.update((request.request_id, (request, stream)) for request in requests)
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
