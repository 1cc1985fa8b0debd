"""A request as the scheduler knows it: what was asked, where it stands, how it ended."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

# Between the id of a call and the index of one of its further answers; no public id holds it.
_CHOICE_MARK = "\x1f"


def choice_id(call_id: str, index: int) -> str:
    """The request_id of answer `index` to a call."""
    return f"{call_id}{_CHOICE_MARK}{index}" if index else call_id


def call_id_of(request_id: str) -> str:
    """The public id, which all answers to a call share."""
    return request_id.partition(_CHOICE_MARK)[0]


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

    temperature 0 is greedy; top_p 1, top_k 0, min_p 0, the first two penalties 0 and
    repetition_penalty 1 are off; seed is 64 bits, unsigned. logit_bias: (token id, bias) pairs.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class TokenLogprobs(NamedTuple):
    """Of a token and of the best ones at its place; `rank` counts from 1. Values may be -inf."""

    logprob: float
    rank: int
    best_token_ids: tuple[int, ...]
    best_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Mask:
    """Which tokens may follow: bit id % 8 of byte id / 8. None: no token can.

    `is_complete`: the output may end here; without `allowed` it does, else the request fails.
    """

    allowed: bytes | None
    is_complete: bool


class Constraint(Protocol):
    """What an output must be. Calls take up to milliseconds, one at a time, in any thread."""

    def advance(self, token_ids: Sequence[int]) -> Mask:
        """These tokens were sampled next; what may follow them. Tokens of the first call may be
        none."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds on the requests of one client. 0: no bound of its own."""

    max_running: int = 0
    max_waiting: int = 0


NO_CLIENT_LIMITS = ClientLimits()


@dataclass(slots=True)
class Request:
    """One request, validated. The first block never changes, the scheduler writes the second."""

    request_id: str
    # Of type code "I": compared and cut at the speed of memory. One for all answers to a call.
    prompt_token_ids: array[int]
    sampling: Sampling
    max_new_tokens: int
    # Sampling one of these ends the request with STOP; empty when nothing does.
    end_token_ids: frozenset[int]
    arrival_ns: int
    # On the clock of arrival_ns; None: no deadline.
    deadline_ns: int | None = None
    # End ids cannot be sampled in the first so many tokens.
    min_new_tokens: int = 0
    # How many alternatives come with each token's logprob; None: no logprobs.
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    # Prefixes are shared among requests of equal salt only.
    cache_salt: str = ""
    constraint: Constraint | None = None
    # What may come next, behind generated_token_ids; given with `constraint`.
    first_mask: Mask | None = None
    # Who asks; "" where clients are not told apart.
    client: str = ""
    client_limits: ClientLimits = NO_CLIENT_LIMITS

    state: RequestState = RequestState.WAITING
    slot: int = -1
    # Of the prompt, found in the prefix cache when it was first placed.
    num_cached_tokens: int = 0
    # Its first chunk was sent once, so the line above is known.
    is_placed: bool = False
    # Logprobs of prompt tokens that were released.
    num_prompt_logprobs_told: int = 0
    # With those that a former process told, for a request that goes on from there.
    generated_token_ids: list[int] = field(default_factory=list)
    # Of these, so many at the end are held back: see trial.py.
    num_untold: int = 0
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None

    @property
    def call_id(self) -> str:
        """The public id, which all answers to a call share."""
        return call_id_of(self.request_id)

    @property
    def choice_index(self) -> int:
        """Which answer to the call this is, from 0."""
        return int(self.request_id.partition(_CHOICE_MARK)[2] or 0)

    @property
    def num_told(self) -> int:
        """Generated tokens that were released."""
        return len(self.generated_token_ids) - self.num_untold

    def known_token_ids(self) -> array[int]:
        """The prompt and what was generated; the prompt's own array while nothing was."""
        if not self.generated_token_ids:
            return self.prompt_token_ids
        return self.prompt_token_ids + array("I", self.generated_token_ids)

    @property
    def max_len(self) -> int:
        """Tokens of the sequence, prompt and generated, at which it ends with LENGTH."""
        return len(self.prompt_token_ids) + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of a request; first_index counts generated tokens from 0.

    `logprobs`: one for each token where the request wants them, else none.
    """

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobsEvent:
    """Logprobs of the prompt's tokens from first_index (at least 1) on; before any TokenEvent."""

    request_id: str
    first_index: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The last event of a request. `message` explains DEADLINE and ERROR.

    `num_cached_tokens`: of the prompt, not computed but found in the prefix cache.
    """

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
    # Status of an ERROR: "INTERNAL", "UNAVAILABLE" or "FAILED_PRECONDITION".
    status: str = ""
    num_cached_tokens: int = 0


Event = TokenEvent | PromptLogprobsEvent | FinishedEvent


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
        num_cached_tokens=request.num_cached_tokens,
    )


def failed_event(request: Request, now_ns: int, message: str) -> FinishedEvent:
    """The event that ends `request` now because of a fault of ours."""
    num_told = request.num_told
    return finished_event(request, FinishReason.ERROR, num_told, now_ns, None, message, "INTERNAL")
