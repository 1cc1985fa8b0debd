"""Short streams while a long prompt is read, as their clients see it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from slotwise_client import AsyncClient, Delta, Finished

TIMEOUT_S: Final = 600.0
Arrivals = list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Gaps:
    """ITL in ms: the gaps that ended before the long prompt was sent, those that lay at least
    partly between its sending and its first token, and those that began later."""

    before: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Interleaved:
    """One round. `long_ttft_ms` is of the long prompt; the others of a short one alone, and of one
    that is sent right behind a long one."""

    streams: tuple[Arrivals, ...]
    sent: float
    first: float
    alone_ttft_ms: float
    behind_ttft_ms: float

    @property
    def long_ttft_ms(self) -> float:
        """Beside the short streams."""
        return (self.first - self.sent) * 1e3

    def gaps(self) -> Gaps:
        """Of all short streams."""
        gaps = Gaps()
        for arrivals in self.streams:
            for (begin, _), (end, count) in pairwise(arrivals):
                if end <= self.sent:
                    part = gaps.before
                else:
                    part = gaps.during if begin < self.first else gaps.after
                part += [(end - begin) * 1e3 / count] * count
        return gaps


@dataclass(frozen=True, slots=True)
class Interleave:
    """Measures rounds; `room`: the most tokens a short stream may generate."""

    client: AsyncClient
    window_s: float
    room: int

    async def round(
        self, shorts: Sequence[Sequence[int]], long: Sequence[int], other_long: Sequence[int]
    ) -> Interleaved:
        """All prompts differ. The last of `shorts` is sent alone, the one before it behind
        `other_long`; the others stream. All are cancelled at the end."""
        await self.client.flush_cache(timeout=60)
        *streaming, behind, alone = shorts
        alone_ttft = await self._ttft(alone)
        waiting = asyncio.create_task(self._ttft(other_long))
        await asyncio.sleep(0)  # the long one is handed to gRPC first
        behind_ttft = await self._ttft(behind)
        await waiting
        sent, first, streams = await self._beside(streaming, long)
        took = [(at - start) * 1e3 for start, at in (alone_ttft, behind_ttft)]
        return Interleaved(streams, sent, first, took[0], took[1])

    async def _beside(
        self, prompts: Sequence[Sequence[int]], long: Sequence[int]
    ) -> tuple[float, float, tuple[Arrivals, ...]]:
        streams: tuple[Arrivals, ...] = tuple([] for _ in prompts)
        begun = [asyncio.Event() for _ in prompts]
        parts = zip(prompts, streams, begun, strict=True)
        tasks = [asyncio.create_task(self._stream(*part)) for part in parts]
        try:
            starts = asyncio.gather(*(event.wait() for event in begun))
            await self._unless_ended(tasks, starts)
            await self._unless_ended(tasks, asyncio.ensure_future(asyncio.sleep(self.window_s)))
            asked = asyncio.ensure_future(self._ttft(long))
            await self._unless_ended(tasks, asked)
            await self._unless_ended(tasks, asyncio.ensure_future(asyncio.sleep(self.window_s)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        sent, first = asked.result()
        return sent, first, streams

    async def _unless_ended(
        self, tasks: Sequence["asyncio.Task[None]"], wanted: "asyncio.Future[Any]"
    ) -> None:
        """Wait; raises what ended a stream meanwhile."""
        try:
            waited: list[asyncio.Future[Any]] = [wanted, *tasks]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not wanted.done():
                wanted.cancel()
                await asyncio.gather(wanted, return_exceptions=True)
        for task in tasks:
            if task.done():
                task.result()
        wanted.result()

    async def _stream(
        self, prompt: Sequence[int], arrivals: Arrivals, begun: asyncio.Event
    ) -> None:
        request = self.client.generate(
            prompt, temperature=0, max_new_tokens=self.room, ignore_eos=True, timeout=TIMEOUT_S
        )
        async with request as stream:
            async for event in stream:
                if isinstance(event, Delta) and event.token_ids:
                    arrivals.append((time.perf_counter(), len(event.token_ids)))
                    begun.set()
                elif isinstance(event, Finished):
                    message = f"a short stream ended after {self.room} tokens; longer --room-tokens"
                    raise StreamEndedError(message)

    async def _ttft(self, prompt: Sequence[int]) -> tuple[float, float]:
        """When it was sent and when its first token came."""
        request = self.client.generate(
            prompt, temperature=0, max_new_tokens=2, ignore_eos=True, timeout=TIMEOUT_S
        )
        sent, first = time.perf_counter(), 0.0
        async with request as stream:
            async for event in stream:
                if isinstance(event, Delta) and event.token_ids and not first:
                    first = time.perf_counter()
        return sent, first


class StreamEndedError(Exception):
    """The streams were too short for the measurement."""
