"""Times of GPU work: many launches in one CUDA graph, replayed between two events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise

import torch

# One launch; a case has several, on buffers of their own, so that no cache serves the next one.
Launch = Callable[[], object]

_MIN_REPLAYS = 7
_MAX_REPLAYS = 40


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one launch, over the replays."""

    median_us: float
    p10_us: float
    p90_us: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Timing:
        """At least two values."""
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), tenths[0], tenths[-1])


class GpuTimer:
    """Measures on a stream of its own; what is measured must use it too."""

    def __init__(self, device: int) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def measure(
        self, launches: Sequence[Launch], at_least: int = 32, seconds: float = 0.15
    ) -> Timing:
        """One launch after the other, the list again and again.

        `at_least`: launches of a graph. `seconds`: how long about its replays may take.
        """
        count = len(launches) * -(-at_least // len(launches))
        with torch.cuda.stream(self.stream):
            for launch in launches:  # libraries initialise themselves outside the graph
                launch()
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for launch in islice(cycle(launches), count):
                    launch()
            times = self._replay(graph, seconds)
            self.stream.synchronize()
        return Timing.of([milliseconds * 1e3 / count for milliseconds in times])

    def _replay(self, graph: torch.cuda.CUDAGraph, seconds: float) -> list[float]:
        """Milliseconds of each replay, after some that warm up."""
        begun = time.perf_counter()
        for _ in range(2):
            graph.replay()
        self.stream.synchronize()
        one = (time.perf_counter() - begun) / 2
        replays = min(max(int(seconds / one), _MIN_REPLAYS), _MAX_REPLAYS)
        events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(replays + 1)
        ]
        events[0].record(self.stream)
        for event in events[1:]:
            graph.replay()
            event.record(self.stream)
        events[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in pairwise(events)]
