"""A measured figure: its rounds, and how far they tell the truth."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Better = Literal["higher", "lower"]

# An idle machine does not repeat itself more exactly than this: clock and cache differ from hour
# to hour, which rounds of one run cannot show.
FLOOR: Final = 0.03
# Student's t for 95 %, by degrees of freedom; the last stands for more.
STUDENT_T: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True, slots=True)
class Figure:
    """One value per round, at least one. `better`: which way is an improvement. `servers`: the
    number of the server that each round was on; empty when one had them all."""

    unit: str
    better: Better
    rounds: tuple[float, ...]
    servers: tuple[int, ...] = ()

    @classmethod
    def read(cls, of: Mapping[str, Any]) -> "Figure":
        """From a result file."""
        return cls(of["unit"], of["better"], tuple(of["rounds"]), tuple(of.get("servers", ())))

    @property
    def median(self) -> float:
        """The figure that is shown."""
        return statistics.median(self.rounds)

    @property
    def interval(self) -> tuple[float, float, float]:
        """Where the median of such rounds lies, and the probability that it does (`interval`)."""
        return interval(self.rounds)

    @property
    def spread(self) -> tuple[float, float]:
        """What two runs on the same idle machine have in common: the widest of all rounds, the
        95 % interval of the mean over servers by Student's t, and the median +- 3 %."""
        floor = abs(self.median) * FLOOR
        low, high = min(self.rounds), max(self.rounds)
        if len(centers := self._centers()) > 1:
            t = STUDENT_T[min(len(centers) - 1, len(STUDENT_T)) - 1]
            half = t * statistics.stdev(centers) / math.sqrt(len(centers))
            # No rate and no time is below zero.
            least = 0.0 if low >= 0 else -math.inf
            low = min(low, max(least, statistics.mean(centers) - half))
            high = max(high, statistics.mean(centers) + half)
        return min(low, self.median - floor), max(high, self.median + floor)

    def as_json(self) -> dict[str, Any]:
        """As result files have it."""
        low, high, coverage = self.interval
        return {
            "unit": self.unit,
            "better": self.better,
            "median": self.median,
            "min": min(self.rounds),
            "max": max(self.rounds),
            "interval": {"low": low, "high": high, "coverage": coverage},
            "spread": dict(zip(("low", "high"), self.spread, strict=True)),
            "rounds": list(self.rounds),
            "servers": list(self.servers),
        }

    def _centers(self) -> list[float]:
        """The medians of the servers."""
        by_server: dict[int, list[float]] = {}
        for server, value in zip(self.servers, self.rounds, strict=bool(self.servers)):
            by_server.setdefault(server, []).append(value)
        return [statistics.median(values) for values in by_server.values()]


def interval(values: Sequence[float], wanted: float = 0.95) -> tuple[float, float, float]:
    """The k-th least and k-th greatest value, k as great as `wanted` allows, and their coverage.

    The median of what they were drawn from lies outside when fewer than k of n independent values
    fall on one side of it: 2 P(Binomial(n, 1/2) < k). One value covers nothing.
    """
    ordered, count = sorted(values), len(values)
    rank = 1
    while 2 * (rank + 1) <= count and _coverage(count, rank + 1) >= wanted:
        rank += 1
    return ordered[rank - 1], ordered[count - rank], _coverage(count, rank)


def _coverage(count: int, rank: int) -> float:
    outside: int = sum(math.comb(count, below) for below in range(rank))
    return max(0.0, 1 - outside / math.exp2(count - 1))
