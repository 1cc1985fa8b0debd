"""What `slotwise top` shows, as figures. Pure: samples of a server come in, figures go out."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from slotwise_client import Histogram, Load, RankLoad, ServerState, Slot, SlotState

# What "the last minute" is, and what "now" is: one step of the workers is too short for a rate.
WINDOW_S: Final = 60.0
NOW_S: Final = 2.0
# A window that is younger says little about latencies; those since the start stand in for it.
_YOUNG_S: Final = 5.0
# By how much the start of one run may seem to move, by the time that calls take.
_START_MOVES_S: Final = 5.0

Counter = Callable[[Load], float]


@dataclass(frozen=True, slots=True)
class Sample:
    """A server's answers at one time of a monotonic clock. `slots` None: it does not tell them."""

    at_s: float
    load: Load
    slots: tuple[Slot, ...] | None


@dataclass(frozen=True, slots=True)
class Seat:
    """One slot. tokens_per_s None: it does not decode, or was seen only once."""

    index: int
    state: SlotState
    request_id: str
    num_positions: int
    generated_tokens: int
    cached_tokens: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of `num` times, in seconds; None where there were none."""

    num: int
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """What is shown. Rates and shares are None where too little was seen to tell them.

    `seats` None: the server does not tell them. `generated_history`, `prefill_history`: tokens per
    second in each second of the last minute, the newest last, None before the first sample.
    `latency_window_s` None: latencies are of all time since the server's start.
    """

    state: ServerState
    epoch: int
    uptime_s: float
    num_slots: int
    max_seq_len: int
    num_running: int
    max_running: int
    num_waiting: int
    oldest_waiting_s: float
    seats: tuple[Seat, ...] | None
    generated_per_s: float | None
    prefill_per_s: float | None
    steps_per_s: float | None
    ended_per_s: float | None
    generated_history: tuple[float | None, ...]
    prefill_history: tuple[float | None, ...]
    num_errors: int
    num_refused: int
    latency_window_s: float | None
    time_to_first_token: Percentiles
    inter_token_latency: Percentiles
    e2e_request_latency: Percentiles
    hit_rate: float | None
    hit_rate_since_start: float | None
    prefill_share: float | None
    ranks: tuple[RankLoad, ...]


class Window:
    """The samples of one run of a server: those of the last minute, and one before them."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        """Samples come in order of time. One of another run of the server begins anew."""
        if self._samples and _is_another_run(self._samples[-1], sample):
            self._samples.clear()
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at_s <= sample.at_s - WINDOW_S:
            self._samples.popleft()
        self._forget_slots(sample.at_s - NOW_S)

    def reset(self) -> None:
        """Forgets all but the newest sample."""
        while len(self._samples) > 1:
            self._samples.popleft()

    def figures(self) -> Figures:
        """Of the newest sample. There must be one."""
        last = self._samples[-1]
        load, cache = last.load, last.load.prefix_cache
        span_s = last.at_s - self._samples[0].at_s
        return Figures(
            state=load.state,
            epoch=load.epoch,
            uptime_s=load.uptime_s,
            num_slots=load.num_slots,
            max_seq_len=load.max_total_tokens // load.num_slots if load.num_slots else 0,
            num_running=load.num_running,
            max_running=load.max_running,
            num_waiting=load.num_waiting,
            oldest_waiting_s=load.oldest_waiting_s,
            seats=None if last.slots is None else tuple(self._seat(slot) for slot in last.slots),
            generated_per_s=self._rate(_generated),
            prefill_per_s=self._rate(_prefilled),
            steps_per_s=self._rate(lambda load: load.num_steps),
            ended_per_s=self._rate(_ended),
            generated_history=tuple(self._history(_generated)),
            prefill_history=tuple(self._history(_prefilled)),
            num_errors=int(self._grown(_errors)),
            num_refused=int(self._grown(_refused)),
            latency_window_s=span_s if span_s >= _YOUNG_S else None,
            time_to_first_token=self._latency(lambda load: load.latencies.time_to_first_token),
            inter_token_latency=self._latency(lambda load: load.latencies.inter_token_latency),
            e2e_request_latency=self._latency(lambda load: load.latencies.e2e_request_latency),
            hit_rate=_share(
                self._grown(lambda load: load.prefix_cache.num_hit_tokens),
                self._grown(lambda load: load.prefix_cache.num_queried_tokens),
            ),
            hit_rate_since_start=_share(cache.num_hit_tokens, cache.num_queried_tokens),
            prefill_share=_share(
                self._grown(lambda load: load.prefill_step_ns),
                self._grown(lambda load: load.prefill_step_ns + load.decode_step_ns),
            ),
            ranks=load.ranks,
        )

    def _forget_slots(self, before_s: float) -> None:
        """Seats may be many; only rates of now need them."""
        for i, sample in enumerate(self._samples):
            if sample.at_s < before_s and sample.slots is not None:
                self._samples[i] = Sample(sample.at_s, sample.load, None)

    def _before(self) -> Sample:
        """The newest sample that is NOW_S older than the last; else the oldest."""
        until_s = self._samples[-1].at_s - NOW_S
        older = [sample for sample in self._samples if sample.at_s <= until_s]
        return older[-1] if older else self._samples[0]

    def _rate(self, read: Counter) -> float | None:
        old, new = self._before(), self._samples[-1]
        return _per_second(read(new.load) - read(old.load), new.at_s - old.at_s)

    def _grown(self, read: Counter) -> float:
        """In the window. Less than nothing where a counter moves back for a moment: nothing."""
        return max(0, read(self._samples[-1].load) - read(self._samples[0].load))

    def _history(self, read: Counter) -> Iterator[float | None]:
        """Between samples a counter is taken to grow evenly."""
        points = [(sample.at_s, read(sample.load)) for sample in self._samples]
        now_s = points[-1][0]
        marks = [_at(points, now_s - age_s) for age_s in range(int(WINDOW_S), -1, -1)]
        for before, after in itertools.pairwise(marks):
            yield None if before is None or after is None else max(0.0, after - before)

    def _latency(self, read: Callable[[Load], Histogram]) -> Percentiles:
        old, new = self._samples[0], self._samples[-1]
        times = read(new.load)
        if new.at_s - old.at_s >= _YOUNG_S:
            times = times - read(old.load)
        return Percentiles(
            times.count, times.quantile(0.5), times.quantile(0.9), times.quantile(0.99)
        )

    def _seat(self, slot: Slot) -> Seat:
        return Seat(
            index=slot.index,
            state=slot.state,
            request_id=slot.request_id or "",
            num_positions=slot.num_computed_tokens,
            generated_tokens=slot.generated_tokens,
            cached_tokens=slot.num_cached_tokens,
            tokens_per_s=self._seat_rate(slot),
        )

    def _seat_rate(self, slot: Slot) -> float | None:
        if slot.state is not SlotState.DECODE:
            return None
        now_s = self._samples[-1].at_s
        for sample in self._samples:
            old = _same_tenant(sample.slots, slot)
            if old is not None:
                grown = slot.generated_tokens - old.generated_tokens
                return _per_second(grown, now_s - sample.at_s)
        return None


def _same_tenant(slots: tuple[Slot, ...] | None, slot: Slot) -> Slot | None:
    """The slot as it was, when the same request sat in it."""
    if slots is None or slot.index >= len(slots):
        return None
    old = slots[slot.index]
    return old if old.generation == slot.generation and old.state is not SlotState.FREE else None


def _is_another_run(before: Sample, after: Sample) -> bool:
    """The server was started again between the two."""
    old, new = before.load, after.load
    start_moved_s = (after.at_s - new.uptime_s) - (before.at_s - old.uptime_s)
    return (
        start_moved_s > _START_MOVES_S
        or new.uptime_ns < old.uptime_ns
        or new.num_steps < old.num_steps
        or new.num_generated_tokens < old.num_generated_tokens
        or new.requests.accepted < old.requests.accepted
    )


def _generated(load: Load) -> float:
    return load.num_generated_tokens


def _prefilled(load: Load) -> float:
    """Tokens of prompts that were computed: neither waiting for it nor found in the prefix cache.

    A request that leaves before its prompt is computed counts as if it had been.
    """
    told = load.num_prompt_tokens - load.num_pending_prefill_tokens
    return told - load.prefix_cache.num_hit_tokens


def _ended(load: Load) -> float:
    ends = load.requests
    return ends.stop + ends.length + ends.cancelled + ends.deadline + ends.error


def _errors(load: Load) -> float:
    return load.requests.error + load.requests.deadline


def _refused(load: Load) -> float:
    counts = load.requests
    return counts.rejected_invalid + counts.rejected_full + counts.rejected_unavailable


def _per_second(amount: float, seconds: float) -> float | None:
    return max(0.0, amount / seconds) if seconds > 0 else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _at(points: list[tuple[float, float]], at_s: float) -> float | None:
    """The value at a time, by a line between the points around it; None before the first."""
    for (left_s, left), (right_s, right) in itertools.pairwise(points):
        if left_s <= at_s <= right_s:
            if math.isclose(left_s, right_s):
                return right
            return left + (right - left) * (at_s - left_s) / (right_s - left_s)
    return points[-1][1] if at_s == points[-1][0] else None
