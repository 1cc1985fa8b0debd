"""Measuring a server from outside: fixed work at a given concurrency, timed at this end."""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slotwise_client import AsyncClient, AsyncStream, Delta, Event, GenerateOptions, ModelInfo

from .latency import Timeline, latencies, percentile

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Work:
    """What every request does: read `prompt_tokens` ids, generate exactly `new_tokens`."""

    prompt_tokens: int
    new_tokens: int

    def prompts(self, model: ModelInfo, count: int, seed: int) -> list[list[int]]:
        """`count` different prompts of random ordinary ids, the same for the same seed."""
        return random_prompts(model, [self.prompt_tokens] * count, seed)


def random_prompts(model: ModelInfo, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Prompts of random ordinary ids of these lengths, the same for the same seed."""
    draw = random.Random(seed)
    special = {*model.end_token_ids, model.bos_token_id}
    ids = [i for i in range(model.vocab_size) if i not in special]
    return [draw.choices(ids, k=length) for length in lengths]


@dataclass(frozen=True, slots=True)
class Run:
    """One round at one concurrency."""

    timelines: tuple[Timeline, ...]
    prefill_share: float

    @property
    def wall_s(self) -> float:
        """From the first request sent to the last token."""
        last = max(timeline.arrivals[-1][0] for timeline in self.timelines)
        return last - min(timeline.sent for timeline in self.timelines)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all requests over the wall time, prefill included."""
        return sum(timeline.num_tokens for timeline in self.timelines) / self.wall_s

    @property
    def decode_tokens_per_s(self) -> float:
        """The same while all requests decode: from the latest first token to the last token."""
        begin = max(timeline.arrivals[0][0] for timeline in self.timelines)
        arrivals = [arrival for timeline in self.timelines for arrival in timeline.arrivals]
        end = max(at for at, _ in arrivals)
        return sum(count for at, count in arrivals if at > begin) / (end - begin)


async def run_once(client: AsyncClient, prompts: Prompts, new_tokens: int) -> Run:
    """Send all prompts at once and wait for all answers; the prefix cache is flushed before.

    The clock starts when the messages are built, before any is serialized or sent.

    `prefill_share` is the part of the workers' step time in steps that held a prefill chunk; it is
    that of the server, so nothing else should run there.
    """
    await client.flush_cache(timeout=60)
    before = await client.load(timeout=60)
    options: GenerateOptions = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    # Each is sent as soon as this task waits.
    streams = [client.generate(prompt, timeout=600, **options) for prompt in prompts]
    sent = time.perf_counter()
    timelines = await asyncio.gather(*(_follow(stream, sent) for stream in streams))
    after = await client.load(timeout=60)
    prefill = after.prefill_step_ns - before.prefill_step_ns
    decode = after.decode_step_ns - before.decode_step_ns
    return Run(tuple(timelines), prefill / max(prefill + decode, 1))


async def decode_window(address: str, prompts: Prompts, num_steps: int, room: int) -> list[float]:
    """Milliseconds per decode step of each request while all of them decode, for `num_steps`.

    The window begins when the last request has its first token; those before it decode beside its
    prefill meanwhile, within `room` tokens each. All requests are cancelled at the end.
    """
    waiting = len(prompts)

    async def follow(client: AsyncClient, prompt: Sequence[int]) -> list[tuple[float, int]]:
        nonlocal waiting
        window: list[tuple[float, int]] = []
        started = False
        request = client.generate(
            prompt, temperature=0, max_new_tokens=room, ignore_eos=True, timeout=600
        )
        async with request as stream:
            async for event in stream:
                if not isinstance(event, Delta) or not event.token_ids:
                    continue
                waiting -= not started
                started = True
                if waiting == 0:
                    window.append((time.perf_counter(), len(event.token_ids)))
                if sum(count for _, count in window[1:]) >= num_steps:
                    break
        return window

    async with AsyncClient(address) as client:
        windows = await asyncio.gather(*(follow(client, prompt) for prompt in prompts))
    return [_ms_per_token(window) for window in windows if len(window) > 1]


def _ms_per_token(window: Sequence[tuple[float, int]]) -> float:
    seconds = window[-1][0] - window[0][0]
    return seconds * 1e3 / sum(count for _, count in window[1:])


async def _follow(stream: AsyncStream[Event], sent: float) -> Timeline:
    arrivals: list[tuple[float, int]] = []
    async for event in stream:
        if isinstance(event, Delta) and event.token_ids:
            arrivals.append((time.perf_counter(), len(event.token_ids)))
    return Timeline(sent, tuple(arrivals))


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of some repeats."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """At least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @property
    def percent(self) -> float:
        """Distance of the extremes over the median."""
        return (self.max - self.min) / self.median * 100


@dataclass(frozen=True, slots=True)
class Level:
    """All rounds at one concurrency, summed up."""

    concurrency: int
    tokens_per_s: Spread
    decode_tokens_per_s: Spread
    wall_ms: Spread
    ttft_ms_p50: float
    ttft_ms_max: float
    itl_ms_p50: float
    itl_ms_p99: float
    prefill_share: float
    # Wall time of the same prompts when each asks for one token; None where it was not measured.
    first_token_wall_ms: Spread | None
    # Decode rate as other engines are measured, from these two medians: n x (tokens - 1) / (wall
    # time - wall time of one token each). None where the difference is no time at all.
    difference_tokens_per_s: Spread | None
    # Single rounds, by figure.
    rounds: dict[str, list[float]]

    @classmethod
    def of(cls, concurrency: int, runs: Sequence[Run], firsts: Sequence[Run] = ()) -> "Level":
        """At least one run, each of at least two tokens per request.

        `firsts`: as many runs of the same prompts in which every request asked for one token.
        """
        ttfts = [timeline.ttft_ms for run in runs for timeline in run.timelines]
        gaps = [gap for run in runs for timeline in run.timelines for gap in timeline.itl_ms]
        return cls(
            concurrency=concurrency,
            tokens_per_s=Spread.of([run.tokens_per_s for run in runs]),
            decode_tokens_per_s=Spread.of([run.decode_tokens_per_s for run in runs]),
            wall_ms=Spread.of([run.wall_s * 1e3 for run in runs]),
            ttft_ms_p50=percentile(ttfts, 50),
            ttft_ms_max=max(ttfts),
            itl_ms_p50=percentile(gaps, 50),
            itl_ms_p99=percentile(gaps, 99),
            prefill_share=statistics.median(run.prefill_share for run in runs),
            first_token_wall_ms=Spread.of([run.wall_s * 1e3 for run in firsts]) if firsts else None,
            difference_tokens_per_s=_by_difference(runs, firsts) if firsts else None,
            rounds=_rounds(runs),
        )


def _rounds(runs: Sequence[Run]) -> dict[str, list[float]]:
    rounds: dict[str, list[float]] = {
        "tokens/s": [run.tokens_per_s for run in runs],
        "decode tokens/s": [run.decode_tokens_per_s for run in runs],
    }
    for run in runs:
        for name, values in latencies(run.timelines).items():
            for percent in (50, 99) if values else ():
                figure = f"{name.removesuffix('_ms').upper()} p{percent}"
                rounds.setdefault(figure, []).append(percentile(values, percent))
    return rounds


def _by_difference(runs: Sequence[Run], firsts: Sequence[Run]) -> Spread | None:
    """The rate of the median times, and those of the single rounds that are farthest from it."""
    tokens = sum(timeline.num_tokens - 1 for timeline in runs[0].timelines)
    pairs = [(run.wall_s, first.wall_s) for run, first in zip(runs, firsts, strict=True)]
    middle = tuple(statistics.median(times) for times in zip(*pairs, strict=True))
    seconds = [whole - first for whole, first in (middle, *pairs)]
    if min(seconds) <= 0:
        return None
    rates = [tokens / difference for difference in seconds]
    return Spread(rates[0], min(rates), max(rates))


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Rounds of one way, as a comparison's JSON has them; times are in ms."""
    ttfts = [timeline.ttft_ms for run in runs for timeline in run.timelines]
    return {
        "tokens_per_s": asdict(Spread.of([run.tokens_per_s for run in runs])),
        "ttft_ms_p50": percentile(ttfts, 50),
        "ttft_ms_p90": percentile(ttfts, 90),
    }
