"""Small model folders with random weights, in the layout of Hugging Face.

Every weight is random and distinct, so that a swapped slice, slot or position changes the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    },
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 64,
        "rope_theta": 1000000.0,
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
    },
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    num_shards: int = 1,
    tokenizer: bool = False,
    device: str = "cpu",
    **overrides: Any,
) -> Path:
    """Writes a folder of `family` ("llama", "qwen2", "qwen3"); `overrides` go into config.json.

    An override of None removes the key. `num_shards` > 1 writes an index and that many files. Each
    `device` draws weights of its own; a GPU draws large ones fast.
    """
    config = {**_COMMON, **_FAMILIES[family], "torch_dtype": dtype, **overrides}
    config = {key: value for key, value in config.items() if value is not None}
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": 0, "eos_token_id": [2, 0], "do_sample": True, "temperature": 0.7},
    )
    tensors = random_tensors(config, seed, _DTYPES[dtype], device)
    write_tensors(directory, tensors, num_shards)
    if tokenizer:
        write_tokenizer(directory, config["vocab_size"])
    return directory


def random_tensors(
    config: Mapping[str, Any],
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """Every parameter of the model that `config` describes, by its Hugging Face name."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in _shapes(config).items():
        value = torch.randn(shape, generator=generator, device=device)
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * value
        elif name.endswith(".bias"):
            value = 0.3 * value
        else:
            # Wide enough that attention and logits are far from uniform.
            value = value * (1.6 / shape[-1] ** 0.5)
        tensors[name] = value.to(dtype).cpu().contiguous()
    return tensors


def write_tensors(
    directory: Path, tensors: Mapping[str, torch.Tensor], num_shards: int = 1
) -> None:
    """One model.safetensors, or shards with an index."""
    if num_shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::num_shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """A byte-level BPE tokenizer: special tokens first, then the bytes, then a few merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = list(SPECIAL_TOKENS) + sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("an", "d"), ("i", "n")]
    tokens += [left + right for left, right in merges]
    if len(tokens) > vocab_size:
        raise ValueError(f"a byte-level vocabulary needs {len(tokens)} ids, not {vocab_size}")
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    family, hidden = config["model_type"], config["hidden_size"]
    inter, vocab = config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config.get("num_key_value_heads", config["num_attention_heads"]) * head_dim
    attention_bias = bool(config.get("attention_bias"))
    qkv_bias = attention_bias or family == "qwen2"
    mlp_bias = bool(config.get("mlp_bias"))
    linears = (
        ("self_attn.q_proj", q_size, hidden, qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, qkv_bias),
        ("self_attn.o_proj", hidden, q_size, attention_bias),
        ("mlp.gate_proj", inter, hidden, mlp_bias),
        ("mlp.up_proj", inter, hidden, mlp_bias),
        ("mlp.down_proj", hidden, inter, mlp_bias),
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if family == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2))
