"""Against Hugging Face transformers: logits by teacher forcing, and greedy tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import assert_close
from transformers import AutoModelForCausalLM
from worker_driver import Driver, sampling

from checkpoints import VOCAB_SIZE, make_checkpoint
from worker.batch import BatchBuffers, ChunkSpan, PrefillChunk

SEQUENCE_LEN = 40
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {}),
    "llama-untied-biases": (
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-head-dim": ("llama", {"head_dim": 32, "num_key_value_heads": 6}),
    "llama-one-layer-mqa": ("llama", {"num_hidden_layers": 1, "num_key_value_heads": 1}),
    "llama-llama3-rope": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-linear-rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "qwen2-untied": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    "qwen2-yarn": (
        "qwen2",
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen3-tied": ("qwen3", {}),
    "qwen3-untied-biases": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    "qwen3-new-spelling": (
        "qwen3",
        {
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 24,
                "truncate": False,
                "attention_factor": 1.3,
            },
            "num_hidden_layers": 3,
        },
    ),
}


@pytest.fixture(scope="module", params=list(CASES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = CASES[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(directory, family, num_shards=3, seed=11, **overrides)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def sequence(length: int = SEQUENCE_LEN) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randperm(VOCAB_SIZE, generator=generator)[:length].tolist())


def test_teacher_forced_logits(checkpoint: Path, reference: Any) -> None:
    tokens = sequence()
    driver = Driver(checkpoint, num_slots=SEQUENCE_LEN, max_seq_len=64)
    batch = BatchBuffers(SEQUENCE_LEN).fill([], [PrefillChunk(1, 1, 0, tokens, False, None)])
    every = tuple(ChunkSpan(row, row + 1, 1, row) for row in range(SEQUENCE_LEN))
    ours = driver.decoder.forward(
        replace(batch, sample_rows=torch.arange(SEQUENCE_LEN), sampled_chunks=every)
    )
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    assert theirs.std() > 0.5, "a nearly uniform reference would hide errors"
    assert_close(ours, theirs, "logits_float32")


def test_greedy_tokens(checkpoint: Path, reference: Any) -> None:
    prompt = sequence(13)
    driver = Driver(checkpoint, max_seq_len=64)
    ours = driver.generate(prompt, 24, slot=3, num_steps=5)
    with torch.inference_mode():
        theirs = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert ours == theirs[0, len(prompt) :].tolist()


def test_bfloat16_weights_stay_near(tmp_path: Path) -> None:
    """bfloat16 rounds the weights and the cache, nothing else."""
    directory = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16")
    tokens = sequence()
    logits = {}
    for dtype in ("float32", "bfloat16"):
        driver = Driver(directory, num_slots=2, max_seq_len=64, weight_dtype=dtype)
        driver.run(driver.first_chunk(0, tokens, sampling(60)))
        logits[dtype] = driver.logits_of(0)[len(tokens)]
    assert driver.info.limits.kv_dtype == "bfloat16"
    assert_close(logits["bfloat16"], logits["float32"], "logits_bfloat16")


def test_float16_is_served_as_float32(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen2", dtype="float16")
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = sequence(20)
    driver = Driver(directory, max_seq_len=64)
    assert driver.info.limits.weight_dtype == "float32"
    driver.run(driver.first_chunk(0, tokens, sampling(60)))
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0, -1]
    assert_close(driver.logits_of(0)[20], theirs, "logits_float32")
