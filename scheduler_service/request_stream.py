"""The events of one call, from the engine to whoever serves it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from .errors import SupersededError
from .record import AnswerLog
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
        # All that was told, by request id; also what was read long ago.
        self.logs: defaultdict[str, AnswerLog] = defaultdict(AnswerLog)
        # Told of each event, before its reader.
        self.on_event: Callable[[Event], None] | None = None
        self._num_answers = num_answers
        # Answers whose last event was not read.
        self._num_open = num_answers
        # None: another stream took this one's place.
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()

    def push(self, event: Event) -> None:
        """For the engine: adds an event."""
        self.logs[event.request_id].add(event)
        if self.on_event is not None:
            self.on_event(event)
        self._events.put_nowait(event)

    def reopened(self) -> RequestStream:
        """A stream in this one's place, which begins with all that was told, an event of each kind
        for an answer. Who reads this one gets SupersededError; the engine is to be told."""
        stream = RequestStream(self.call_id, 0, self._num_answers)
        stream.logs = self.logs
        stream.on_event = self.on_event
        for request_id, log in self.logs.items():
            for event in log.events(request_id):
                stream._events.put_nowait(event)
        self._events.put_nowait(None)
        return stream

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        """SupersededError when another stream took this one's place."""
        if not self._num_open:
            raise StopAsyncIteration
        event = await self._events.get()
        if event is None:
            # For who asks again.
            self._events.put_nowait(None)
            raise SupersededError(f"another connection reads request {self.call_id!r} now")
        return self._note(event)

    def take_ready(self) -> list[Event]:
        """Events that are here now, without waiting: lets a reader join several into one."""
        ready: list[Event] = []
        while self._num_open and not self._events.empty():
            event = self._events.get_nowait()
            if event is None:
                self._events.put_nowait(None)
                break
            ready.append(self._note(event))
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

    def __contains__(self, request: Request) -> bool:
        """This very one; not another of its id, which comes when it has ended."""
        live, _ = self._live.get(request.request_id, (None, None))
        return live is request

    def requests(self) -> list[Request]:
        """The live requests, in order of `open`."""
        return [request for request, _ in self._live.values()]

    def open(self, requests: Sequence[Request], queue_position: int) -> RequestStream:
        """A stream for the answers to a call that was accepted."""
        stream = RequestStream(requests[0].call_id, queue_position, len(requests))
        self.add(requests, stream)
        return stream

    def add(self, requests: Sequence[Request], stream: RequestStream) -> None:
        """Live requests whose events go to this stream."""
        self._live.update((request.request_id, (request, stream)) for request in requests)
        self._all_ended.clear()

    def redirect(self, stream: RequestStream) -> None:
        """What is told of the call from now on goes to this stream, in the former one's place."""
        for request_id, (request, former) in self._live.items():
            if former.call_id == stream.call_id:
                self._live[request_id] = (request, stream)

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
