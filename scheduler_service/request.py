"""A request as the scheduler knows it: what was asked, where it stands, how it ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a request ended. Each accepted request ends exactly once."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class RequestState(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of one request, with every default filled in.

    temperature 0 is greedy; top_p 1, top_k 0 and min_p 0 are off; seed is 64 bits, unsigned.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int


@dataclass(slots=True)
class Request:
    """One request, validated. The first block never changes, the scheduler writes the second."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    # Sampling one of these ends the request with STOP; empty when nothing does.
    end_token_ids: frozenset[int]
    arrival_ns: int
    # On the clock of arrival_ns; None: no deadline.
    deadline_ns: int | None = None

    state: RequestState = RequestState.WAITING
    slot: int = -1
    generated_token_ids: list[int] = field(default_factory=list)
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None

    @property
    def max_len(self) -> int:
        """Tokens of the sequence, prompt and generated, at which it ends with LENGTH."""
        return len(self.prompt_token_ids) + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of a request; first_index counts generated tokens from 0."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The last event of a request. `message` explains DEADLINE and ERROR."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_generated_tokens: int
    queue_ns: int
    prefill_ns: int
    decode_ns: int
    time_to_first_token_ns: int
    matched_token_id: int | None = None
    message: str = ""
    # Status of an ERROR: "INTERNAL" or "UNAVAILABLE".
    status: str = ""


Event = TokenEvent | FinishedEvent


def finished_event(
    request: Request,
    reason: FinishReason,
    num_generated: int,
    now_ns: int,
    matched_token_id: int | None,
    message: str,
    status: str,
) -> FinishedEvent:
    """The event that ends `request` now. A phase that was not reached took 0."""
    admitted_ns = now_ns if request.admitted_ns is None else request.admitted_ns
    first_ns = now_ns if request.first_token_ns is None else request.first_token_ns
    last_ns = first_ns if request.last_token_ns is None else request.last_token_ns
    return FinishedEvent(
        request_id=request.request_id,
        reason=reason,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_generated_tokens=num_generated,
        queue_ns=admitted_ns - request.arrival_ns,
        prefill_ns=first_ns - admitted_ns,
        decode_ns=last_ns - first_ns,
        time_to_first_token_ns=0
        if request.first_token_ns is None
        else first_ns - request.arrival_ns,
        matched_token_id=matched_token_id,
        message=message,
        status=status,
    )


def failed_event(request: Request, now_ns: int, message: str) -> FinishedEvent:
    """The event that ends `request` now because of a fault of ours."""
    num_generated = len(request.generated_token_ids)
    return finished_event(
        request, FinishReason.ERROR, num_generated, now_ns, None, message, "INTERNAL"
    )
