"""A Llama model in a GGUF file as an ordinary Hugging Face folder, in float32."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from .output import CliError, Report

# GGUF token types: 3 is a control token, 4 a user-defined one; both are matched as a whole.
CONTROL, USER_DEFINED = 3, 4

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_llama(
    gguf_file: Path, folder: Path, sampling: Mapping[str, Any], report: Report
) -> None:
    """Write config, generation config, weights (float32) and tokenizer into the empty `folder`."""
    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise CliError(
            f"architecture {fields['general.architecture']!r} is not known; known: llama"
        )
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_json(folder / "config.json", model_config(fields, tied=tied))
    _write_json(folder / "generation_config.json", generation_config(fields, sampling))
    write_tokenizer(fields, folder)
    weights = _read_weights(reader.tensors, fields, report)
    report("writing", 0, 0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes its files private; the folder is an ordinary one.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o777)


def model_config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """The `config.json` that says what the GGUF metadata says."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _short(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _short(fields["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def generation_config(fields: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The special ids, and the advice on sampling that a GGUF file does not hold."""
    return {
        **sampling,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def hugging_face_name(gguf_name: str) -> str:
    """The name of a tensor in a Hugging Face checkpoint; CliError when it is not a Llama one."""
    if gguf_name in GLOBAL_NAMES:
        return GLOBAL_NAMES[gguf_name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if match is None or match[2] not in LAYER_NAMES:
        raise CliError(f"tensor {gguf_name!r} does not belong to a Llama model")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"


def unpermute_rope(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k, `[heads * head_dim, hidden]`, from GGUF's interleaved pairs to halves.

    GGUF keeps the two members of a rotated pair side by side; Hugging Face keeps all first
    members of a head, then all second ones.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, hidden))


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer described by `tokenizer.ggml.*` metadata.

    Only the kind that SmolLM2 uses is known: digits are split one by one, then GPT-2's rule.
    """
    kind = (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise CliError(f"tokenizer kind {kind} is not known; known: ('gpt2', 'smollm')")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [_merge(line) for line in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if token_type in (CONTROL, USER_DEFINED):
            added = AddedToken(token, special=token_type == CONTROL, normalized=False)
            tokenizer.add_tokens([added])
    return tokenizer


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `folder`."""
    build_tokenizer(fields).save(str(folder / "tokenizer.json"))
    tokens: list[str] = fields["tokenizer.ggml.tokens"]

    def named(role: str) -> str:
        token_id: int = fields[f"tokenizer.ggml.{role}_token_id"]
        return tokens[token_id]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _read_weights(
    tensors: list[ReaderTensor], fields: Mapping[str, Any], report: Report
) -> dict[str, np.ndarray]:
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights: dict[str, np.ndarray] = {}
    total = sum(int(tensor.n_elements) * 4 for tensor in tensors)
    done = 0
    for tensor in tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        weight = weight.reshape([int(size) for size in reversed(tensor.shape)])
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = unpermute_rope(weight, heads[kind])
        weights[hugging_face_name(tensor.name)] = np.ascontiguousarray(weight)
        done += weight.nbytes
        report("converting", done, total)
    return weights


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _short(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
