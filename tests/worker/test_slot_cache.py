"""The slot cache by itself: what a copy and a clearing touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from worker.attention import CacheShape, SlotCache
from worker.cpu_backend import CpuBackend

SHAPE = CacheShape(
    num_layers=2,
    num_slots=4,
    num_rows=3,
    max_seq_len=9,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def cache(request: pytest.FixtureRequest) -> SlotCache:
    cache = SlotCache(SHAPE, torch.device(request.param))
    for seed, tensor in enumerate((*cache.keys, *cache.values)):
        values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        tensor.copy_(values)
    return cache


def tensors(cache: SlotCache) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*cache.keys, *cache.values)]


def copy_prefix(cache: SlotCache, source: int, target: int, length: int) -> None:
    angles = torch.zeros(SHAPE.max_seq_len, SHAPE.head_dim // 2)
    device = cache.memory.device
    if device.type == "cuda":
        from worker.cuda_backend import CudaBackend

        stream = torch.cuda.current_stream()
        ops: Any = CudaBackend(torch.device("cuda", 0), stream, SHAPE.dtype)
    else:
        ops = CpuBackend(1)
    ops.attention(cache, angles, angles, 1e-6, 1.0).copy_prefix(source, target, length)


@pytest.mark.parametrize("length", [0, 1, 5, 9])
def test_a_copied_prefix_is_all_that_changes(cache: SlotCache, length: int) -> None:
    before = tensors(cache)
    copy_prefix(cache, 3, 1, length)
    for old, new in zip(before, tensors(cache), strict=True):
        assert torch.equal(new[1, :length], old[3, :length])
        assert torch.equal(new[1, length:], old[1, length:])
        assert torch.equal(new[[0, 2, 3]], old[[0, 2, 3]])


def test_a_cleared_slot_is_zero_and_the_others_are_not(cache: SlotCache) -> None:
    before = tensors(cache)
    cache.clear(2)
    for old, new in zip(before, tensors(cache), strict=True):
        assert not new[2].any()
        assert torch.equal(new[[0, 1, 3]], old[[0, 1, 3]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("source", "target", "length", "message"),
    [
        (0, 4, 1, r"slots in \[0, 4\), got 4"),
        (-1, 0, 1, r"slots in \[0, 4\), got -1"),
        (2, 2, 1, "two slots, got 2 twice"),
        (0, 1, 10, r"length in \[0, 9\], got 10"),
    ],
)
def test_copies_that_are_refused(source: int, target: int, length: int, message: str) -> None:
    cache = SlotCache(SHAPE, torch.device("cuda", 0))
    with pytest.raises(ValueError, match=message):
        copy_prefix(cache, source, target, length)
