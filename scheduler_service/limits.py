"""What the scheduler must keep to, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidArgumentError
from .request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler. ValueError, naming field, value and bound, when one cannot hold."""

    num_slots: int
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

    def __post_init__(self) -> None:
        for name in (
            "num_slots",
            "max_mixed_step_tokens",
            "max_queue_len",
            "max_outstanding",
            "max_steps_per_command",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if self.max_seq_len < 2:
            raise ValueError(
                f"max_seq_len is {self.max_seq_len}; at least 2 is needed, "
                "a prompt token and a generated one"
            )
        if self.max_step_tokens < self.num_slots:
            raise ValueError(
                f"max_step_tokens is {self.max_step_tokens}; at least num_slots "
                f"({self.num_slots}) is needed, a decode row for each"
            )
        if self.max_queued_tokens < 0 or self.run_ahead_window_ns < 0:
            raise ValueError(
                f"max_queued_tokens is {self.max_queued_tokens} and run_ahead_window_ns is "
                f"{self.run_ahead_window_ns}; neither may be negative"
            )

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


@dataclass(slots=True)
class Counters:
    """Requests by how they ended, tokens, and steps of the workers. All rise only."""

    accepted: int = 0
    stop: int = 0
    length: int = 0
    cancelled: int = 0
    deadline: int = 0
    error: int = 0
    # Prompt tokens of accepted requests.
    num_prompt_tokens: int = 0
    # Tokens released to requests; those past a stop do not count.
    num_generated_tokens: int = 0
    # Forwards: a command of three decode steps counts three.
    num_steps: int = 0
    # Time in commands that held a prefill chunk, and in decode-only commands.
    prefill_step_ns: int = 0
    decode_step_ns: int = 0

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
