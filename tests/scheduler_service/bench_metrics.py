"""What counting costs: `python tests/scheduler_service/bench_metrics.py`.

Nanoseconds for each token of a stream, for each request and for each step, and milliseconds of a
page. No flag turns counting off, so this is what it takes of a step.
"""

from __future__ import annotations

import argparse
import timeit
from array import array
from collections.abc import Callable

from scheduler_service.latencies import Latencies, Sizes
from scheduler_service.metrics import Metrics
from scheduler_service.request import FinishedEvent, FinishReason, Request, Sampling

NS = 1_000_000


def ns_each(action: Callable[[], object], number: int) -> float:
    """The least of some rounds: others on the machine only add."""
    return min(timeit.repeat(action, number=number, repeat=7)) / number * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200_000, help="of each, a round")
    number = parser.parse_args().number
    latencies, sizes = Latencies(), Sizes()
    request = Request("a", array("I", (1, 2, 3)), Sampling(0.0, 0, 1.0, 0.0, 7), 9, frozenset(), 0)
    request.first_token_ns = request.last_token_ns = 5 * NS
    end = FinishedEvent("a", FinishReason.LENGTH, 512, 128, 4 * NS, 9 * NS, 12 * NS, 900 * NS)
    token_ns = ns_each(lambda: latencies.note_tokens(request, 1, 1, 12 * NS), number)
    step_ns = ns_each(lambda: sizes.note_step(0, 8, 1), number)
    end_ns = ns_each(lambda: (latencies.note_end(end, 999 * NS), sizes.note_end(end)), number)
    print(f"a token: {token_ns:.0f} ns; a step: {step_ns:.0f} ns; a request's end: {end_ns:.0f} ns")
    print(f"a step of 8 rows: {(8 * token_ns + step_ns) / 1e3:.1f} us")
    text_ms = ns_each(Metrics().text, 50) / 1e6
    print(f"a page without the engine's families: {text_ms:.2f} ms")


if __name__ == "__main__":
    main()
