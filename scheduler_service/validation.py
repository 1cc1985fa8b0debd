"""A caller's wishes to a request that the scheduler can take, or an error that names the field."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import InvalidArgumentError
from .generate_call import GenerateCall
from .request import Request, Sampling
from .sampling import SamplingDefaults, check_min_p, check_temperature, check_top_k, check_top_p
from .text_stream import TextOptions

MAX_REQUEST_ID = 128
MAX_STOPS = 16
MAX_STOP_BYTES = 1024


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request must fit, and what it gets when it sets nothing."""

    vocab_size: int
    max_seq_len: int
    end_token_ids: frozenset[int]
    default_sampling: SamplingDefaults


def check_call(call: GenerateCall, limits: ModelLimits) -> None:
    """Everything that needs no prompt ids; InvalidArgumentError for the first thing wrong."""
    _check_request_id(call.request_id)
    _check_sampling(call)
    _check_stops(call, limits.vocab_size)
    if call.max_new_tokens is not None and not 1 <= call.max_new_tokens < limits.max_seq_len:
        raise InvalidArgumentError(
            "max_new_tokens",
            f"{call.max_new_tokens} is out of range; at least 1, and the context of "
            f"{limits.max_seq_len} holds {limits.max_seq_len - 1} besides a prompt",
        )


def make_request(
    call: GenerateCall,
    prompt_token_ids: Sequence[int],
    limits: ModelLimits,
    arrival_ns: int,
    deadline_ns: int | None,
) -> Request:
    """The request of a checked call: defaults filled in, id and seed drawn where unset."""
    request_id = call.request_id
    return Request(
        request_id=f"req-{secrets.token_hex(12)}" if request_id is None else request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=_sampling(call, limits),
        max_new_tokens=_room(call.max_new_tokens, len(prompt_token_ids), limits.max_seq_len),
        end_token_ids=_end_token_ids(call, limits),
        arrival_ns=arrival_ns,
        deadline_ns=deadline_ns,
    )


def text_options(call: GenerateCall, request: Request) -> TextOptions:
    """How the request's output is to be written."""
    return TextOptions(
        stop=call.stop,
        end_token_ids=request.end_token_ids,
        include_stop_in_output=call.include_stop_in_output,
        omit_text=call.omit_text,
    )


def check_request_id(value: str, field: str = "request_id") -> None:
    """1 to 128 printable ASCII characters."""
    if not 1 <= len(value) <= MAX_REQUEST_ID or not (value.isascii() and value.isprintable()):
        raise InvalidArgumentError(
            field,
            f"{value[:200]!r} ({len(value)} characters) is not 1 to {MAX_REQUEST_ID} printable "
            "ASCII characters",
        )


def _check_request_id(value: str | None) -> None:
    if value is not None:
        check_request_id(value)


def _check_sampling(call: GenerateCall) -> None:
    if call.temperature is not None:
        check_temperature(call.temperature, "sampling.temperature")
    if call.top_p is not None:
        check_top_p(call.top_p, "sampling.top_p")
    if call.top_k is not None:
        check_top_k(call.top_k, "sampling.top_k")
    if call.min_p is not None:
        check_min_p(call.min_p, "sampling.min_p")


def _check_stops(call: GenerateCall, vocab_size: int) -> None:
    if len(call.stop) > MAX_STOPS:
        raise InvalidArgumentError(
            "stop", f"{len(call.stop)} stop strings; at most {MAX_STOPS} are accepted"
        )
    for index, stop in enumerate(call.stop):
        size = len(stop.encode())
        if not 1 <= size <= MAX_STOP_BYTES:
            raise InvalidArgumentError(
                f"stop[{index}]", f"has {size} bytes; 1 to {MAX_STOP_BYTES} are accepted"
            )
    for index, token_id in enumerate(call.stop_token_ids):
        if token_id >= vocab_size:
            raise InvalidArgumentError(
                f"stop_token_ids[{index}]",
                f"token id {token_id} is outside the vocabulary, below {vocab_size}",
            )


def _sampling(call: GenerateCall, limits: ModelLimits) -> Sampling:
    own = limits.default_sampling
    top_k = own.top_k if call.top_k is None else call.top_k
    return Sampling(
        temperature=own.temperature if call.temperature is None else call.temperature,
        top_p=own.top_p if call.top_p is None else call.top_p,
        top_k=top_k if 0 < top_k <= limits.vocab_size else 0,
        min_p=own.min_p if call.min_p is None else call.min_p,
        seed=secrets.randbits(64) if call.seed is None else call.seed,
    )


def _room(wanted: int | None, num_prompt: int, max_seq_len: int) -> int:
    room = max_seq_len - num_prompt
    if wanted is not None and wanted > room:
        raise InvalidArgumentError(
            "max_new_tokens",
            f"{wanted} with a prompt of {num_prompt} tokens makes {num_prompt + wanted}, above the "
            f"context of {max_seq_len}; at most {room} fit",
        )
    return room if wanted is None else wanted


def _end_token_ids(call: GenerateCall, limits: ModelLimits) -> frozenset[int]:
    own = frozenset[int]() if call.ignore_eos else limits.end_token_ids
    return own | frozenset(call.stop_token_ids)
