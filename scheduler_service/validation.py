"""A caller's wishes to a request that the scheduler can take, or an error that names the field."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .config import MAX_MESSAGE_BYTES
from .errors import InvalidArgumentError
from .generate_call import ConstraintSpec, GenerateCall
from .request import Request, Sampling, choice_id
from .sampling import (
    SamplingDefaults,
    check_min_p,
    check_penalty,
    check_repetition_penalty,
    check_temperature,
    check_top_k,
    check_top_p,
)
from .text_stream import TextOptions

_MASK64 = (1 << 64) - 1
MAX_REQUEST_ID = 128
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
MAX_N = 32
MAX_SALT = 256
MAX_CHOICES = 1024
# Characters of a schema, an expression, a grammar or all choices.
MAX_CONSTRAINT = 1 << 20
# What a token and a logprob take in a message, on average: tokens seldom have above 12 bytes.
TOKEN_BYTES = 16
LOGPROB_BYTES = 30


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request must fit, and what it gets when it sets nothing."""

    vocab_size: int
    max_seq_len: int
    end_token_ids: frozenset[int]
    default_sampling: SamplingDefaults
    # Of the model's chats, "" when nothing is known of it.
    output_format: str = ""
    # Of GenerateCall.attach_window_s.
    max_window_s: float = 0.0


def check_call(call: GenerateCall, limits: ModelLimits) -> None:
    """Everything that needs no prompt ids; InvalidArgumentError for the first thing wrong."""
    _check_request_id(call.request_id)
    _check_sampling(call)
    _check_biases(call, limits.vocab_size)
    _check_stops(call, limits.vocab_size)
    _check_count("logprobs", call.logprobs, 0, MAX_LOGPROBS)
    _check_count("prompt_logprobs", call.prompt_logprobs, 0, MAX_LOGPROBS)
    _check_count("n", call.n, 1, MAX_N)
    if call.cache_salt is not None:
        _check_size("cache_salt", len(call.cache_salt), 0, MAX_SALT, "characters")
    if call.attach_window_s > limits.max_window_s:
        raise InvalidArgumentError(
            "attach_window_ms",
            f"{call.attach_window_s * 1e3:.0f} is out of range; at most "
            f"{limits.max_window_s * 1e3:.0f} is accepted",
        )
    if call.constraint is not None:
        _check_constraint(call.constraint)
    if call.parse_output:
        _check_parse_output(call, limits.output_format)
    if call.max_new_tokens is not None and not 1 <= call.max_new_tokens < limits.max_seq_len:
        raise InvalidArgumentError(
            "max_new_tokens",
            f"{call.max_new_tokens} is out of range; at least 1, and the context of "
            f"{limits.max_seq_len} holds {limits.max_seq_len - 1} besides a prompt",
        )


def make_requests(
    call: GenerateCall,
    prompt_token_ids: Sequence[int],
    limits: ModelLimits,
    arrival_ns: int,
    deadline_ns: int | None,
) -> list[Request]:
    """A request per answer to a checked call: defaults filled in, id and seed drawn where unset."""
    call_id = f"req-{secrets.token_hex(12)}" if call.request_id is None else call.request_id
    prompt = array("I", prompt_token_ids)
    max_new_tokens = _room(call.max_new_tokens, len(prompt), limits.max_seq_len)
    sampling = _sampling(call, limits)
    return [
        Request(
            request_id=choice_id(call_id, index),
            prompt_token_ids=prompt,
            sampling=replace(sampling, seed=choice_seed(sampling.seed, index)),
            max_new_tokens=max_new_tokens,
            end_token_ids=_end_token_ids(call, limits),
            arrival_ns=arrival_ns,
            deadline_ns=deadline_ns,
            min_new_tokens=_min_new_tokens(call, max_new_tokens),
            num_logprobs=call.logprobs,
            # The prompt is the same for all: the first one tells of it.
            num_prompt_logprobs=call.prompt_logprobs if index == 0 else None,
            cache_salt=call.cache_salt or "",
        )
        for index in range(call.n or 1)
    ]


def check_fits(requests: Sequence[Request]) -> None:
    """InvalidArgumentError when the answers, at their longest, would not fit one message."""
    first = requests[0]
    per_token = TOKEN_BYTES + _logprobs_bytes(first.num_logprobs)
    num_bytes = len(requests) * first.max_new_tokens * per_token
    of_prompt = len(first.prompt_token_ids) * _logprobs_bytes(first.num_prompt_logprobs)
    if num_bytes + of_prompt > MAX_MESSAGE_BYTES:
        raise InvalidArgumentError(
            "max_new_tokens" if num_bytes > of_prompt else "prompt_logprobs",
            f"{len(requests)} answers of up to {first.max_new_tokens} tokens to a prompt of "
            f"{len(first.prompt_token_ids)}, with the logprobs asked for, make a message of about "
            f"{(num_bytes + of_prompt) >> 20} MiB; one holds {MAX_MESSAGE_BYTES >> 20}. Lower "
            "max_new_tokens, n, logprobs or prompt_logprobs, or call Generate, which streams",
        )


def _logprobs_bytes(num_best: int | None) -> int:
    return 0 if num_best is None else (1 + num_best) * LOGPROB_BYTES


def choice_seed(seed: int, index: int) -> int:
    """Seed of answer `index`: splitmix64's output `index` from state `seed`; of answer 0 `seed`.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK64
    return mixed ^ mixed >> 31


def text_options(call: GenerateCall, request: Request) -> TextOptions:
    """How the request's output is to be written."""
    return TextOptions(
        stop=call.stop,
        end_token_ids=request.end_token_ids,
        include_stop_in_output=call.include_stop_in_output,
        omit_text=call.omit_text,
        min_new_tokens=request.min_new_tokens,
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
    if call.frequency_penalty is not None:
        check_penalty(call.frequency_penalty, "sampling.frequency_penalty")
    if call.presence_penalty is not None:
        check_penalty(call.presence_penalty, "sampling.presence_penalty")
    if call.repetition_penalty is not None:
        check_repetition_penalty(call.repetition_penalty, "sampling.repetition_penalty")


def _check_biases(call: GenerateCall, vocab_size: int) -> None:
    if len(call.logit_bias) > MAX_BIASES:
        raise InvalidArgumentError(
            "sampling.logit_bias",
            f"has {len(call.logit_bias)} entries; at most {MAX_BIASES} are accepted",
        )
    for token_id, bias in call.logit_bias:
        field = f"sampling.logit_bias[{token_id}]"
        if token_id >= vocab_size:
            raise InvalidArgumentError(
                field, f"token id {token_id} is outside the vocabulary, below {vocab_size}"
            )
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidArgumentError(
                field, f"{bias} is out of range; {-MAX_BIAS:g} to {MAX_BIAS:g} is accepted"
            )


def _check_count(field: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise InvalidArgumentError(field, f"{value} is out of range; {least} to {most} is accepted")


def _check_size(field: str, size: int, least: int, most: int, what: str) -> None:
    if not least <= size <= most:
        raise InvalidArgumentError(field, f"has {size} {what}; {least} to {most} are accepted")


def _check_constraint(spec: ConstraintSpec) -> None:
    if spec.kind == "choice":
        _check_size("choice.texts", len(spec.choices), 1, MAX_CHOICES, "texts")
        _check_size("choice.texts", sum(map(len, spec.choices)), 1, MAX_CONSTRAINT, "characters")
        for index, text in enumerate(spec.choices):
            if not text:
                raise InvalidArgumentError(f"choice.texts[{index}]", "is empty")
    elif spec.kind != "json_object":
        _check_size(spec.kind, len(spec.source), 1, MAX_CONSTRAINT, "characters")


def _check_parse_output(call: GenerateCall, output_format: str) -> None:
    field = "parse_output"
    if not call.is_chat:
        raise InvalidArgumentError(field, "applies to chat only; leave it out")
    if call.omit_text:
        raise InvalidArgumentError(field, "needs the text that omit_text leaves out; unset one")
    if not output_format:
        raise InvalidArgumentError(
            field, "nothing is known of this model's output format; leave it out"
        )


def _check_stops(call: GenerateCall, vocab_size: int) -> None:
    if call.include_stop_in_output and call.omit_text:
        raise InvalidArgumentError(
            "include_stop_in_output", "needs the text that omit_text leaves out; unset one"
        )
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
    _check_size("stop_token_ids", len(call.stop_token_ids), 0, MAX_STOP_IDS, "ids")
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
        frequency_penalty=call.frequency_penalty or 0.0,
        presence_penalty=call.presence_penalty or 0.0,
        repetition_penalty=(
            own.repetition_penalty if call.repetition_penalty is None else call.repetition_penalty
        ),
        logit_bias=call.logit_bias,
    )


def _min_new_tokens(call: GenerateCall, max_new_tokens: int) -> int:
    value = call.min_new_tokens or 0
    if value > max_new_tokens:
        raise InvalidArgumentError(
            "min_new_tokens", f"{value} is above max_new_tokens, which is {max_new_tokens}"
        )
    return value


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
