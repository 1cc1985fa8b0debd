"""Rotary position embedding: kinds of scaling, in every spelling of config.json, and tables.

The inverse frequencies are computed in float32 in the order Hugging Face computes them, so that the
tables agree with the reference to the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.errors import CheckpointError

_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {
            "factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
# Rope parameters outside of these bounds would overflow, or mean nothing.
_NUMBERS = (1e-9, 1e12)
# "finetuned" says how the checkpoint came to be and changes nothing in the arithmetic.
_COMMON_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "finetuned",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotation. None means: derived as the kind prescribes."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def extended_positions(self) -> int:
        """Positions that YaRN stretches the model to; 0 for the other kinds."""
        return int(self.factor * self.original_positions) if self.kind == "yarn" else 0


def parse_rope(config: Mapping[str, Any]) -> RopeConfig:
    """The rotation of a decoded config.json, spelt rope_scaling or rope_parameters."""
    params = _parameters(config)
    kind = params.get("rope_type") or params.get("type") or "default"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise CheckpointError(
            f"config.json: rope scaling {kind!r} is not supported; supported: {', '.join(_KEYS)}"
        )
    unknown = sorted(set(params) - _COMMON_KEYS - _KEYS[kind])
    if unknown:
        raise CheckpointError(
            f"config.json: rope scaling {kind!r} does not know {', '.join(unknown)}"
        )
    _refuse_partial(params.get("partial_rotary_factor", config.get("partial_rotary_factor")))
    theta = _number(params, "rope_theta", config.get("rope_theta") or 10_000.0)
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta must be above 1, not {theta:g}")
    positions = _original_positions(params, config)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind, theta, _number(params, "factor"))
    if kind == "llama3":
        return _llama3(params, theta, positions)
    return _yarn(params, config, theta, positions)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [D / 2] and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = rope.theta**exponents
    inverse = 1.0 / frequencies
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, inverse), 1.0
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, frequencies, head_dim), _yarn_attention_factor(rope)
    return inverse, 1.0


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [P, D / 2], by absolute position."""
    inverse, factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse
    return angles.cos().mul_(factor), angles.sin().mul_(factor)


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and old != new:
        raise CheckpointError("config.json: rope_scaling and rope_parameters contradict each other")
    params = old or new or {}
    if isinstance(params, Mapping) and isinstance(params.get("full_attention"), Mapping):
        params = params["full_attention"]
    if not isinstance(params, Mapping):
        raise CheckpointError(f"config.json: rope parameters must be an object, not {params!r}")
    return {key: value for key, value in params.items() if value is not None}


def _llama3(params: Mapping[str, Any], theta: float, positions: int) -> RopeConfig:
    low, high = _number(params, "low_freq_factor"), _number(params, "high_freq_factor")
    if high <= low:
        raise CheckpointError(
            f"config.json: rope high_freq_factor {high} must exceed low_freq_factor {low}"
        )
    return RopeConfig(
        "llama3",
        theta,
        _number(params, "factor"),
        positions,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(
    params: Mapping[str, Any], config: Mapping[str, Any], theta: float, positions: int
) -> RopeConfig:
    ratio = config.get("max_position_embeddings", positions) / positions
    truncate = params.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(f"config.json: rope truncate must be true or false, not {truncate!r}")
    return RopeConfig(
        "yarn",
        theta,
        _number(params, "factor", ratio),
        positions,
        beta_fast=_number(params, "beta_fast", 32.0),
        beta_slow=_number(params, "beta_slow", 1.0),
        attention_factor=_optional_number(params, "attention_factor"),
        mscale=_optional_number(params, "mscale"),
        mscale_all_dim=_optional_number(params, "mscale_all_dim"),
        truncate=truncate,
    )


def _llama3_frequencies(rope: RopeConfig, inverse: Tensor) -> Tensor:
    low_wavelength = rope.original_positions / rope.low_freq_factor
    high_wavelength = rope.original_positions / rope.high_freq_factor
    wavelengths = 2 * math.pi / inverse
    scaled = torch.where(wavelengths > low_wavelength, inverse / rope.factor, inverse)
    smooth = (rope.original_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = (wavelengths >= high_wavelength) & (wavelengths <= low_wavelength)
    return torch.where(medium, blended, scaled)


def _yarn_frequencies(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    def correction(rotations: float) -> float:
        turns = rope.original_positions / (rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _original_positions(params: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    key = "original_max_position_embeddings"
    value = config.get(key) or params.get(key) or config.get("max_position_embeddings")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise CheckpointError(
            f"config.json: {key} must be a positive integer below 2^31, not {value!r}"
        )
    return value


def _refuse_partial(value: Any) -> None:
    if value is not None and value != 1:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {value!r} is not supported; supported: 1"
        )


def _optional_number(params: Mapping[str, Any], key: str) -> float | None:
    return _number(params, key) if key in params else None


def _number(params: Mapping[str, Any], key: str, default: Any = None) -> float:
    value = params.get(key, default)
    if value is None:
        raise CheckpointError(f"config.json: the rope parameters have no {key!r}")
    low, high = _NUMBERS
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise CheckpointError(
            f"config.json: rope {key} must be a number in [{low:g}, {high:g}], not {value!r}"
        )
    return float(value)
