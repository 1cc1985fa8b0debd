"""config.json of a checkpoint, checked and reduced to what the decoder needs.

Qwen3 (dense), Qwen2 / Qwen2.5 and Llama differ only in the fields of `ModelConfig`. What the
decoder would compute wrongly is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.errors import CheckpointError
from worker.rope import RopeConfig, parse_rope

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What the attention kernels hold in registers and on the stack.
MAX_HEAD_DIM = 256
# Far above any model; tensor names are made for all layers before a weight file is opened.
MAX_LAYERS = 4096
_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and switches of a decoder. H, I, V, L, D are the usual sizes; H_q, H_kv its heads."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool

    @property
    def max_positions(self) -> int:
        """The longest sequence the model is made for, in tokens."""
        return max(self.max_position_embeddings, self.rope.extended_positions)


def parse_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a decoded config.json. Raises CheckpointError naming key, value and choice."""
    model_type = _model_type(config)
    _refuse_unsupported(config)
    heads = positive_int(config, "num_attention_heads")
    hidden = positive_int(config, "hidden_size")
    kv_heads = positive_int(config, "num_key_value_heads", heads)
    attention_bias = _flag(config, "attention_bias") if model_type != "qwen2" else False
    parsed = ModelConfig(
        model_type=model_type,
        num_layers=_num_layers(config),
        hidden_size=hidden,
        intermediate_size=positive_int(config, "intermediate_size"),
        vocab_size=positive_int(config, "vocab_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(config, model_type, hidden, heads),
        max_position_embeddings=positive_int(config, "max_position_embeddings"),
        rms_norm_eps=_epsilon(config),
        rope=parse_rope(config),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        qk_norm=model_type == "qwen3",
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=_flag(config, "mlp_bias") if model_type == "llama" else False,
    )
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    return parsed


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """config[key] as an integer of at least 1; null counts as absent."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json has no {key!r}")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise CheckpointError(
            f"config.json: {key} must be a positive integer below 2^31, not {value!r}"
        )
    return value


def _model_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is not supported; supported: {supported}"
        )
    architectures = config.get("architectures")
    if architectures and architectures != [ARCHITECTURES[model_type]]:
        raise CheckpointError(
            f"config.json: architectures {architectures!r} are not supported; model_type "
            f"{model_type} is served as {ARCHITECTURES[model_type]}"
        )
    return model_type


def _num_layers(config: Mapping[str, Any]) -> int:
    layers = positive_int(config, "num_hidden_layers")
    if layers > MAX_LAYERS:
        raise CheckpointError(
            f"config.json: num_hidden_layers {layers} is not supported; "
            f"supported: 1 to {MAX_LAYERS}"
        )
    return layers


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config") is not None:
        method = _mapping_value(config["quantization_config"], "quant_method")
        raise CheckpointError(
            f"config.json: quantization_config ({method}) is not supported; "
            "supported: plain float32, bfloat16 and float16 weights"
        )
    for key in _MOE_KEYS:
        if config.get(key):
            raise CheckpointError(
                f"config.json: {key} {config[key]!r}: mixture-of-experts models are not supported"
            )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(
            f"config.json: hidden_act {activation!r} is not supported; supported: silu"
        )
    _refuse_sliding_window(config)


def _refuse_sliding_window(config: Mapping[str, Any]) -> None:
    layer_types = config.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise CheckpointError(f"config.json: layer_types must be a list, not {layer_types!r}")
    others = sorted({str(kind) for kind in layer_types or [] if kind != "full_attention"})
    if others:
        raise CheckpointError(
            f"config.json: layer_types {', '.join(others)} are not supported; "
            "supported: full_attention"
        )
    window = config.get("sliding_window")
    first_layer = config.get("max_window_layers", 28)
    if isinstance(first_layer, bool) or not isinstance(first_layer, int):
        raise CheckpointError(
            f"config.json: max_window_layers must be an integer, not {first_layer!r}"
        )
    slides = bool(config.get("use_sliding_window")) and window is not None
    if slides and layer_types is None and first_layer < positive_int(config, "num_hidden_layers"):
        raise CheckpointError(
            f"config.json: sliding_window {window} is in use from layer {first_layer}; "
            "supported: full attention in every layer"
        )


def _head_dim(config: Mapping[str, Any], model_type: str, hidden: int, heads: int) -> int:
    if config.get("head_dim") is None and model_type != "qwen3" and hidden % heads:
        raise CheckpointError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads} "
            "and head_dim is not given"
        )
    default = 128 if model_type == "qwen3" else hidden // heads
    head_dim = positive_int(config, "head_dim", default)
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise CheckpointError(
            f"config.json: head_dim {head_dim} is not supported; "
            f"supported: even sizes up to {MAX_HEAD_DIM}"
        )
    return head_dim


def _epsilon(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise CheckpointError(f"config.json: rms_norm_eps must be in (0, 1), not {value!r}")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false, not {value!r}")
    return bool(value)


def _mapping_value(value: Any, key: str) -> str:
    return str(value.get(key, "unknown method")) if isinstance(value, Mapping) else str(value)
