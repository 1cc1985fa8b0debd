"""A GPU's logits against Hugging Face transformers on the same GPU, by teacher forcing.

Two layers of the real shapes, random weights; by prefill and token by token.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_driver import DEVICE, GpuDriver, needs_gpus
from tolerances import tolerance
from torch import Tensor
from transformers import AutoModelForCausalLM
from worker_driver import same_bits

from checkpoints import make_checkpoint
from slotwise_cli.geometry import model_config
from worker.batch import ChunkSpan, PrefillChunk

pytestmark = [pytest.mark.gpu, needs_gpus()]

# Over a tile of attention; the prompt's products go to the library, those of a token do not.
SEQUENCE_LEN = 144
ROWS = 8
# Smaller vocabularies where the real one would only take time.
QWEN3 = {
    "qwen3-0.6b": {},
    "qwen3-1.7b": {"vocab_size": 8192},
    "qwen3-4b": {"vocab_size": 8192},
    "qwen3-8b": {"vocab_size": 8192},
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-64": (
        "llama",
        {
            "hidden_size": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-128": ("llama", {"hidden_size": 768, "num_attention_heads": 6}),
    "qwen2-64": ("qwen2", {"hidden_size": 896, "num_attention_heads": 14}),
    "qwen2-128": ("qwen2", {"hidden_size": 1536, "num_attention_heads": 12}),
}
CASES = [*QWEN3, *OTHERS]


def make(folder: Path, name: str) -> Path:
    if name in OTHERS:
        family, shape = OTHERS[name]
        shape = {"intermediate_size": 2048, "vocab_size": 4096, **shape}
    else:
        family = "qwen3"
        shape = {**model_config(name, layers=2), **QWEN3[name]}
    make_checkpoint(folder, family, seed=3, dtype="bfloat16", device=DEVICE, **shape)
    return folder


@pytest.fixture(scope="module", params=CASES)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    yield make(tmp_path_factory.mktemp(request.param), request.param)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def tokens(folder: Path) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randint(0, 4096, (SEQUENCE_LEN,), generator=generator).tolist())


def theirs(folder: Path, tokens: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """float32 [T, V]. Neither side may use TF32."""
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model = model.to(DEVICE).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens], device=DEVICE)).logits[0].float()
    torch.cuda.synchronize()
    return logits.clone()


@pytest.fixture(scope="module")
def reference(folder: Path, tokens: tuple[int, ...]) -> Tensor:
    """Theirs in float32."""
    logits = theirs(folder, tokens, torch.float32)
    assert logits.std() > 0.5, "a nearly uniform reference would hide errors"
    return logits


def by_prefill(driver: GpuDriver, tokens: tuple[int, ...]) -> Tensor:
    """Logits [T, V]: the whole sequence as one chunk, sampled from at a few rows at a time."""
    chunk = PrefillChunk(1, 1, 0, tokens, False, None)
    parts = []
    for first in range(0, len(tokens), ROWS):
        rows = range(first, min(first + ROWS, len(tokens)))
        batch = replace(
            driver.runner._slots.chunk_batch((chunk,)),
            sample_rows=torch.tensor(list(rows), device=DEVICE),
            sampled_chunks=tuple(ChunkSpan(i, i + 1, 1, row) for i, row in enumerate(rows)),
        )
        parts.append(driver._forward(batch).clone())
    return torch.cat(parts)


def by_token(driver: GpuDriver, tokens: tuple[int, ...]) -> Tensor:
    """The same by decode steps."""
    parts = []
    for position, token in enumerate(tokens):
        batch, row = driver.runner._slots.row_batch(6, position, token)
        parts.append(driver._forward(batch)[row].clone())
    return torch.stack(parts)


def ours(folder: Path, tokens: tuple[int, ...], dtype: str) -> Tensor:
    """Logits [T, V], which have the same bits either way."""
    limits = {"num_slots": 8, "max_seq_len": 192, "max_step_tokens": 256}
    driver = GpuDriver(folder, weight_dtype=dtype, **limits)
    logits = by_prefill(driver, tokens)
    assert same_bits(logits, by_token(driver, tokens))
    torch.cuda.synchronize()
    return logits


def test_float32(folder: Path, tokens: tuple[int, ...], reference: Tensor) -> None:
    error = (ours(folder, tokens, "float32") - reference).double()
    scale = reference.double().std()
    rms, worst = (error.square().mean().sqrt() / scale).item(), (error.abs().max() / scale).item()
    print(f"rms {rms:.2e}, worst {worst:.2e} of the logits' deviation {scale:.2f}")
    assert rms <= tolerance("gpu_float32_rms").absolute
    assert worst <= tolerance("gpu_float32_worst").absolute


def test_bfloat16(folder: Path, tokens: tuple[int, ...], reference: Tensor) -> None:
    def distance(logits: Tensor) -> float:
        error = (logits - reference).double().square().mean().sqrt()
        return (error / reference.double().std()).item()

    mine = distance(ours(folder, tokens, "bfloat16"))
    other = distance(theirs(folder, tokens, torch.bfloat16))
    print(f"bfloat16 is {mine:.2e} from float32, that of transformers {other:.2e}")
    assert mine <= tolerance("gpu_bfloat16_ratio").absolute * other
    assert mine <= tolerance("gpu_bfloat16_rms").absolute


def test_float16(folder: Path, tokens: tuple[int, ...], reference: Tensor) -> None:
    """Eight times as fine as bfloat16."""
    error = (ours(folder, tokens, "float16") - reference).double().square().mean().sqrt()
    relative = (error / reference.double().std()).item()
    print(f"float16 is {relative:.2e} from float32")
    assert relative <= tolerance("gpu_float16_rms").absolute
