"""Counts since start, kept by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from .request import FinishReason


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
