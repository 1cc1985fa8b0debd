"""POST of a body, to its answer: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from slotwise_client import (
    Accepted,
    Delta,
    Event,
    Finished,
    ModelInfo,
    PromptLogprobs,
    SlotwiseError,
)

from .answer import Envelope, Stream, Whole
from .body import ClientGoneError, read_json
from .caller import TraceContext, caller_token
from .chat import read_chat
from .chat_answer import ChatStream, ChatWhole
from .completion_answer import CompletionStream, CompletionWhole, Echo
from .completions import read_completion
from .config import Config
from .errors import ApiError, model_not_found, server_error
from .fields import Route
from .gateway import Gateway
from .job import Job
from .outcome import Outcome
from .run import Run

COMMENT: Final = b": waiting\n\n"
EVENT_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Asks proxies to pass chunks on as they come.
    (b"x-accel-buffering", b"no"),
)

log = logging.getLogger(__name__)


class Generation:
    """The application behind one of the two routes."""

    def __init__(self, gateway: Gateway, route: Route) -> None:
        self._gateway = gateway
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ApiError while nothing was sent."""
        outcome: Outcome = scope["state"]["outcome"]
        request_id = outcome.request_id
        gateway = self._gateway
        with contextlib.suppress(ClientGoneError), gateway.room.share() as take:
            body = await read_json(scope, receive, gateway.config.limits, take)
            await gateway.check_ready()
            client = gateway.upstream.client(caller_token(scope))
            trace: TraceContext | None = scope["state"]["trace"]
            if trace is not None:
                client = client.with_trace(trace.traceparent, trace.tracestate)
            try:
                info = await gateway.upstream.model(client)
            except SlotwiseError as error:
                raise gateway.upstream.error(error) from error
            job = await self._job(body, info)
            run = Run(gateway.upstream, client, job, request_id)
            outcome.user, outcome.num_prompts = job.user, len(job.prompts)
            outcome.is_streamed = job.looks.streams
            try:
                await self._serve(
                    run, job, self._envelope(request_id, info), outcome, receive, send
                )
            finally:
                if run.error is not None:
                    outcome.error = run.error.message

    async def _job(self, body: dict[str, Any], info: ModelInfo) -> Job:
        model = body.get("model")
        known = ("", info.name, *self._gateway.config.model_aliases)
        if isinstance(model, str) and model not in known:
            raise model_not_found(model, info.name)
        read = read_chat if self._route is Route.CHAT else read_completion
        return read(body, info)

    def _envelope(self, request_id: str, info: ModelInfo) -> Envelope:
        is_chat = self._route is Route.CHAT
        return Envelope(
            answer_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            kind="chat.completion" if is_chat else "text_completion",
            created=int(time.time()),
            model=info.name,
            fingerprint=info.fingerprint,
        )

    async def _serve(
        self,
        run: Run,
        job: Job,
        envelope: Envelope,
        outcome: Outcome,
        receive: Receive,
        send: Send,
    ) -> None:
        gateway = self._gateway
        gateway.add(run)
        watch = asyncio.create_task(_end_with_client(receive, run, outcome))
        try:
            echoes = await run.echoes() if job.looks.echo else []
            if job.looks.streams:
                stream = self._stream_of(job, envelope, run.request_id, echoes)
                await self._stream(run, stream, outcome, send)
            else:
                whole = self._whole_of(job, envelope, run.request_id, echoes)
                await _answer(run, whole, outcome, send)
        finally:
            watch.cancel()
            gateway.drop(run)

    def _stream_of(
        self, job: Job, envelope: Envelope, request_id: str, echoes: Sequence[Echo]
    ) -> Stream:
        if self._route is Route.CHAT:
            return ChatStream(job, envelope.as_chunk(), request_id)
        return CompletionStream(job, envelope, echoes)

    def _whole_of(
        self, job: Job, envelope: Envelope, request_id: str, echoes: Sequence[Echo]
    ) -> Whole:
        if self._route is Route.CHAT:
            return ChatWhole(job, envelope, request_id)
        return CompletionWhole(job, envelope, echoes)

    async def _stream(self, run: Run, stream: Stream, outcome: Outcome, send: Send) -> None:
        events = run.events()
        async with contextlib.aclosing(events):
            # Refusals come before the first event: they have a status of their own.
            first = await anext(events, None)
            run.is_accepted = True
            if first is None:
                _raise_why(run)
                return
            writer = _Writer(send, run, outcome, self._gateway.config)
            self._gateway.metrics.add_streams(1)
            try:
                await writer.write_all(stream, first, events)
            finally:
                self._gateway.metrics.add_streams(-1)


class _Writer:
    """Sends the events of one answer."""

    def __init__(self, send: Send, run: Run, outcome: Outcome, config: Config) -> None:
        self._send = send
        self._run = run
        self._outcome = outcome
        self._keep_alive_s = config.keep_alive_s
        self._write_s = config.limits.body_s
        # When the last write began, and whether it waits for the reader.
        self._wrote_at = time.monotonic()
        self._is_writing = False

    async def write_all(
        self,
        stream: Stream,
        first: tuple[int, Event],
        events: AsyncIterator[tuple[int, Event]],
    ) -> None:
        await self._send(
            {"type": "http.response.start", "status": 200, "headers": list(EVENT_HEADERS)}
        )
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(self._watch(task))
        try:
            await self._events(stream, first, events)
        finally:
            watch.cancel()

    async def _events(
        self,
        stream: Stream,
        first: tuple[int, Event],
        events: AsyncIterator[tuple[int, Event]],
    ) -> None:
        last = b""
        try:
            self._outcome.note(first[1])
            await self._write(_written(stream, *first))
            async for number, event in events:
                self._outcome.note(event)
                # Nearly all are.
                if type(event) is Delta:
                    written = stream.delta(number, event)
                else:
                    written = _written(stream, number, event)
                if written:
                    await self._write(written)
            _raise_why(self._run)
            if not self._run.is_over:
                last = stream.end()
        except ApiError as error:
            self._outcome.error = error.message
            log.warning("request %s: %s", self._run.request_id, error.message, extra=self._extra())
            last = error.event()
        except Exception:
            self._outcome.error = "a fault of the gateway"
            log.exception(
                "request %s: a fault of the gateway", self._run.request_id, extra=self._extra()
            )
            last = server_error("a fault of the gateway; its log says more").event()
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write(self, data: bytes) -> None:
        self._wrote_at, self._is_writing = time.monotonic(), True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_writing = False

    def _extra(self) -> dict[str, object]:
        return {"fields": {"request_id": self._run.request_id}}

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        """Comments while there is nothing to tell; the end of who does not read."""
        while True:
            await asyncio.sleep(min(self._keep_alive_s, self._write_s))
            silence_s = time.monotonic() - self._wrote_at
            stands_still = self._is_writing and silence_s >= self._write_s
            if not self._is_writing and silence_s >= self._keep_alive_s:
                try:
                    async with asyncio.timeout(self._write_s):
                        await self._write(COMMENT)
                except TimeoutError:
                    stands_still = True
            if stands_still:
                self._outcome.error = "its reader stands still"
                log.warning(
                    "request %s: its reader stands still",
                    self._run.request_id,
                    extra=self._extra(),
                )
                self._run.end()
                task.cancel()
                return


async def _answer(run: Run, whole: Whole, outcome: Outcome, send: Send) -> None:
    async with contextlib.aclosing(run.events()) as events:
        async for number, event in events:
            run.is_accepted = True
            outcome.note(event)
            _gather(whole, number, event)
    _raise_why(run)
    if run.is_over:
        return
    body = await asyncio.to_thread(_joined, whole)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _joined(whole: Whole) -> bytes:
    return "".join(whole.pieces()).encode()


def _written(stream: Stream, number: int, event: Event) -> bytes:
    match event:
        case Delta():
            return stream.delta(number, event)
        case Finished():
            return stream.finish(number, event)
        case Accepted():
            return stream.begin(number, event)
        case PromptLogprobs():
            return stream.prompt_logprobs(number, event)


def _gather(whole: Whole, number: int, event: Event) -> None:
    match event:
        case Delta():
            whole.delta(number, event)
        case Finished():
            whole.finish(number, event)
        case Accepted():
            whole.begin(number, event)
        case PromptLogprobs():
            whole.prompt_logprobs(number, event)


def _raise_why(run: Run) -> None:
    """What the caller is to be told, where the run was ended."""
    if run.error is not None:
        raise run.error


async def _end_with_client(receive: Receive, run: Run, outcome: Outcome) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    outcome.is_client_gone = True
    run.end()
