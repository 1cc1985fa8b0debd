"""What the latencies of all benchmarks mean; every one of them is counted here.

All are seen by the client, by one monotonic clock, from `sent` on: when the request was handed to
gRPC; in `bench arrivals`, when it was planned to arrive, however late it left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

PERCENTILES: Final = (50, 90, 95, 99)
DEFINITIONS: Final = {
    "TTFT": "time to first token: from sending (planned arrival in `arrivals`) to the first "
    "message with a token; neither the acceptance nor an empty delta counts",
    "ITL": "inter-token latency: the gaps between successive tokens after the first; tokens of one "
    "message share the gap before it evenly",
    "TPOT": "time per output token: (E2E - TTFT) / (tokens - 1), one value per request of two "
    "tokens or more",
    "E2E": "from sending to the last token",
    "percentile": "nearest rank: the least value with at least that share at or below it",
    "spread": "what two runs on the same idle machine have in common: the widest of least to "
    "greatest round, the 95 % interval of the mean over servers by Student's t (each server has "
    "some of the rounds), and the median +- 3 %",
}


@dataclass(frozen=True, slots=True)
class Timeline:
    """When one request was sent (s), and when how many of its tokens arrived."""

    sent: float
    arrivals: tuple[tuple[float, int], ...]

    @property
    def ttft_ms(self) -> float:
        """Time to the first token; at least one must have come."""
        return (self.arrivals[0][0] - self.sent) * 1e3

    @property
    def num_tokens(self) -> int:
        """Tokens that arrived."""
        return sum(count for _, count in self.arrivals)

    @property
    def itl_ms(self) -> list[float]:
        """Times between tokens; tokens of one message share the wait before it evenly."""
        gaps: list[float] = []
        for (before, _), (now, count) in pairwise(self.arrivals):
            gaps += [(now - before) * 1e3 / count] * count
        return gaps

    @property
    def e2e_ms(self) -> float:
        """From sending to the last token; at least one must have come."""
        return (self.arrivals[-1][0] - self.sent) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Time per token after the first; None of a single token."""
        more = self.num_tokens - 1
        return (self.e2e_ms - self.ttft_ms) / more if more > 0 else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value with at least `percent` of the values at or below it."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank) - 1, 0)]


def latencies(timelines: Sequence[Timeline]) -> dict[str, list[float]]:
    """The values of each kind, in ms, of requests that have tokens."""
    return {
        "ttft_ms": [one.ttft_ms for one in timelines],
        "itl_ms": [gap for one in timelines for gap in one.itl_ms],
        "tpot_ms": [tpot for one in timelines if (tpot := one.tpot_ms) is not None],
        "e2e_ms": [one.e2e_ms for one in timelines],
    }
