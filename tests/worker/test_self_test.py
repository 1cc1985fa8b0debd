"""The self-test passes on the real operators, and sees the faults it is there for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from worker_driver import Driver

from checkpoints import make_checkpoint
from worker.batch import BatchBuffers
from worker.decoder import Decoder
from worker.self_test import PrefixReuse, prefix_reuse, run_self_tests


class Sabotaged:
    """The operators, one of them replaced."""

    def __init__(self, ops: Any, name: str, replacement: Any) -> None:
        self._ops = ops
        setattr(self, name, replacement)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


@pytest.fixture(params=["float32", "bfloat16"])
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    folder = make_checkpoint(tmp_path, "qwen3", dtype=request.param)
    return Driver(folder, num_slots=2, max_step_tokens=32).decoder


def outcome(decoder: Decoder) -> dict[str, bool]:
    return {result.name: result.passed for result in run_self_tests(decoder, BatchBuffers(32))}


def reuse(decoder: Decoder) -> PrefixReuse:
    return prefix_reuse(run_self_tests(decoder, BatchBuffers(32)))


def test_passes_and_leaves_the_slots_zeroed(decoder: Decoder) -> None:
    assert outcome(decoder) == {
        "linear_rows_equal": True,
        "prefill_attention_equals_decode": True,
        "chunks_equal_whole_prefill": True,
        "prefill_kv_equals_decode_kv": True,
    }
    assert reuse(decoder) is PrefixReuse.ALL
    assert not any(t.any() for t in (*decoder.cache.keys, *decoder.cache.values))


def test_one_slot_of_few_positions(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    small = Driver(folder, num_slots=1, max_seq_len=3, max_step_tokens=1)
    assert all(result.passed for result in small.info.self_tests)


def test_sees_a_product_that_depends_on_the_rows(decoder: Decoder) -> None:
    ops = decoder.ops

    def linear(x: torch.Tensor, weight: Any, out: torch.Tensor) -> None:
        ops.linear(x, weight, out)
        if x.shape[0] == 2:
            out.copy_(torch.nextafter(out, torch.full_like(out, 9e9)))

    decoder.ops = Sabotaged(ops, "linear", linear)  # type: ignore[assignment]
    result = run_self_tests(decoder, BatchBuffers(32))[0]
    assert not result.passed
    assert "at 2 rows" in result.detail
    assert "qkv" in result.detail
    assert reuse(decoder) is PrefixReuse.NONE


def test_sees_a_decode_kernel_that_differs(decoder: Decoder) -> None:
    ops = decoder.ops

    def decode_attention(*arguments: Any) -> None:
        ops.decode_attention(*arguments)
        arguments[-1].mul_(1.0000002)

    object.__setattr__(
        decoder.attention, "ops", Sabotaged(ops, "decode_attention", decode_attention)
    )
    decoder.ops = decoder.attention.ops
    assert outcome(decoder) == {
        "linear_rows_equal": True,
        "prefill_attention_equals_decode": False,
        "chunks_equal_whole_prefill": True,
        "prefill_kv_equals_decode_kv": False,
    }
    assert reuse(decoder) is PrefixReuse.PREFILL


def test_sees_a_cache_written_at_a_wrong_position(decoder: Decoder) -> None:
    ops = decoder.ops

    def rope_append(qkv: torch.Tensor, *arguments: Any) -> None:
        arguments = list(arguments)  # type: ignore[assignment]
        if qkv.shape[0] == 1:
            arguments[6] = (arguments[6] - 1).clamp(min=0)  # type: ignore[index]
        ops.rope_append(qkv, *arguments)

    object.__setattr__(decoder.attention, "ops", Sabotaged(ops, "rope_append", rope_append))
    assert outcome(decoder)["prefill_kv_equals_decode_kv"] is False


@pytest.mark.parametrize("start", [3, 12])
def test_sees_a_prefill_kernel_that_depends_on_the_chunk(decoder: Decoder, start: int) -> None:
    """Chunks at one place differ: of the short sequence, or only of the long attention."""
    ops = decoder.ops

    def prefill_attention(*arguments: Any) -> None:
        ops.prefill_attention(*arguments)
        if arguments[4] % 32 == start and arguments[0].shape[0] > 2:
            arguments[-1].mul_(1.01)

    object.__setattr__(
        decoder.attention, "ops", Sabotaged(ops, "prefill_attention", prefill_attention)
    )
    decoder.ops = decoder.attention.ops
    results = {result.name: result for result in run_self_tests(decoder, BatchBuffers(32))}
    assert not results["chunks_equal_whole_prefill"].passed
    assert results["prefill_attention_equals_decode"].passed
    assert results["prefill_kv_equals_decode_kv"].passed
    assert reuse(decoder) is PrefixReuse.NONE
