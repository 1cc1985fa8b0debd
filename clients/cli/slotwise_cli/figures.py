"""A measured figure: its rounds, and how far they tell the truth."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One value per round, at least one. `better`: which way is an improvement."""

    unit: str
    better: Better
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The figure that is shown."""
        return statistics.median(self.rounds)

    @property
    def interval(self) -> tuple[float, float, float]:
        """Where the true median lies, and the probability that it does (see `interval`)."""
        return interval(self.rounds)

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
            "rounds": list(self.rounds),
        }


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
