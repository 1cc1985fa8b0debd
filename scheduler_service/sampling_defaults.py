"""Sampling of a request that sets nothing: generation_config.json's, else neutral values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from .errors import InvalidArgumentError
from .json_file import JsonFile, ModelFilesError
from .sampling_limits import check_min_p, check_temperature, check_top_p

T = TypeVar("T", int, float)

# Settings of generation_config.json that would change tokens, and their value that changes nothing.
UNAPPLIED_NEUTRAL = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "penalty_alpha": None,
    "min_new_tokens": 0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """temperature 0 is greedy; top_p 1, top_k 0 and min_p 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def read_sampling_defaults(file: JsonFile) -> tuple[SamplingDefaults, tuple[str, ...]]:
    """The defaults of generation_config.json, and what it asks for that is not applied.

    A number in the file is the default, whatever do_sample says; greedy is asked for by
    temperature 0.
    """
    own = SamplingDefaults()
    top_k = file.integer("top_k", at_least=-1)
    numbers = {key: file.number(key) for key in ("temperature", "top_p", "min_p")}
    merged = SamplingDefaults(
        temperature=_or(numbers["temperature"], own.temperature),
        top_p=_or(numbers["top_p"], own.top_p),
        top_k=max(0, _or(top_k, own.top_k)),
        min_p=_or(numbers["min_p"], own.min_p),
    )
    try:
        check_temperature(merged.temperature, "temperature")
        check_top_p(merged.top_p, "top_p")
        check_min_p(merged.min_p, "min_p")
    except InvalidArgumentError as error:
        raise ModelFilesError(f"{file.path}: {error}") from error
    return merged, _unapplied(file)


def _unapplied(file: JsonFile) -> tuple[str, ...]:
    asked = {key: file.raw(key) for key in UNAPPLIED_NEUTRAL}
    return tuple(
        f"{key} {value}"
        for key, value in asked.items()
        if value not in (None, UNAPPLIED_NEUTRAL[key])
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
