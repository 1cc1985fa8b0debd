"""What the scheduler must keep to, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .errors import InvalidArgumentError
from .latencies import Latencies, Sizes
from .prefix_index import PrefixReuse
from .request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler. ValueError, naming field, value and bound, when one cannot hold."""

    num_slots: int
    # Slots that may be busy at once; the others keep what their last tenants left.
    max_running: int
    max_seq_len: int
    # Rows (tokens) of one forward, decode rows included.
    max_step_tokens: int
    # Prompt tokens of a forward that holds a decode row.
    max_mixed_step_tokens: int
    max_queue_len: int
    # Prompt tokens that may wait; 0: no bound.
    max_queued_tokens: int
    # Commands that may be in flight. 1: no run-ahead.
    max_outstanding: int
    # Decode steps in one command, and the time they should fill.
    max_steps_per_command: int
    run_ahead_window_ns: int
    # Decode steps with logprobs that may be in flight.
    max_logprobs_steps: int
    prefix_reuse: PrefixReuse
    # Slots are shared evenly among clients that wait; else first come, first served.
    fair_share: bool = False
    # Requests of one client that may wait; 0: no bound of its own.
    max_waiting_per_client: int = 0

    def __post_init__(self) -> None:
        for name in (
            "num_slots",
            "max_running",
            "max_mixed_step_tokens",
            "max_queue_len",
            "max_outstanding",
            "max_steps_per_command",
            "max_logprobs_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if self.max_seq_len < 2:
            raise ValueError(
                f"max_seq_len is {self.max_seq_len}; at least 2 is needed, "
                "a prompt token and a generated one"
            )
        if self.max_running > self.num_slots:
            raise ValueError(
                f"max_running is {self.max_running}; at most num_slots ({self.num_slots}) can run"
            )
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens is {self.max_step_tokens}; at least max_running "
                f"({self.max_running}) is needed, a decode row for each"
            )
        if self.max_waiting_per_client < 0:
            raise ValueError(
                f"max_waiting_per_client is {self.max_waiting_per_client}; 0 (no bound) or more is "
                "needed"
            )
        if self.max_queued_tokens < 0 or self.run_ahead_window_ns < 0:
            raise ValueError(
                f"max_queued_tokens is {self.max_queued_tokens} and run_ahead_window_ns is "
                f"{self.run_ahead_window_ns}; neither may be negative"
            )

    @property
    def full_step_tokens(self) -> int:
        """Prompt tokens of a step that no budget lets hold fewer while more of them wait."""
        rows_left = self.max_step_tokens - self.max_running
        return max(1, min(self.max_mixed_step_tokens, rows_left))

    def check(self, request: Request) -> None:
        """InvalidArgumentError when the request could never run."""
        if not request.prompt_token_ids:
            raise InvalidArgumentError("input", "the prompt is empty; at least 1 token is needed")
        if request.max_new_tokens < 1:
            raise InvalidArgumentError(
                "max_new_tokens", f"is {request.max_new_tokens}; at least 1 is needed"
            )
        if request.max_len > self.max_seq_len:
            raise InvalidArgumentError(
                "max_new_tokens",
                f"{len(request.prompt_token_ids)} prompt tokens and {request.max_new_tokens} new "
                f"ones are {request.max_len}, the context holds {self.max_seq_len}",
            )
        if request.constraint is not None:
            _check_first_mask(request)

    def check_number(self, requests: Sequence[Request]) -> None:
        """InvalidArgumentError when so many of one call could never wait or run together."""
        bound = self.max_queue_len + self.max_running
        if len(requests) > bound:
            raise InvalidArgumentError(
                "n", f"is {len(requests)}; at most {bound} can wait and run in this server"
            )
        max_waiting = self.max_waiting_of(requests[0])
        bound = max_waiting + self.max_running_of(requests[0])
        if max_waiting and len(requests) > bound:
            raise InvalidArgumentError(
                "n", f"is {len(requests)}; at most {bound} of one client can wait and run"
            )

    def max_waiting_of(self, request: Request) -> int:
        """How many requests of this one's client may wait; 0: no bound of its own."""
        bounds = (request.client_limits.max_waiting, self.max_waiting_per_client)
        return min((bound for bound in bounds if bound), default=0)

    def max_running_of(self, request: Request) -> int:
        """How many requests of this one's client may run at once."""
        return min(self.max_running, request.client_limits.max_running or self.max_running)


def _check_first_mask(request: Request) -> None:
    if request.first_mask is None:
        raise ValueError(f"request {request.request_id!r} has a constraint and no first mask")
    # What goes on behind such a mask has ended: Scheduler.resume sees to it.
    if request.first_mask.allowed is None and not request.generated_token_ids:
        raise InvalidArgumentError(
            "constraint", "no token of this model can begin such an output; loosen it"
        )


@dataclass(slots=True)
class PrefixCacheCounters:
    """As PrefixCacheCounters of inference.proto. All rise only."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_hits: int = 0
    num_copies: int = 0
    num_copied_tokens: int = 0
    num_evictions: int = 0
    num_evicted_tokens: int = 0


@dataclass(slots=True)
class Counters:
    """Requests by how they ended, tokens, and steps of the workers. All rise only."""

    accepted: int = 0
    stop: int = 0
    length: int = 0
    cancelled: int = 0
    deadline: int = 0
    error: int = 0
    # Of these, ended because the workers died of them, and by logits that are no numbers.
    poisoned: int = 0
    corrupted: int = 0
    # Prompt tokens of accepted requests.
    num_prompt_tokens: int = 0
    # Of them, of requests that have ended: found in the prefix cache and not computed.
    num_cached_prompt_tokens: int = 0
    # Tokens released to requests; those past a stop do not count.
    num_generated_tokens: int = 0
    # Forwards: a command of three decode steps counts three.
    num_steps: int = 0
    # Time in commands that held a prefill chunk, and in decode-only commands.
    prefill_step_ns: int = 0
    decode_step_ns: int = 0
    prefix_cache: PrefixCacheCounters = field(default_factory=PrefixCacheCounters)
    latencies: Latencies = field(default_factory=Latencies)
    sizes: Sizes = field(default_factory=Sizes)

    def count_end(self, reason: FinishReason) -> None:
        """One more request ended, for this reason."""
        match reason:
            case FinishReason.STOP:
                self.stop += 1
            case FinishReason.LENGTH:
                self.length += 1
            case FinishReason.CANCELLED:
                self.cancelled += 1
            case FinishReason.DEADLINE:
                self.deadline += 1
            case FinishReason.ERROR:
                self.error += 1
