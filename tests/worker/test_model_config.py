"""What config.json may say, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from worker.errors import CheckpointError
from worker.model_config import parse_model_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def family(model_type: str) -> dict[str, Any]:
    return {**LLAMA, "model_type": model_type, "architectures": None}


def test_defaults_are_those_of_the_family() -> None:
    llama = parse_model_config(LLAMA)
    assert (llama.num_kv_heads, llama.head_dim, llama.rms_norm_eps) == (4, 16, 1e-6)
    assert not any((llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm))
    assert not llama.tie_word_embeddings
    qwen2 = parse_model_config(family("qwen2"))
    assert qwen2.qkv_bias
    assert not qwen2.o_bias
    qwen3 = parse_model_config(family("qwen3"))
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias) == (128, True, False)


def test_attention_bias_covers_o() -> None:
    config = parse_model_config({**family("qwen3"), "attention_bias": True})
    assert config.qkv_bias
    assert config.o_bias


def test_yarn_lengthens_the_model() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert parse_model_config({**LLAMA, "rope_scaling": scaling}).max_positions == 1024
    assert parse_model_config(LLAMA).max_positions == 256


def test_a_window_that_no_layer_uses_is_fine() -> None:
    idle = {**family("qwen2"), "sliding_window": 64, "use_sliding_window": False}
    parse_model_config(idle)
    parse_model_config({**idle, "use_sliding_window": True, "max_window_layers": 2})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mistral"}, "'mistral'.*llama, qwen2, qwen3"),
        ({"model_type": None}, "None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClass"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"hidden_act": "gelu"}, "'gelu'.*silu"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"vocab_size": 0}, "vocab_size.*0"),
        ({"vocab_size": 1.5}, "vocab_size.*1.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers.*True"),
        ({"num_attention_heads": 3}, "64 is not a multiple of num_attention_heads 3"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"head_dim": 512}, "head_dim 512.*256"),
        ({"rms_norm_eps": 0}, "rms_norm_eps.*0"),
        ({"attention_bias": "yes"}, "attention_bias.*'yes'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "sliding_window 64.*layer 1",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_model_config({**LLAMA, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": ["llama"]},
        {"model_type": {}},
        {"layer_types": 5},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**400},
        {"rope_theta": 10**400},
        {"rope_theta": 1},
        {"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 10**400}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e308}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e308}},
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 10**400}},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": "all"},
    ],
)
def test_nonsense_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        parse_model_config({**LLAMA, **change})
