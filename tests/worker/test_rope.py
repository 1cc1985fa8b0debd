"""Rotation tables against Hugging Face, for every kind and spelling; refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from worker.errors import CheckpointError
from worker.rope import parse_rope, rope_tables

NUM_POSITIONS = 700
BASE: dict[str, Any] = {"max_position_embeddings": 4096}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10000.0},
    "theta": {"rope_theta": 1000000},
    "null-scaling": {"rope_theta": 500000.0, "rope_scaling": None},
    "theta-inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
    "linear-old": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "linear-new": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3-new": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "yarn-old": {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
    "yarn-both-type-keys": {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN},
    },
    "yarn-new": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    "yarn-attention-factor": {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "yarn", "attention_factor": 1.7, **YARN},
    },
    "yarn-mscale": {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "yarn", "mscale": 1.3, "mscale_all_dim": 0.7, **YARN},
    },
    "yarn-betas-no-truncate": {
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            **YARN,
        },
    },
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("config_class", "embedding"),
    [
        (LlamaConfig, LlamaRotaryEmbedding),
        (Qwen2Config, Qwen2RotaryEmbedding),
        (Qwen3Config, Qwen3RotaryEmbedding),
    ],
)
def test_tables_equal_the_reference(name: str, config_class: Any, embedding: Any) -> None:
    raw = {**BASE, **CONFIGS[name]}
    copied = {k: dict(v) if isinstance(v, dict) else v for k, v in raw.items()}
    reference = embedding(
        config_class(hidden_size=256, num_attention_heads=4, head_dim=64, **copied)
    )
    positions = torch.arange(NUM_POSITIONS)[None]
    cos, sin = reference(torch.zeros(1, dtype=torch.float32), positions)
    ours = rope_tables(parse_rope(raw), 64, NUM_POSITIONS)
    assert torch.equal(ours[0], cos[0, :, :32])
    assert torch.equal(ours[1], sin[0, :, :32])


def test_yarn_extends_the_context() -> None:
    rope = parse_rope({"max_position_embeddings": 1024, **CONFIGS["yarn-old"]})
    assert rope.extended_positions == 4096


def test_yarn_factor_from_the_lengths() -> None:
    scaling = {"type": "yarn", "original_max_position_embeddings": 1024}
    assert parse_rope({**BASE, "rope_scaling": scaling}).factor == 4.0


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*supported: default"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear"}}, "'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor.*'two'"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor.*True"),
        ({"rope_scaling": "linear"}, "'linear'"),
        ({"rope_theta": -1.0}, "rope_theta.*-1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"factor": 3}},
            "contradict",
        ),
        (
            {"rope_scaling": {**LLAMA3, "rope_type": "llama3", "high_freq_factor": 1.0}},
            "high_freq_factor 1.0",
        ),
    ],
)
def test_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_rope({**BASE, **config})
