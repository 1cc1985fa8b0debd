"""The calls that were accepted: who reads them, what was told, and what is still known of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from .answers import ANSWER_ERRORS, Answer, Update
from .engine import Engine
from .errors import (
    DuplicateRequestError,
    ExpiredRequestError,
    OutOfRangeError,
    SupersededError,
    UnknownRequestError,
)
from .journal import Journal
from .logs import words
from .record import AnswerLog, CallRecord
from .request import (
    Event,
    FinishedEvent,
    FinishReason,
    PromptLogprobsEvent,
    Request,
    TokenEvent,
)
from .request_stream import RequestStream
from .trace import Trace

# Tokens of a prompt whose logprobs are told at once: with 20 alternatives, some milliseconds' work.
PROMPT_PART = 128
# Generated tokens that are told at once: when a reader comes late.
TOKEN_PART = 512
# A client's clock starts before ours: it gives up at its deadline, a little before we reach it.
DEADLINE_SLACK_NS = 100_000_000
# Ids of which it is still known that there was a call.
_MAX_EXPIRED = 1 << 14
_FAILURES = (FinishReason.DEADLINE, FinishReason.ERROR)

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Call:
    """An accepted call. `requests`: one for each answer, also of those that have ended."""

    record: CallRecord
    requests: tuple[Request, ...]
    stream: RequestStream
    # How long it goes on without a reader.
    window_s: float = 0.0
    # It began in a former life of the server; tokens told then may be unknown now.
    is_resumed: bool = False
    # Whether it is in the journal, as soon as that is known; None: there is no journal.
    journaled: asyncio.Future[bool] | None = None
    ended_s: float | None = None
    # None: it is not traced.
    trace: Trace | None = None
    # Which answer is which, by request id.
    choices: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = {one.request_id: index for index, one in enumerate(self.requests)}

    @property
    def call_id(self) -> str:
        return self.record.call_id

    @property
    def deadline_ns(self) -> int | None:
        return self.requests[0].deadline_ns

    def logs(self) -> list[AnswerLog]:
        """All that was told, by answer."""
        return [self.stream.logs[request.request_id] for request in self.requests]

    @property
    def has_ended(self) -> bool:
        """All its answers have."""
        return all(log.end is not None for log in self.logs())

    @property
    def num_bytes(self) -> int:
        """Memory that is kept for it, about."""
        return self.record.num_bytes + sum(log.num_bytes for log in self.logs())

    def check_index(self, choice: int, index: int) -> None:
        """OutOfRangeError when so many tokens of an answer cannot have been received."""
        log = self.logs()[choice]
        bound = len(log.token_ids) + (log.end is not None)
        if self.is_resumed and log.end is None:
            bound = self.requests[choice].max_new_tokens
        if index > bound:
            raise OutOfRangeError(
                f"next_token_index {index} is beyond what answer {choice} of request "
                f"{self.call_id!r} has told: {len(log.token_ids)} tokens"
            )

    def check_prompt_index(self, index: int) -> None:
        """OutOfRangeError where no such logprobs of the prompt can have been received."""
        first = self.requests[0]
        wants = first.num_prompt_logprobs is not None
        bound = len(first.prompt_token_ids) if wants else 0
        # The first one is that of token 1.
        if index > max(bound, 1):
            asked = f"those of {bound} prompt tokens" if wants else "no logprobs of its prompt"
            raise OutOfRangeError(
                f"next_prompt_token_index {index} is beyond what request {self.call_id!r} asked "
                f"for: {asked}"
            )


class Calls:
    """All calls that wait or run, and for a while those that have ended. One event loop only."""

    def __init__(
        self, engine: Engine, journal: Journal | None, retention_s: float, max_bytes: int
    ) -> None:
        """What has ended is kept for retention_s, less where all takes more than max_bytes."""
        self._engine = engine
        self._journal = journal
        self._retention_s = retention_s
        self._max_bytes = max_bytes
        self._calls: dict[str, Call] = {}
        # Bytes of those that have ended, in order of their end.
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._num_ended_bytes = 0
        # In order of their expiry.
        self._expired: OrderedDict[str, None] = OrderedDict()
        self._waits: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopping = False

    @property
    def num_unread(self) -> int:
        """Calls that wait or run while nobody reads them."""
        return len(self._waits)

    def add(self, call: Call) -> None:
        """From now on it is known, and what it tells is written down."""
        call_id = call.call_id
        if call_id in self._ended:
            self._forget(call_id)
        self._calls[call_id] = call
        call.stream.on_event = lambda event: self._note(call, event)
        if self._journal is not None and not call.is_resumed:
            call.journaled = self._journal.accept(call.record)
        if call.has_ended:
            self._keep(call)

    def check_free(self, call_id: str, client: str) -> None:
        """DuplicateRequestError when another client's call of this id is still kept: it is not
        this client's to replace."""
        call = self._calls.get(call_id)
        if call is not None and call.record.client != client:
            raise DuplicateRequestError(
                f"a request of id {call_id!r} is known already; choose another id"
            )

    def find(self, call_id: str) -> Call:
        """UnknownRequestError; ExpiredRequestError when it was known once."""
        call = self._calls.get(call_id)
        if call is None:
            if call_id in self._expired:
                raise ExpiredRequestError(
                    f"request {call_id!r} ended too long ago: its tokens were kept for "
                    f"{self._retention_s:g} s at most; send it anew with its seed for the same ones"
                )
            raise UnknownRequestError(f"no request of id {call_id!r} is known; send it anew")
        return call

    def leave(self, generation: Generation) -> None:
        """Nobody reads the call any more: it goes on for its window, then it is cancelled."""
        wait = asyncio.get_running_loop().create_task(self._read_unread(generation))
        self._waits.add(wait)
        wait.add_done_callback(self._waits.discard)

    def stop(self) -> None:
        """The server is about to end: what it ends then goes on in its next life."""
        self._is_stopping = True

    def close(self) -> None:
        """Waits for no reader any more."""
        if self._timer is not None:
            self._timer.cancel()
        for wait in self._waits:
            wait.cancel()

    async def _read_unread(self, generation: Generation) -> None:
        """Reads in the client's place, so that stop strings are found."""
        call = generation.call
        try:
            async with asyncio.timeout(call.window_s):
                while not generation.has_ended:
                    # What one of its answers ended with is no matter of the others.
                    with contextlib.suppress(*ANSWER_ERRORS):
                        await generation.next()
        except TimeoutError:
            generation.cancel(FinishReason.CANCELLED)
        except SupersededError:
            return

    def _note(self, call: Call, event: Event) -> None:
        if call.trace is not None:
            call.trace.note(event)
        if self._journal is not None and not self._goes_on(event):
            self._journal.add(call.call_id, call.choices[event.request_id], event)
        if isinstance(event, FinishedEvent) and call.has_ended:
            _tell_end(call)
            self._keep(call)

    def _goes_on(self, event: Event) -> bool:
        """An end that is the server's own."""
        is_ours = isinstance(event, FinishedEvent) and event.status == "UNAVAILABLE"
        return is_ours and self._is_stopping

    def _keep(self, call: Call) -> None:
        """It has ended."""
        if call.ended_s is None:
            call.ended_s = asyncio.get_running_loop().time()
        size = call.num_bytes
        self._ended[call.call_id] = size
        self._num_ended_bytes += size
        while self._num_ended_bytes > self._max_bytes:
            self._expire(next(iter(self._ended)))
        self._arm_timer()

    def _arm_timer(self) -> None:
        if self._timer is None and self._ended:
            oldest = self._calls[next(iter(self._ended))]
            assert oldest.ended_s is not None
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(oldest.ended_s + self._retention_s, self._expire_old)

    def _expire_old(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for call_id in list(self._ended):
            ended_s = self._calls[call_id].ended_s
            if ended_s is None or ended_s + self._retention_s > now_s:
                break
            self._expire(call_id)
        self._arm_timer()

    def _expire(self, call_id: str) -> None:
        self._forget(call_id)
        self._expired[call_id] = None
        if len(self._expired) > _MAX_EXPIRED:
            self._expired.popitem(last=False)

    def _forget(self, call_id: str) -> None:
        self._num_ended_bytes -= self._ended.pop(call_id)
        del self._calls[call_id]
        if self._journal is not None:
            self._journal.forget(call_id)


class Generation:
    """A reader of a call. Leaving its `async with` before the end ends the call, unless it may go
    on without one."""

    def __init__(
        self,
        engine: Engine,
        calls: Calls,
        call: Call,
        answers: Sequence[Answer],
        *,
        is_attached: bool = False,
    ) -> None:
        self.call = call
        self.request = call.requests[0]
        self.queue_position = call.stream.queue_position
        self._engine = engine
        self._calls = calls
        # Another reader may take the call's stream over, not this one's.
        self._stream = call.stream
        self._answers = {answer.request.request_id: answer for answer in answers}
        # Its connection's deadline is not the request's.
        self._is_attached = is_attached
        # Events that were read and not yet told.
        self._events: deque[Event] = deque()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    @property
    def has_ended(self) -> bool:
        """Every answer has had its last update."""
        return all(answer.has_ended for answer in self._answers.values())

    async def is_journaled(self) -> bool:
        """Whether the call is in the journal; waits for a moment until that is known."""
        if self.call.journaled is None:
            return False
        return await asyncio.shield(self.call.journaled)

    def close(self) -> None:
        """Nobody reads it any more."""
        if self._stream is not self.call.stream:
            return
        if self.has_ended:
            return
        if self._is_late():
            self.cancel(FinishReason.DEADLINE)
        elif self.call.window_s > 0:
            self._calls.leave(self)
        else:
            self.cancel(FinishReason.CANCELLED)

    def cancel(self, reason: FinishReason) -> None:
        """Ends what still waits or runs."""
        # It may have ended by itself, with its last events on their way here; then its id may be
        # the next call's.
        if not self.call.has_ended:
            self._engine.cancel(self.call.call_id, reason)

    async def next(self) -> list[Update]:
        """Waits for events and joins all that are here, by answer; of much, a bounded part at a
        time, and others get their turn between.

        Errors as of Answer.update: the others of that moment have taken their events too, and may
        go on. SupersededError. Nothing may be asked when all have ended.
        """
        if self._events:
            await asyncio.sleep(0)
        else:
            for event in (await anext(self._stream), *self._stream.take_ready()):
                self._events.extend(_parts(event))
        by_answer: dict[str, list[Event]] = {}
        for event in self._take_some():
            by_answer.setdefault(event.request_id, []).append(event)
        updates: list[Update] = []
        error: Exception | None = None
        for name, events in by_answer.items():
            try:
                updates.append(self._answers[name].update(events))
            except ANSWER_ERRORS as its_own:
                error = error or its_own
        if error is not None:
            raise error
        return updates

    def _take_some(self) -> Iterator[Event]:
        """The first events that may be told at once: logprobs of a prompt alone, and so an end that
        is an error, since what comes before it is told."""
        num_tokens = 0
        while self._events:
            event = self._events[0]
            is_alone = isinstance(event, PromptLogprobsEvent) or (
                isinstance(event, FinishedEvent) and event.reason in _FAILURES
            )
            if num_tokens and (is_alone or num_tokens >= TOKEN_PART):
                return
            yield self._events.popleft()
            num_tokens += len(event.token_ids) if isinstance(event, TokenEvent) else 1
            if is_alone:
                return

    def _is_late(self) -> bool:
        deadline_ns = self.call.deadline_ns
        if deadline_ns is None or self._is_attached:
            return False
        return self._engine.now_ns() >= deadline_ns - DEADLINE_SLACK_NS


def _tell_end(call: Call) -> None:
    """One line for the log. Nothing of the prompt or of the answers."""
    if not _log.isEnabledFor(logging.INFO):
        return
    ends = [log.end for log in call.logs() if log.end is not None]
    first = ends[0]
    fields: dict[str, object] = {
        "request_id": call.call_id,
        "finish_reason": ",".join(end.reason.value for end in ends),
        "prompt_tokens": first.num_prompt_tokens,
        "completion_tokens": sum(end.num_generated_tokens for end in ends),
        "cached_tokens": first.num_cached_tokens,
        # Of the first answer.
        "queue_ms": round(first.queue_ns / 1e6, 1),
        "prefill_ms": round(first.prefill_ns / 1e6, 1),
        "decode_ms": round(first.decode_ns / 1e6, 1),
    }
    if statuses := {end.status for end in ends if end.status}:
        fields["status"] = ",".join(sorted(statuses))
    if call.record.client:
        fields["client"] = call.record.client
    ids = {} if call.trace is None else call.trace.ids
    _log.info("ended: %s", words(fields), extra={"fields": {**fields, **ids}})


def _parts(event: Event) -> Iterator[Event]:
    """The event, cut where it is long."""
    match event:
        case PromptLogprobsEvent():
            for begin in range(0, len(event.logprobs), PROMPT_PART):
                part = event.logprobs[begin : begin + PROMPT_PART]
                yield PromptLogprobsEvent(event.request_id, event.first_index + begin, part)
        case TokenEvent() if len(event.token_ids) > TOKEN_PART:
            for begin in range(0, len(event.token_ids), TOKEN_PART):
                end = begin + TOKEN_PART
                yield TokenEvent(
                    event.request_id,
                    event.first_index + begin,
                    event.token_ids[begin:end],
                    event.logprobs[begin:end],
                )
        case _:
            yield event
