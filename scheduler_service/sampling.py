"""Sampling parameters: what a request gets that sets none, and the ranges of each."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import InvalidArgumentError

# Just under 0.00001, so that the float32 nearest to it passes.
MIN_TEMPERATURE = 9.9999e-6
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
# Just under 0.000001, as above: what is less would scale the logits to infinity.
MIN_REPETITION_PENALTY = 9.9999e-7
MAX_REPETITION_PENALTY = 10.0


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """temperature 0 is greedy; top_p 1, top_k 0, min_p 0 and repetition_penalty 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def check_temperature(value: float, field: str) -> None:
    """0, or in [0.00001, 100]."""
    if not math.isfinite(value) or value < 0 or value > MAX_TEMPERATURE:
        raise InvalidArgumentError(
            field, f"{value} is out of range; 0 (greedy) to {MAX_TEMPERATURE:g} is accepted"
        )
    if 0 < value < MIN_TEMPERATURE:
        raise InvalidArgumentError(
            field,
            f"{value:g} would divide the logits to infinity; the least is 0.00001, or 0 for greedy",
        )


def check_top_p(value: float, field: str) -> None:
    """In [0, 1]; 1 is off."""
    _check_fraction(value, field, "1 is off, 0 keeps the most likely token")


def check_min_p(value: float, field: str) -> None:
    """In [0, 1]; 0 is off."""
    _check_fraction(value, field, "0 is off")


def check_top_k(value: int, field: str) -> None:
    """At least -1; -1 and 0 are off."""
    if value < -1:
        raise InvalidArgumentError(field, f"{value} is below -1; 0 and -1 are off")


def check_penalty(value: float, field: str) -> None:
    """In [-2, 2]; 0 is off."""
    if not -MAX_PENALTY <= value <= MAX_PENALTY:
        raise InvalidArgumentError(
            field,
            f"{value} is out of range; {-MAX_PENALTY:g} to {MAX_PENALTY:g} is accepted (0 is off)",
        )


def check_repetition_penalty(value: float, field: str) -> None:
    """In [0.000001, 10]; 1 is off."""
    if not MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY:
        raise InvalidArgumentError(
            field,
            f"{value} is out of range; 0.000001 to {MAX_REPETITION_PENALTY:g} is accepted "
            "(1 is off)",
        )


def _check_fraction(value: float, field: str, meaning: str) -> None:
    if not 0 <= value <= 1:
        raise InvalidArgumentError(
            field, f"{value} is out of range; 0 to 1 is accepted ({meaning})"
        )
