"""Shapes of known models: their config.json, every parameter, and what a decode step reads."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from .output import CliError

DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What differs between models of one family."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool


_QWEN3: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN2: Final[dict[str, Any]] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_LLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
}
_LLAMA32: Final[dict[str, Any]] = {
    **_LLAMA,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": 128009,
}
_SMOLLM2: Final[dict[str, Any]] = {
    **_LLAMA,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MODELS: Final[dict[str, tuple[dict[str, Any], Sizes]]] = {
    "qwen3-0.6b": (_QWEN3, Sizes(1024, 3072, 28, 16, 8, tied=True)),
    "qwen3-1.7b": (_QWEN3, Sizes(2048, 6144, 28, 16, 8, tied=True)),
    "qwen3-4b": (_QWEN3, Sizes(2560, 9728, 36, 32, 8, tied=True)),
    "qwen3-8b": (_QWEN3, Sizes(4096, 12288, 36, 32, 8, tied=False)),
    "qwen3-14b": (_QWEN3, Sizes(5120, 17408, 40, 40, 8, tied=False)),
    "qwen3-32b": (_QWEN3, Sizes(5120, 25600, 64, 64, 8, tied=False)),
    "qwen2.5-0.5b": (_QWEN2, Sizes(896, 4864, 24, 14, 2, tied=True)),
    "llama-3.2-1b": (_LLAMA32, Sizes(2048, 8192, 16, 32, 8, tied=True)),
    "smollm2-135m": (_SMOLLM2, Sizes(576, 1536, 30, 9, 3, tied=True)),
}


def model_config(
    name: str,
    *,
    layers: int | None = None,
    max_positions: int | None = None,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """The config.json of a known model; CliError (exit 2) naming the known ones for another."""
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise CliError(f"{name!r} is not known{hint} Known: {', '.join(MODELS)}", exit_code=2)
    family, sizes = MODELS[name]
    config = {
        **family,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": layers or sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "tie_word_embeddings": sizes.tied,
        "torch_dtype": dtype,
    }
    if max_positions is not None:
        config["max_position_embeddings"] = max_positions
    return config


def parameter_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every parameter by its Hugging Face name, in the order of a forward."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes[HEAD] = (vocab, hidden)
    return shapes


def head_dim(config: Mapping[str, Any]) -> int:
    """D, which some families leave to be reckoned."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def step_bytes(config: Mapping[str, Any], weight_bytes: int, kv_bytes: int, tokens: int) -> int:
    """Bytes a decode step must read: every weight but the rows of an embedding, and all K and V.

    `weight_bytes`, `kv_bytes`: of one number. `tokens`: in the cache, over all requests.
    """
    shapes = parameter_shapes(config)
    if HEAD in shapes:
        del shapes[EMBEDDING]
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim(config)
    numbers = sum(prod(shape) for shape in shapes.values())
    return int(weight_bytes * numbers + kv_bytes * per_token * tokens)


def _layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], head_dim(config)
    q_size = config["num_attention_heads"] * size
    kv_size = config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config["model_type"] == "qwen2":
        rows = {"q": q_size, "k": kv_size, "v": kv_size}
        shapes |= {f"self_attn.{part}_proj.bias": (size,) for part, size in rows.items()}
    if config["model_type"] == "qwen3":
        shapes |= {f"self_attn.{part}_norm.weight": (size,) for part in "qk"}
    return shapes
