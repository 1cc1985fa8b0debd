"""The arithmetic of the memory plan, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from worker.checkpoint import open_checkpoint
from worker.errors import MemoryPlanError
from worker.memory_plan import (
    CPU_FOOTPRINT,
    Footprint,
    MemoryPlan,
    ServingLimits,
    check_fits,
    largest_fitting,
    plan_memory,
    weight_bytes,
    without_weights,
)
from worker.model_config import ModelConfig, parse_model_config
from worker.sharding import shard_of

SMOLLM2 = parse_model_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
)
LIMITS = ServingLimits(8, 4096, 256, "float32", "float32", 8)


def plan(
    config: ModelConfig = SMOLLM2,
    limits: ServingLimits = LIMITS,
    available: int = 1 << 40,
    world_size: int = 1,
) -> MemoryPlan:
    shard = shard_of(config, 0, world_size)
    return plan_memory(config, shard, limits, 250 << 20, available, 2 << 40)


def test_kv_arithmetic() -> None:
    # 30 layers x (K and V) x 3 heads x 64 x 4 bytes
    assert plan().kv_bytes_per_position == 30 * 2 * 3 * 64 * 4
    assert plan().kv_bytes == 8 * 4096 * 46080
    half = plan(limits=replace(LIMITS, kv_dtype="bfloat16"))
    assert half.kv_bytes * 2 == plan().kv_bytes
    assert plan(world_size=3).kv_bytes * 3 == plan().kv_bytes


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_equal_the_file(tmp_path: Path, family: str, tied: bool) -> None:
    bias = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    folder = make_checkpoint(tmp_path, family, tie_word_embeddings=tied, **bias)
    checkpoint = open_checkpoint(folder)
    stored = sum(t.stored.end - t.stored.begin for t in checkpoint.tensors.values())
    assert weight_bytes(checkpoint.config, shard_of(checkpoint.config, 0, 1), "float32") == stored


def test_refused_with_the_arithmetic() -> None:
    tight = plan(available=1 << 30)
    with pytest.raises(MemoryPlanError) as caught:
        check_fits(tight)
    message = str(caught.value)
    for part in (
        "8 slots x 4096",
        "46,080 bytes",
        "1,440 MiB",
        "1,024 MiB of 2,097,152 MiB",
        "513 MiB",
    ):
        assert part in message
    for slots, length in largest_fitting(tight):
        assert f"{slots} slots x {length}" in message
        fits = replace(LIMITS, num_slots=slots, max_seq_len=length)
        check_fits(plan(limits=fits, available=1 << 30))


def test_largest_fitting_is_largest() -> None:
    (slots, full), (all_slots, length) = largest_fitting(plan(available=1 << 30))
    assert (full, all_slots) == (4096, 8)
    for larger in ((slots + 1, 4096), (8, length + 128)):
        limits = replace(LIMITS, num_slots=larger[0], max_seq_len=larger[1])
        grown = plan(limits=limits, available=1 << 30)
        assert grown.kv_bytes + grown.weight_bytes + plan().workspace_bytes > 1 << 30


def test_weights_alone_too_large() -> None:
    with pytest.raises(MemoryPlanError, match="no number of slots fits"):
        check_fits(plan(available=100 << 20))


def test_loaded_weights_are_not_counted_twice() -> None:
    cold = plan(available=3 << 30)
    resident = plan_memory(
        SMOLLM2,
        shard_of(SMOLLM2, 0, 1),
        LIMITS,
        cold.baseline_bytes + cold.weight_bytes,
        cold.available_bytes - cold.weight_bytes,
        cold.total_bytes,
    )
    warm = without_weights(resident)
    assert warm.predicted_bytes == cold.predicted_bytes
    assert warm.fits == cold.fits


GPU = Footprint(
    row_grid=128,
    row_table=True,
    float32_activations=False,
    attention_tile=128,
    reserve_bytes=0,
    group_bytes=0,
)


def workspace(limits: ServingLimits, footprint: Footprint) -> int:
    shard = shard_of(SMOLLM2, 0, 1)
    return plan_memory(SMOLLM2, shard, limits, 0, 1 << 40, 1 << 40, footprint).workspace_bytes


def test_slots_that_do_not_run_take_their_positions_alone() -> None:
    few, many = replace(LIMITS, max_running=2), replace(LIMITS, num_slots=64, max_running=2)
    for footprint in (CPU_FOOTPRINT, GPU):
        assert workspace(many, footprint) == workspace(few, footprint)
        assert workspace(few, footprint) < workspace(
            replace(LIMITS, max_running=8, max_step_tokens=1024), footprint
        )
    assert plan(limits=many).kv_bytes == 8 * plan(limits=few).kv_bytes


def test_a_gpus_table_of_rows() -> None:
    """Counts and biases of 4 bytes a token, a bit of mask; a copy of the logits is sampled from."""
    vocab, tiles = 49152, 32
    row = 4 * 9 * tiles * 66 + 8 * vocab + 4 * (vocab // 32)
    # 64 rows more on the grid: 128 sampled ones, and those of a forward, are counted the same.
    one, more = replace(LIMITS, max_running=1), replace(LIMITS, max_running=64)
    limits = [replace(limit, max_step_tokens=64) for limit in (one, more)]
    assert workspace(limits[1], GPU) - workspace(limits[0], GPU) == 63 * row
    with_table, without = (workspace(limits[0], replace(GPU, row_table=t)) for t in (True, False))
    assert with_table - without == 8 * vocab + 4 * (vocab // 32) + 128 * 4 * vocab


def test_64_bit_sizes() -> None:
    long = replace(LIMITS, num_slots=64, max_seq_len=8192)
    assert plan(limits=long).kv_bytes == 64 * 8192 * 46080 > 2**34
