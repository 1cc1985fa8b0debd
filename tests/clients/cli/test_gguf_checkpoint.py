from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from slotwise_cli.gguf_checkpoint import (
    _short,
    build_tokenizer,
    convert_llama,
    hugging_face_name,
    unpermute_rope,
)
from slotwise_cli.output import CliError, report_nothing

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, LAYERS = 32, 4, 2, 8, 64, 2
ALPHABET = [chr(c) for c in range(ord("!"), ord("~") + 1)] + ["Ġ"]
VOCAB = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ALPHABET, "he", "Ġhe", "12"]
MERGES = ["h e", "Ġ he", "1 2"]


def rotate_halves(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Hugging Face's rotation of a head [D]: pairs are (i, i + D/2)."""
    first, second = np.split(x, 2)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


def rotate_neighbours(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """GGUF's rotation of a head [D]: pairs are (2i, 2i + 1)."""
    even, odd = x[0::2], x[1::2]
    cos, sin = np.cos(angles), np.sin(angles)
    out = np.empty_like(x)
    out[0::2] = even * cos - odd * sin
    out[1::2] = odd * cos + even * sin
    return out


def test_attention_scores_survive_the_change_of_rotation():
    draw = np.random.default_rng(0)
    q, k = (draw.normal(size=(heads * HEAD_DIM, HIDDEN)) for heads in (HEADS, KV_HEADS))
    ours_q, ours_k = unpermute_rope(q, HEADS), unpermute_rope(k, KV_HEADS)
    x, y = draw.normal(size=(2, HIDDEN))
    frequencies = 100.0 ** -np.linspace(0, 1, HEAD_DIM // 2)
    for head in range(HEADS):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        kv_rows = slice(head // 2 * HEAD_DIM, (head // 2 + 1) * HEAD_DIM)
        theirs = rotate_neighbours(q[rows] @ x, 5 * frequencies) @ rotate_neighbours(
            k[kv_rows] @ y, 3 * frequencies
        )
        ours = rotate_halves(ours_q[rows] @ x, 5 * frequencies) @ rotate_halves(
            ours_k[kv_rows] @ y, 3 * frequencies
        )
        assert ours == pytest.approx(theirs)


@pytest.fixture
def tiny_gguf(tmp_path) -> tuple[Path, dict[str, np.ndarray]]:
    """A small Llama in a GGUF file, and its tensors as written."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(VOCAB))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCAB)
    writer.add_token_types([3, 3, 3] + [1] * (len(VOCAB) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    tensors = tiny_tensors()
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


def tiny_tensors() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    shapes = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (INTER, HIDDEN),
        "ffn_up": (INTER, HIDDEN),
        "ffn_down": (HIDDEN, INTER),
    }
    named = {"token_embd.weight": (len(VOCAB), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        named |= {f"blk.{layer}.{kind}.weight": shape for kind, shape in shapes.items()}
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in named.items()}


def test_a_whole_file_becomes_a_hugging_face_folder(tiny_gguf, tmp_path):
    path, tensors = tiny_gguf
    folder = tmp_path / "out"
    folder.mkdir()
    convert_llama(path, folder, {"temperature": 0.2}, report_nothing)
    weights = load_file(folder / "model.safetensors")
    assert len(weights) == len(tensors)
    for name, value in tensors.items():
        got = weights[hugging_face_name(name)]
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        np.testing.assert_array_equal(got, unpermute_rope(value, heads) if heads else value)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["hidden_size"], config["intermediate_size"]) == (HIDDEN, INTER)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 10000.0)
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 2
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"]) == (2, 0.2)
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer_config["eos_token"] == "<|im_end|>"
    assert tokenizer_config["chat_template"] == "{{ messages[0]['content'] }}"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("he 12<|im_end|>").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["he", "Ġ", "1", "2", "<|im_end|>"]


def test_digits_stay_apart_although_a_merge_joins_them():
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": VOCAB,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(VOCAB) - 3),
        "tokenizer.ggml.merges": MERGES,
    }
    assert build_tokenizer(fields).encode("12").tokens == ["1", "2"]
    with pytest.raises(CliError, match="llama-bpe"):
        build_tokenizer({**fields, "tokenizer.ggml.pre": "llama-bpe"})


@pytest.mark.parametrize(
    "name", ["blk.0.attn_rot.weight", "v.patch_embd.weight", "blk.x.attn_q.weight"]
)
def test_a_foreign_tensor_is_named(name):
    with pytest.raises(CliError, match=name.replace(".", r"\.")):
        hugging_face_name(name)


def test_a_float32_is_written_as_the_shortest_decimal():
    assert _short(9.999999747378752e-06) == 1e-05
    assert _short(100000.0) == 100000.0
