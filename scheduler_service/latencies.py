"""How long requests took and how large they were, as histograms. Pure; times in ns."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from .request import FinishedEvent, Request

# Six bounds a decade, each at most 1.7 times the one before.
_STEPS = (10, 15, 20, 30, 50, 70)


def bounds(least: int, num_decades: int) -> tuple[int, ...]:
    """From `least` on, over so many powers of ten, the last one included."""
    inner = (least * 10**decade * step // 10 for decade in range(num_decades) for step in _STEPS)
    return (*inner, least * 10**num_decades)


# 1 to 16 million.
TOKENS_BOUNDS = tuple(4**power for power in range(13))
# 0.1 ms to 10 s, and 1 ms to 1,000 s.
TOKEN_BOUNDS_NS = bounds(100_000, 5)
REQUEST_BOUNDS_NS = bounds(1_000_000, 6)


@dataclass(slots=True)
class Histogram:
    """How often a value fell into which bucket; `counts` has one more than there are upper bounds.
    A bound belongs to its bucket."""

    upper_bounds: tuple[int, ...]
    counts: list[int] = field(init=False)
    sum: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.upper_bounds) + 1)

    def observe(self, value: int) -> None:
        self.counts[bisect_left(self.upper_bounds, value)] += 1
        self.sum += value

    def observe_parts(self, total: int, number: int) -> None:
        """So many equal parts of a total."""
        self.counts[bisect_left(self.upper_bounds, total / number)] += number
        self.sum += total


def _of_tokens() -> Histogram:
    return Histogram(TOKEN_BOUNDS_NS)


def _of_requests() -> Histogram:
    return Histogram(REQUEST_BOUNDS_NS)


@dataclass(slots=True)
class Latencies:
    """As Latencies of inference.proto."""

    time_to_first_token: Histogram = field(default_factory=_of_requests)
    inter_token_latency: Histogram = field(default_factory=_of_tokens)
    time_per_output_token: Histogram = field(default_factory=_of_tokens)
    e2e_request_latency: Histogram = field(default_factory=_of_requests)
    request_queue_time: Histogram = field(default_factory=_of_requests)
    request_prefill_time: Histogram = field(default_factory=_of_requests)
    request_decode_time: Histogram = field(default_factory=_of_requests)
    request_inference_time: Histogram = field(default_factory=_of_requests)

    def note_tokens(self, request: Request, first_index: int, num_tokens: int, now_ns: int) -> None:
        """So many are told now, in one; the request's own times are still those of before."""
        last_ns = request.last_token_ns
        if last_ns is None:
            # A request that goes on from the journal had its first token in a former life.
            if first_index:
                return
            self.time_to_first_token.observe(now_ns - request.arrival_ns)
            num_tokens, last_ns = num_tokens - 1, now_ns
        if num_tokens:
            self.inter_token_latency.observe_parts(now_ns - last_ns, num_tokens)

    def note_end(self, end: FinishedEvent, e2e_ns: int) -> None:
        """A request has ended, so long after its arrival."""
        self.request_queue_time.observe(end.queue_ns)
        if not end.time_to_first_token_ns:
            return
        self.request_prefill_time.observe(end.prefill_ns)
        self.request_decode_time.observe(end.decode_ns)
        self.request_inference_time.observe(end.prefill_ns + end.decode_ns)
        self.e2e_request_latency.observe(e2e_ns)
        if end.num_generated_tokens > 1:
            self.time_per_output_token.observe(end.decode_ns // (end.num_generated_tokens - 1))


def _of_sizes() -> Histogram:
    return Histogram(TOKENS_BOUNDS)


@dataclass(slots=True)
class Sizes:
    """In tokens: of requests that have ended, and of the workers' steps."""

    request_prompt_tokens: Histogram = field(default_factory=_of_sizes)
    request_generation_tokens: Histogram = field(default_factory=_of_sizes)
    # Prompt and generated ones together.
    iteration_tokens: Histogram = field(default_factory=_of_sizes)

    def note_end(self, end: FinishedEvent) -> None:
        self.request_prompt_tokens.observe(end.num_prompt_tokens)
        self.request_generation_tokens.observe(end.num_generated_tokens)

    def note_step(self, num_prefill_tokens: int, num_generated: int, num_steps: int) -> None:
        """A command of so many steps, which generated so many tokens in all."""
        if num_steps > 1:
            self.iteration_tokens.observe_parts(num_generated, num_steps)
        else:
            self.iteration_tokens.observe(num_prefill_tokens + num_generated)
