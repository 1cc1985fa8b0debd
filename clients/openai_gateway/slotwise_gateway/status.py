"""What the status page tells: the server's facts of one moment, and how they moved in the last
minute. Pure: samples come in, a report goes out."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from slotwise_client import Counters, Histogram, Load, Slot, SlotState

# Of what "the last minute" is, and of what "now" is: one step of the workers is too short to tell a
# rate by, and a minute too long.
WINDOW_S: Final = 60.0
RATE_S: Final = 3.0
# Who knows an id could ask for its stream where the server has no tokens.
ID_LEN: Final = 8
# Clocks of two machines, and the time of a call, move the start of one run by less.
_START_MOVES_S: Final = 5.0
_NUM_SEATINGS: Final = 8

# How requests ended or why they were refused: the field, what it says, whether it is somebody's
# fault.
ENDS: Final = (
    ("stop", "finished: stop", False),
    ("length", "finished: length", False),
    ("cancelled", "cancelled, or the client left", False),
    ("deadline", "deadline passed", True),
    ("error", "failed", True),
    ("corrupted", "of those: NaN in the logits", True),
    ("poisoned", "of those: the workers died of it twice", True),
    ("slow_reader", "connections cut: nobody read", True),
    ("rejected_invalid", "refused: invalid", True),
    ("rejected_full", "refused: queue full", True),
    ("rejected_unavailable", "refused: not ready", True),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The server's answers at one time of a monotonic clock.

    `slots` None: they are not told to this caller.
    """

    at_s: float
    load: Load
    slots: tuple[Slot, ...] | None


class History:
    """The samples of one run of the server: those of the last minute, and one before them."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        # Of the seats, which may be many, only what rates need: tokens by slot and generation.
        self._seatings: deque[tuple[float, dict[tuple[int, int], int]]] = deque(
            maxlen=_NUM_SEATINGS
        )

    @property
    def last(self) -> Sample | None:
        """The newest one."""
        return self._samples[-1] if self._samples else None

    def add(self, sample: Sample) -> None:
        """Samples come in the order of time. One of a new run of the server begins anew."""
        if self._samples and _is_another_run(self._samples[-1], sample):
            self._samples.clear()
            self._seatings.clear()
        if self._samples:
            last = self._samples[-1]
            self._samples[-1] = Sample(last.at_s, last.load, None)
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at_s <= sample.at_s - WINDOW_S:
            self._samples.popleft()
        tokens = {(slot.index, slot.generation): slot.generated_tokens for slot in _busy(sample)}
        self._seatings.append((sample.at_s, tokens))

    def facts(self) -> dict[str, Any]:
        """What the last sample says, for JSON. There must be one."""
        last, before = self._samples[-1], self._before(RATE_S)
        load = last.load
        return {
            "uptime_s": load.uptime_s,
            "epoch": load.epoch,
            "num_slots": load.num_slots,
            "num_running": load.num_running,
            "max_running": load.max_running,
            "num_waiting": load.num_waiting,
            "oldest_waiting_s": load.oldest_waiting_s,
            "num_unread": load.num_unread,
            "context_len": _context_len(load),
            "num_used_tokens": load.num_used_tokens,
            "max_total_tokens": load.max_total_tokens,
            "num_pending_prompt_tokens": load.num_pending_prefill_tokens,
            "generated_per_s": _generated_per_s(before, last),
            "prompt_per_s": _prompt_per_s(before, last),
            "history": list(self._rates()),
            "latencies": self._latencies(),
            "prefix_cache": self._prefix_cache(),
            "slots": None if last.slots is None else [self._seat(slot) for slot in last.slots],
            "ranks": _ranks(load),
            "requests": self._requests(),
            "num_recoveries": load.num_recoveries,
            "num_resumed": load.num_resumed,
        }

    def _before(self, seconds: float) -> Sample:
        """The newest sample that is so much older than the last; else the oldest."""
        until = self._samples[-1].at_s - seconds
        found = [sample for sample in self._samples if sample.at_s <= until]
        return found[-1] if found else self._samples[0]

    def _rates(self) -> Iterator[dict[str, float | None]]:
        samples = list(self._samples)
        for before, after in itertools.pairwise(samples):
            yield {
                "age_s": round(samples[-1].at_s - after.at_s, 2),
                "generated_per_s": _generated_per_s(before, after),
                "prompt_per_s": _prompt_per_s(before, after),
            }

    def _latencies(self) -> dict[str, Any]:
        """Of the last minute; of all since the server's start where nothing was seen before."""
        old, new = self._samples[0], self._samples[-1]
        has_window = old is not new

        def told(read: Callable[[Load], Histogram]) -> dict[str, Any]:
            found = read(new.load) - read(old.load) if has_window else read(new.load)
            return {
                "num": found.count,
                "p50_s": _quantile(found, 0.5),
                "p99_s": _quantile(found, 0.99),
            }

        return {
            "window_s": round(new.at_s - old.at_s, 1) if has_window else None,
            "time_to_first_token": told(lambda load: load.latencies.time_to_first_token),
            "inter_token": told(lambda load: load.latencies.inter_token_latency),
        }

    def _prefix_cache(self) -> dict[str, Any]:
        old, new = self._samples[0].load.prefix_cache, self._samples[-1].load.prefix_cache
        return {
            "hit_rate": _share(
                new.num_hit_tokens - old.num_hit_tokens,
                new.num_queried_tokens - old.num_queried_tokens,
            ),
            "hit_rate_since_start": _share(new.num_hit_tokens, new.num_queried_tokens),
            "num_cached_tokens": new.num_cached_tokens,
        }

    def _requests(self) -> list[dict[str, Any]]:
        old, new = self._samples[0].load.requests, self._samples[-1].load.requests
        return [
            {
                "name": name,
                "words": words,
                "is_fault": is_fault,
                "num": _count(new, name),
                "num_lately": _count(new, name) - _count(old, name),
            }
            for name, words, is_fault in ENDS
        ]

    def _seat(self, slot: Slot) -> dict[str, Any]:
        is_free = slot.state is SlotState.FREE
        return {
            "index": slot.index,
            "state": str(slot.state),
            "request": None if is_free else shortened(slot.request_id or ""),
            "choice": slot.choice_index,
            "prompt_tokens": slot.prompt_tokens,
            "generated_tokens": slot.generated_tokens,
            "computed_tokens": slot.num_computed_tokens,
            "cached_tokens": slot.num_cached_tokens,
            "progress": self._progress(slot),
            "tokens_per_s": self._tokens_per_s(slot),
        }

    def _progress(self, slot: Slot) -> float | None:
        """Of a prompt: the share that is computed. Of an answer: the context's share in use."""
        if slot.state is SlotState.PREFILL:
            return _share(slot.num_computed_tokens, slot.prompt_tokens)
        if slot.state is SlotState.DECODE:
            used = slot.prompt_tokens + slot.generated_tokens
            return _share(used, _context_len(self._samples[-1].load))
        return None

    def _tokens_per_s(self, slot: Slot) -> float | None:
        """None until the tenant of the seat was seen twice."""
        if slot.state is not SlotState.DECODE:
            return None
        now_s = self._seatings[-1][0]
        key = (slot.index, slot.generation)
        found = [(at_s, tokens[key]) for at_s, tokens in self._seatings if key in tokens]
        older = [one for one in found if one[0] < now_s]
        if not older:
            return None
        at_s, tokens = next((one for one in older if one[0] >= now_s - RATE_S), older[-1])
        return _rate(slot.generated_tokens - tokens, now_s - at_s)


def shortened(request_id: str) -> str:
    """The start of an id: enough to find it in a log, too little to ask for it."""
    return request_id if len(request_id) <= ID_LEN else request_id[:ID_LEN] + "\u2026"


def _is_another_run(before: Sample, after: Sample) -> bool:
    """The server was started again between the two."""
    old, new = before.load, after.load
    start_moved_s = (after.at_s - new.uptime_s) - (before.at_s - old.uptime_s)
    return (
        start_moved_s > _START_MOVES_S
        or new.uptime_s < old.uptime_s
        or new.num_steps < old.num_steps
        or new.num_generated_tokens < old.num_generated_tokens
        or new.requests.accepted < old.requests.accepted
    )


def _busy(sample: Sample) -> Iterator[Slot]:
    return (slot for slot in sample.slots or () if slot.state is SlotState.DECODE)


def _context_len(load: Load) -> int:
    """Of a slot, in tokens."""
    return load.max_total_tokens // load.num_slots if load.num_slots else 0


def _generated_per_s(before: Sample, after: Sample) -> float | None:
    new, old = after.load.num_generated_tokens, before.load.num_generated_tokens
    return _rate(new - old, after.at_s - before.at_s)


def _prompt_per_s(before: Sample, after: Sample) -> float | None:
    new, old = after.load.num_prompt_tokens, before.load.num_prompt_tokens
    return _rate(new - old, after.at_s - before.at_s)


def _rate(number: int, seconds: float) -> float | None:
    return round(max(number, 0) / seconds, 2) if seconds > 0 else None


def _share(part: int, whole: int) -> float | None:
    return round(min(max(part / whole, 0.0), 1.0), 4) if whole > 0 else None


def _quantile(histogram: Histogram, q: float) -> float | None:
    value = histogram.quantile(q)
    return None if value is None else round(value, 6)


def _count(requests: Counters, name: str) -> int:
    number: int = getattr(requests, name)
    return number


def _ranks(load: Load) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank.rank,
            "is_up": rank.is_up,
            "device": rank.device,
            "memory_bytes": rank.memory_bytes,
            "device_memory_bytes": rank.device_memory_bytes,
        }
        for rank in load.ranks
    ]
