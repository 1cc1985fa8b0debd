"""A job as it runs: its requests to the server, as one row of events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from typing import Final

from slotwise_client import (
    AsyncClient,
    AsyncStream,
    Event,
    GenerateOptions,
    Prompt,
    SlotwiseError,
)

from .call_text import CallTexts
from .completion_answer import Echo
from .errors import ApiError, Names
from .job import Job
from .tool_turn import ToolPlan, ToolTurn
from .upstream import Upstream

# A template that ends so has opened the model's reasoning.
THINK: Final = "<think>"
END_THINK: Final = "\n</think>\n\n"


class _EndedError(Exception):
    """A part has no end, and no other one follows."""


class Run:
    """One job. It ends when its events do, or when it is told to: `error` says why."""

    def __init__(self, upstream: Upstream, client: AsyncClient, job: Job, request_id: str) -> None:
        self._upstream = upstream
        self._client = client
        self._job = job
        self._request_id = request_id
        self._streams: list[AsyncStream[Event]] = []
        self._num_parts = 0
        self._is_over = False
        # The server has taken it: it survives what new requests do not.
        self.is_accepted = False
        # What the caller is to be told in place of the rest; None: nothing, nobody listens.
        self.error: ApiError | None = None

    @property
    def request_id(self) -> str:
        """The caller's name for it, and the server's."""
        return self._request_id

    @property
    def is_over(self) -> bool:
        """It was told to end."""
        return self._is_over

    def end(self, error: ApiError | None = None) -> None:
        """Give all slots back; the events end."""
        if self._is_over:
            return
        self._is_over = True
        self.error = error
        for stream in self._streams:
            stream.close()

    async def events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Each with the number of its prompt. ApiError when the server refuses or fails."""
        if self._job.plan is not None:
            async for event in self._turn(self._job.plan):
                yield 0, event
            return
        prompts = self._job.prompts
        if self._job.is_rendered:
            prompts = (await self._rendered(END_THINK),)
        many = len(prompts) > 1
        for number, prompt in enumerate(prompts):
            if not self._is_over:
                self._open(number, prompt, many)
        try:
            if many:
                async for item in self._merged():
                    yield item
            elif self._streams:
                texts = CallTexts() if self._job.hides_calls else None
                with self._telling(self._job.names):
                    async for event in self._streams[0]:
                        if texts is None:
                            yield 0, event
                            continue
                        for told in texts.of(event):
                            yield 0, told
        finally:
            for stream in self._streams:
                stream.close()

    async def echoes(self) -> list[Echo]:
        """The prompts as texts, for answers that repeat them. ApiError."""
        return [await self._echo(number) for number in range(len(self._job.prompts))]

    def _open(self, number: int, prompt: Prompt, is_numbered: bool) -> None:
        request_id = f"{self._request_id}-{number}" if is_numbered else self._request_id
        with self._telling(self._job.names):
            options: GenerateOptions = {**self._job.options, "request_id": request_id}
            key = self._job.routing_key(number)
            stream = self._client.generate(prompt, routing_key=key, **options)
        self._streams.append(stream)

    async def _merged(self) -> AsyncIterator[tuple[int, Event]]:
        queue: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue(2 * len(self._streams))

        async def read(number: int, stream: AsyncStream[Event]) -> None:
            with self._telling(self._names(number)):
                async for event in stream:
                    await queue.put((number, event))

        async def read_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for number, stream in enumerate(self._streams):
                        group.create_task(read(number, stream))
            finally:
                await queue.put(None)

        reading = asyncio.create_task(read_all())
        try:
            while (item := await queue.get()) is not None:
                yield item
            await reading
        except* ApiError as group:
            raise _first(group) from None
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _turn(self, plan: ToolPlan) -> AsyncGenerator[Event, None]:
        """An answer in parts."""
        ids = await self._rendered(END_THINK if plan.is_forced else "")
        turn = ToolTurn(plan, self._job.options, self)
        with contextlib.suppress(_EndedError):
            async with contextlib.aclosing(turn.events(self._job.chat, ids)) as events:
                async for event in events:
                    yield event

    async def part(
        self, prompt: Prompt, options: GenerateOptions, tool: int | None
    ) -> AsyncGenerator[Event, None]:
        """As of `Parts`. The first one has the request's own id."""
        renamed = {**self._job.names.renamed, "token_ids": "messages", "token_ids.ids": "messages"}
        if tool is not None:
            renamed["json_schema"] = f"tools.{tool}.function.parameters"
        number, self._num_parts = self._num_parts, self._num_parts + 1
        request_id = f"{self._request_id}-{number}" if number else self._request_id
        if self._is_over:
            raise _EndedError
        with self._telling(Names(renamed)):
            named: GenerateOptions = {**options, "request_id": request_id}
            key = self._job.routing_key()
            stream = self._client.generate(prompt, routing_key=key, **named)
            self._streams = [stream]
            try:
                async for event in stream:
                    yield event
            finally:
                stream.close()
        if self._is_over:
            raise _EndedError

    async def token_ids(self, text: str) -> list[int]:
        """As of `Parts`."""
        with self._telling(self._job.names):
            return await self._client.tokenize(text, parse_control_tokens=True)

    async def _rendered(self, closing: str) -> list[int]:
        """The chat as ids; `closing` follows where the template has opened the reasoning."""
        with self._telling(self._job.names):
            chat = await self._client.render_chat(self._job.chat)
        ids = list(chat.token_ids)
        if closing and chat.text.rstrip().endswith(THINK):
            ids += await self.token_ids(closing)
        return ids

    async def _echo(self, number: int) -> Echo:
        prompt = self._job.prompts[number]
        with self._telling(self._names(number)):
            ids: list[int]
            if isinstance(prompt, str):
                ids, text = await self._client.tokenize(prompt), prompt
            else:
                assert isinstance(prompt, list)
                ids = prompt
                text = await self._client.detokenize(ids, keep_control_tokens=True)
            first = await self._client.detokenize(ids[:1], keep_control_tokens=True)
        return Echo(text, first)

    def _names(self, number: int) -> Names:
        """Of one of several prompts."""
        names = self._job.names
        if len(self._job.prompts) == 1:
            return names
        place = f"prompt.{number}"
        own = {"text": place, "token_ids": place, "token_ids.ids": place}
        return replace(names, renamed={**names.renamed, **own})

    @contextlib.contextmanager
    def _telling(self, names: Names) -> Iterator[None]:
        """Errors of the server as those of the OpenAI API."""
        try:
            yield
        except SlotwiseError as error:
            raise self._upstream.error(error, names) from error


def _first(group: BaseExceptionGroup[ApiError]) -> ApiError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ApiError)
    return error
