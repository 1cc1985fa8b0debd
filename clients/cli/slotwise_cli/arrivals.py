"""Requests that come when they come: the plan of an open loop, and what became of it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from .latency import Timeline, percentile
from .output import CliError

# `lost`: the server was gone.
Fate = Literal["ended", "refused", "timeout", "error", "lost"]
FATES: Final[tuple[Fate, ...]] = ("ended", "refused", "timeout", "error", "lost")
# The sender was the bottleneck when it was later than both, at the 99th percentile.
LATE_MS: Final = 10.0
LATE_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniformly between the two, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, flag: str, text: str) -> "Lengths":
        """`32` or `16-256`; CliError (exit 2) naming `flag`."""
        least, _, most = text.partition("-")
        most = most if "-" in text else least
        if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
            raise CliError(f"{flag} {text!r} is no length like 32 or 16-256", exit_code=2)
        return cls(int(least), int(most))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the plan: when, in s after the start, and of how many tokens."""

    at: float
    prompt_tokens: int
    new_tokens: int


def poisson(rate: float, seconds: float, prompt: Lengths, new: Lengths, seed: int) -> list[Arrival]:
    """Arrivals of a Poisson process in `[0, seconds)`, the same for the same seed."""
    draw = random.Random(seed)
    arrivals: list[Arrival] = []
    at = draw.expovariate(rate)
    while at < seconds:
        lengths = [draw.randint(of.least, of.most) for of in (prompt, new)]
        arrivals.append(Arrival(at, *lengths))
        at += draw.expovariate(rate)
    return arrivals


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one arrival. `timeline` counts from the planned time, `late_s` is how much
    later it left; `counted` is False in the warm-up."""

    timeline: Timeline
    late_s: float
    fate: Fate
    counted: bool


@dataclass(frozen=True, slots=True)
class Objective:
    """What a good request keeps, in ms; None asks nothing. `itl_ms`: its own 99th percentile."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met_by(self, outcome: Outcome) -> bool:
        """Whether a request ended with all its tokens, and within every bound."""
        one = outcome.timeline
        if outcome.fate != "ended" or not one.arrivals:
            return False
        gaps = one.itl_ms
        found = (
            (self.ttft_ms, one.ttft_ms),
            (self.itl_ms, percentile(gaps, 99) if gaps else None),
            (self.tpot_ms, one.tpot_ms),
            (self.e2e_ms, one.e2e_ms),
        )
        return all(most is None or value is None or value <= most for most, value in found)


@dataclass(frozen=True, slots=True)
class Goodput:
    """How many of the counted requests met the objective, in `seconds`."""

    num_good: int
    num_counted: int
    seconds: float

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], objective: Objective, seconds: float) -> "Goodput":
        """Refused, failed and late ones are misses."""
        counted = [one for one in outcomes if one.counted]
        return cls(sum(map(objective.met_by, counted)), len(counted), seconds)

    @property
    def share(self) -> float | None:
        """None when nothing arrived."""
        return self.num_good / self.num_counted if self.num_counted else None

    @property
    def rate(self) -> float:
        """Good requests a second."""
        return self.num_good / self.seconds


def late_p99_ms(outcomes: Sequence[Outcome]) -> float:
    """How late the sender itself was; 0 when it sent nothing."""
    return percentile([one.late_s * 1e3 for one in outcomes], 99) if outcomes else 0.0


def sender_was_bottleneck(outcomes: Sequence[Outcome]) -> bool:
    """Whether the figures are of the sender as well: it was late by more than 10 ms and by more
    than a tenth of the median TTFT, at the 99th percentile."""
    ttfts = [one.timeline.ttft_ms for one in outcomes if one.timeline.arrivals]
    bound = LATE_SHARE * percentile(ttfts, 50) if ttfts else 0.0
    return late_p99_ms(outcomes) > max(LATE_MS, bound)
