"""Sending an open loop: every request leaves when it is planned, whatever became of the others."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slotwise_client import (
    AsyncClient,
    DeadlineError,
    Delta,
    Finished,
    ModelInfo,
    QueueFullError,
    SlotwiseError,
    UnavailableError,
)

from .arrivals import Arrival, Fate, Outcome
from .latency import Timeline
from .measure import random_prompts


class LostError(Exception):
    """The server was gone, or began to drain; `outcomes` are those until then."""

    def __init__(self, cause: SlotwiseError, outcomes: list[Outcome]) -> None:
        super().__init__(cause.message)
        self.cause = cause
        self.outcomes = outcomes


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Sends a plan. Requests planned before `warm_up_s` are not counted."""

    client: AsyncClient
    model: ModelInfo
    warm_up_s: float
    timeout_s: float

    async def run(self, plan: Sequence[Arrival], seed: int) -> list[Outcome]:
        """Send all, wait for all. LostError as soon as the server is gone; what still runs then,
        or when this task is cancelled, is cancelled on the server."""
        prompts = random_prompts(self.model, [one.prompt_tokens for one in plan], seed)
        outcomes: list[Outcome] = []
        lost: asyncio.Future[SlotwiseError] = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        tasks = [
            asyncio.create_task(self._send(one, prompt, start, outcomes, lost))
            for one, prompt in zip(plan, prompts, strict=True)
        ]
        try:
            waited: list[asyncio.Future[Any]] = [
                asyncio.gather(*tasks, return_exceptions=True),
                lost,
            ]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if lost.done():
            raise LostError(lost.result(), outcomes)
        for task in tasks:
            task.result()  # another exception is a bug
        return outcomes

    async def _send(
        self,
        arrival: Arrival,
        prompt: Sequence[int],
        start: float,
        outcomes: list[Outcome],
        lost: "asyncio.Future[SlotwiseError]",
    ) -> None:
        planned = start + arrival.at
        await asyncio.sleep(planned - time.perf_counter())
        late = max(0.0, time.perf_counter() - planned)
        arrivals: list[tuple[float, int]] = []
        try:
            fate = await self.follow(prompt, arrival.new_tokens, arrivals)
        except SlotwiseError as error:
            fate = _fate(error)
            if fate == "lost" and not lost.done():
                lost.set_result(error)
        counted = arrival.at >= self.warm_up_s
        outcomes.append(Outcome(Timeline(planned, tuple(arrivals)), late, fate, counted))

    async def follow(
        self, prompt: Sequence[int], new_tokens: int, arrivals: list[tuple[float, int]]
    ) -> Fate:
        """Read one request to its end, noting when tokens come. SlotwiseError of the client."""
        request = self.client.generate(
            prompt,
            temperature=0,
            max_new_tokens=new_tokens,
            ignore_eos=True,
            timeout=self.timeout_s,
        )
        fate: Fate = "error"
        async with request as stream:
            async for event in stream:
                if isinstance(event, Delta) and event.token_ids:
                    arrivals.append((time.perf_counter(), len(event.token_ids)))
                elif isinstance(event, Finished) and event.finish_reason in ("length", "stop"):
                    fate = "ended"
        return fate


def _fate(error: SlotwiseError) -> Fate:
    if isinstance(error, QueueFullError):
        return "refused"
    if isinstance(error, DeadlineError):
        return "timeout"
    return "lost" if isinstance(error, UnavailableError) else "error"


async def capacity(
    client: AsyncClient, model: ModelInfo, plan: Sequence[Arrival], at_once: int, timeout_s: float
) -> float:
    """Requests a second when `at_once` are always under way: what the server can do."""
    prompts = random_prompts(model, [one.prompt_tokens for one in plan], seed=7)
    waiting = list(zip(plan, prompts, strict=True))
    loop = OpenLoop(client, model, 0, timeout_s)
    start = time.perf_counter()

    async def work() -> None:
        while waiting:
            arrival, prompt = waiting.pop()
            await loop.follow(prompt, arrival.new_tokens, [])

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return len(plan) / (time.perf_counter() - start)
