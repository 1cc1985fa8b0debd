"""The promise on a GPU: a request has the same bits whatever is beside it, and wherever it is.

Also: idle and poisoned slots, sabotage that must be seen, and commands that overlap.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_driver import DEVICE, VOCAB_SIZE, GpuDriver, in_company, needs_gpus, prompt_of
from worker_driver import by_slot, same_bits, sampling

from checkpoints import make_checkpoint
from worker.batch import PrefillChunk, StepResult

pytestmark = [pytest.mark.gpu, needs_gpus()]

NUM_SLOTS = 8
MAX_LEN = 1536
# family, type, shape. The weights of "library" do not suit the kernel that streams weights. Those
# of "tiles" are so wide that the prompt's rows fill the device with tiles.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-bfloat16": (
        "qwen3",
        "bfloat16",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "qwen2-bfloat16": (
        "qwen2",
        "bfloat16",
        {
            "hidden_size": 896,
            "intermediate_size": 1216,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
        },
    ),
    "llama-float16": (
        "llama",
        "float16",
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "library-bfloat16": (
        "llama",
        "bfloat16",
        {
            "hidden_size": 288,
            "intermediate_size": 496,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 96,
        },
    ),
    "tiles-bfloat16": (
        "qwen3",
        "bfloat16",
        {
            "hidden_size": 512,
            "intermediate_size": 12288,
            "num_attention_heads": 64,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
    ),
    "qwen3-float32": (
        "qwen3",
        "float32",
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
    ),
}
SEEDED: dict[str, Any] = {"temperature": 1.3, "top_p": 0.95, "top_k": 40, "seed": 2**64 - 42}
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": SEEDED}


# Attention works in tiles of 128 positions: the prompt ends in the second, decoding goes on into
# the third.
PROMPT = prompt_of(1, 250)
NUM_NEW = 20
TOTAL = len(PROMPT) + NUM_NEW


@dataclass
class Alone:
    """A request's tokens, and the logits of each by its position."""

    tokens: list[int]
    logits: dict[int, torch.Tensor]


@dataclass
class Rig:
    """A model, a driver of eight slots, and what a rank of one slot answers."""

    folder: Path
    driver: GpuDriver
    alone: dict[str, Alone] = field(default_factory=dict)

    def make(self, **setup: Any) -> GpuDriver:
        """Another driver on the same model."""
        return GpuDriver(self.folder, **setup)


@pytest.fixture(scope="module", params=MODELS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    family, dtype, shape = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    shape = {**shape, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096}
    make_checkpoint(folder, family, seed=5, dtype=dtype, device=DEVICE, **shape)
    lone = GpuDriver(folder, num_slots=1, max_seq_len=288, max_step_tokens=256)
    alone = {}
    for mode, parameters in MODES.items():
        tokens = lone.generate(PROMPT, NUM_NEW, **parameters)
        alone[mode] = Alone(tokens, lone.logits_of(0))
        assert len(tokens) == len(alone[mode].logits) == NUM_NEW
    limits = {"num_slots": NUM_SLOTS, "max_seq_len": MAX_LEN, "max_step_tokens": 2048}
    driver = GpuDriver(folder, **limits)
    assert (driver.info.limits.weight_dtype, driver.info.limits.kv_dtype) == (dtype, dtype)
    return Rig(folder, driver, alone)


@pytest.fixture
def driver(rig: Rig) -> Iterator[GpuDriver]:
    """The rig's, its slots empty afterwards whatever a test put there."""
    rig.driver.enter()
    rig.driver.watched = True
    rig.driver.logits.clear()
    yield rig.driver
    rig.driver.enter()
    for slot in range(NUM_SLOTS):
        rig.driver.decoder.cache.clear(slot)


def assert_same(driver: GpuDriver, slot: int, tokens: list[int], alone: Alone) -> None:
    """The slot's tenant gave the tokens, and the bits of all logits."""
    assert tokens == alone.tokens
    logits = driver.logits_of(slot)
    assert logits.keys() == alone.logits.keys()
    for position, row in alone.logits.items():
        assert same_bits(logits[position], row), f"logits differ at position {position}"


def test_the_self_test_passes(rig: Rig) -> None:
    assert len(rig.driver.info.self_tests) == 4
    for result in rig.driver.info.self_tests:
        assert result.passed, result


def test_the_answers_are_not_trivial(rig: Rig) -> None:
    greedy, seeded = (rig.alone[mode] for mode in MODES)
    assert greedy.tokens != seeded.tokens
    assert len(set(seeded.tokens)) > 4
    assert all(row.std() > 0.3 for row in greedy.logits.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slot", range(NUM_SLOTS))
def test_every_slot(rig: Rig, driver: GpuDriver, mode: str, slot: int) -> None:
    tokens = driver.generate(PROMPT, NUM_NEW, slot, **MODES[mode])
    assert_same(driver, slot, tokens, rig.alone[mode])


@pytest.mark.parametrize("size", [1, 16, 17, 37, 128, 200])
def test_every_chunk_size(rig: Rig, driver: GpuDriver, size: int) -> None:
    cuts = tuple(range(size, len(PROMPT), size))
    tokens = driver.generate(PROMPT, NUM_NEW, 3, cuts=cuts, num_steps=3)
    assert_same(driver, 3, tokens, rig.alone["greedy"])


@pytest.mark.parametrize("num_steps", [1, 8, 32])
@pytest.mark.parametrize("mode", MODES)
def test_the_graph_gives_what_the_kernels_give(
    rig: Rig, driver: GpuDriver, mode: str, num_steps: int
) -> None:
    """Of commands of one step the logits too."""
    driver.watched = False
    tokens = driver.generate(PROMPT, NUM_NEW, 5, num_steps=num_steps, **MODES[mode])
    if num_steps == 1:
        assert_same(driver, 5, tokens, rig.alone[mode])
    assert tokens == rig.alone[mode].tokens


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("neighbours", [1, 2, 5, 7])
def test_joining_and_leaving_neighbours(
    rig: Rig, driver: GpuDriver, mode: str, neighbours: int
) -> None:
    """B19, B20."""
    for ours in {0, neighbours // 2, neighbours}:
        tokens = in_company(driver, ours, neighbours, PROMPT, NUM_NEW, MODES[mode])
        assert_same(driver, ours, tokens, rig.alone[mode])


@pytest.mark.parametrize("cuts", [(117,), (1, 17, 145), (128, 200)])
def test_chunks_in_company(rig: Rig, driver: GpuDriver, cuts: tuple[int, ...]) -> None:
    for mode, parameters in MODES.items():
        tokens = in_company(driver, 4, 7, PROMPT, NUM_NEW, parameters, cuts)
        assert_same(driver, 4, tokens, rig.alone[mode])


@pytest.mark.parametrize("num_steps", [1, 8])
def test_the_graph_in_company(rig: Rig, driver: GpuDriver, num_steps: int) -> None:
    driver.watched = False
    for mode, parameters in MODES.items():
        for neighbours in (1, 7):
            tokens = in_company(
                driver, 1, neighbours, PROMPT, NUM_NEW, parameters, (130,), num_steps
            )
            assert tokens == rig.alone[mode].tokens
            if num_steps == 1:
                assert_same(driver, 1, tokens, rig.alone[mode])


def test_prefill_writes_what_decode_writes(driver: GpuDriver) -> None:
    """A dead worker's state can be rebuilt: prefill of prompt + tokens gives the same K and V."""
    tokens = driver.generate(PROMPT, NUM_NEW, 0, **SEEDED)
    whole = (*PROMPT, *tokens[:-1])
    driver.run(driver.first_chunk(5, whole, sampling(MAX_LEN, **SEEDED)))
    for tensor in (*driver.decoder.cache.keys, *driver.decoder.cache.values):
        left, right = tensor[0, : len(whole)].float(), tensor[5, : len(whole)].float()
        assert left.any()
        assert same_bits(left, right)
    resumed = driver.logits_of(5)[len(whole)]
    assert same_bits(resumed, driver.logits_of(0)[len(whole)])


def test_continues_with_the_same_tokens_after_a_rebuild(rig: Rig, driver: GpuDriver) -> None:
    for mode, parameters in MODES.items():
        alone = rig.alone[mode]
        for done in (1, 6, NUM_NEW - 1):
            known = (*PROMPT, *alone.tokens[:done])
            assert driver.generate(known, NUM_NEW - done, 2, **parameters) == alone.tokens[done:]
            for position, row in driver.logits_of(2).items():
                assert same_bits(row, alone.logits[position])


def test_prompts_of_border_lengths(driver: GpuDriver) -> None:
    """B20: alone, eight at a time in random order, and again; around the borders of tiles."""
    lengths = [1, 2, 15, 16, 17, 31, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257]
    prompts = [prompt_of(length, length) for length in lengths]

    def logits_of(slots: list[int]) -> list[list[torch.Tensor]]:
        return [list(driver.logits_of(slot).values()) for slot in slots]

    expected = []
    for prompt in prompts:
        driver.generate(prompt, 4)
        expected += logits_of([0])
    order = list(range(len(prompts)))
    for seed in (1, 2):
        random.Random(seed).shuffle(order)
        for first in range(0, len(order), NUM_SLOTS):
            group = order[first : first + NUM_SLOTS]
            driver.run(
                *(
                    driver.first_chunk(slot, prompts[index], sampling(lengths[index] + 4))
                    for slot, index in enumerate(group)
                )
            )
            driver.run(*(driver.decode(slot) for slot in range(NUM_SLOTS)), num_steps=5)
            for got, index in zip(logits_of(list(range(NUM_SLOTS))), group, strict=True):
                assert len(got) == len(expected[index]) == 4
                assert all(map(same_bits, got, expected[index])), lengths[index]


@pytest.mark.parametrize(
    "limits",
    [
        {"num_slots": 8, "max_step_tokens": 16},
        {"num_slots": 8, "max_step_tokens": 64},
        {"num_slots": 8, "max_step_tokens": 65},
        {"num_slots": 20, "max_step_tokens": 3072},
    ],
    ids=["16 rows", "64 rows", "65 rows", "20 slots"],
)
def test_other_limits(rig: Rig, limits: dict[str, int]) -> None:
    """16, 64 and more rows go to other kernels: of the prompt, of decode steps, of both."""
    driver = rig.make(max_seq_len=320, **limits)
    most, last = limits["max_step_tokens"], limits["num_slots"] - 1
    cuts = tuple(range(most, len(PROMPT), most))
    for mode, parameters in MODES.items():
        for slot in (0, last):
            tokens = driver.generate(PROMPT, NUM_NEW, slot, cuts=cuts, num_steps=7, **parameters)
            assert_same(driver, slot, tokens, rig.alone[mode])
    driver.watched = False
    assert driver.generate(PROMPT, NUM_NEW, last, cuts=cuts) == rig.alone["greedy"].tokens
    if most > len(PROMPT):
        driver.watched = True
        tokens = in_company(driver, 9, last, PROMPT, NUM_NEW, SEEDED, (40, 41))
        assert_same(driver, 9, tokens, rig.alone["seeded"])


# Kernels of other GPUs.


def test_the_kernels_of_every_gpu_give_the_same_bits(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper: those that older GPUs and newer ones take, products by the library."""
    from worker import cuda_device  # a build without CUDA cannot

    class PortableBackend(cuda_device.CudaBackend):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, portable=True)

    monkeypatch.setattr(cuda_device, "CudaBackend", PortableBackend)
    other = rig.make(num_slots=3, max_seq_len=MAX_LEN, max_step_tokens=256)
    for mode, parameters in MODES.items():
        tokens = other.generate(PROMPT, NUM_NEW, 1, cuts=(100,), **parameters)
        assert_same(other, 1, tokens, rig.alone[mode])


def test_the_prompt_is_multiplied_by_tiles_where_it_should(rig: Rig) -> None:
    ops, layer = rig.driver.decoder.ops, rig.driver.decoder.weights.layers[0]
    wide = rig.folder.name.startswith("tiles")
    for weight in (layer.qkv, layer.gate_up):
        assert ops.linear_fills(ops.num_rows(len(PROMPT)), weight.matrix) == wide


# What nobody may read, poisoned.


def test_poison_in_idle_slots_and_past_the_length(rig: Rig, driver: GpuDriver) -> None:
    for mode, parameters in MODES.items():
        for slot in (0, 6):
            for tensor in (*driver.decoder.cache.keys, *driver.decoder.cache.values):
                tensor.fill_(float("nan"))
            tokens = driver.generate(PROMPT, NUM_NEW, slot, cuts=(100,), **parameters)
            assert_same(driver, slot, tokens, rig.alone[mode])


def test_poison_in_the_workspace(rig: Rig, driver: GpuDriver) -> None:
    """Rows that pad a forward, and what the forward before left."""
    decoder = driver.decoder
    spaces = (decoder._workspace, decoder._sampled_space)
    tensors = [getattr(space, name) for space in spaces for name in space.__slots__]
    tensors += [decoder._logits, decoder.attention._states]
    setup = sampling(TOTAL, **SEEDED)
    tokens: list[int] = []
    row: Any = driver.first_chunk(2, PROMPT, setup)
    while len(tokens) < NUM_NEW:
        for tensor in tensors:
            tensor.fill_(float("nan"))
        tokens += driver.run(row).rows[0].token_ids
        row = driver.decode(2)
    assert_same(driver, 2, tokens, rig.alone["seeded"])


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_nan_in_one_slot_harms_nobody_else(
    rig: Rig, driver: GpuDriver, where: str, watched: bool
) -> None:
    """B26: that request ends corrupted, by no token; the next tenant of the slot is well."""
    driver.watched = watched
    rows = (
        driver.first_chunk(0, prompt_of(2, 200), sampling(MAX_LEN)),
        driver.first_chunk(1, PROMPT, sampling(TOTAL, **SEEDED)),
        driver.first_chunk(7, prompt_of(3, 20), sampling(MAX_LEN)),
    )
    tokens = list(by_slot(driver.run(*rows))[1].token_ids)
    getattr(driver.decoder.cache, where)[0][0, 3] = float("nan")
    bad, good, other = driver.run(*map(driver.decode, (0, 1, 7)), num_steps=3).rows
    assert (bad.token_ids, bad.corrupted) == ((), True)
    assert (len(other.token_ids), other.corrupted, good.corrupted) == (3, False, False)
    tokens += good.token_ids
    after = by_slot(driver.run(*map(driver.decode, (0, 1, 7)), num_steps=32))
    assert (after[0].token_ids, after[0].corrupted) == ((), False)
    tokens += after[1].token_ids
    assert tokens == rig.alone["seeded"].tokens
    if watched:
        assert_same(driver, 1, tokens, rig.alone["seeded"])
        again = driver.generate(PROMPT, NUM_NEW, 0)
        assert_same(driver, 0, again, rig.alone["greedy"])


def test_nan_in_a_prompt(rig: Rig, driver: GpuDriver) -> None:
    """Decode rows that were planned before this was known are skipped."""
    driver.run(driver.first_chunk(0, PROMPT[:100], sampling(TOTAL), sample=False))
    driver.decoder.cache.keys[1][0, 50] = float("nan")
    ours = driver.first_chunk(3, PROMPT, sampling(TOTAL))
    bad, good = driver.run(driver.chunk(0, 100, PROMPT[100:]), ours).rows
    assert (bad.token_ids, bad.corrupted) == ((), True)
    first = list(good.token_ids)
    skipped, good = driver.run(driver.decode(0), driver.decode(3), num_steps=32).rows
    assert (skipped.token_ids, skipped.corrupted) == ((), False)
    assert_same(driver, 3, first + list(good.token_ids), rig.alone["greedy"])


# Faults that the comparison must see.


def swapped_slots(slots: Any, patch: pytest.MonkeyPatch) -> None:
    batch = slots._batch

    def swapped(num_decode: int, chunks: tuple[PrefillChunk, ...]) -> Any:
        others = tuple(replace(chunk, slot=chunk.slot ^ 1) for chunk in chunks)
        return batch(num_decode, others)

    patch.setattr(slots, "_batch", swapped)


def position_off_by_one(slots: Any, patch: pytest.MonkeyPatch) -> None:
    patch_arrival(slots, patch, lambda length, before: length + 1)


def stale_length(slots: Any, patch: pytest.MonkeyPatch) -> None:
    patch_arrival(slots, patch, lambda length, before: before)


def patch_arrival(slots: Any, patch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    arrive = slots.arrive

    def arriving(lengths: dict[int, int]) -> torch.Tensor:
        length = slots._ints["length"]
        before = length.clone()
        arrived: torch.Tensor = arrive(lengths)
        changed = change(length.clone(), before)
        for row in lengths:
            length[row] = changed[row]
        return arrived

    patch.setattr(slots, "arrive", arriving)


def stale_schedule(slots: Any, patch: pytest.MonkeyPatch) -> None:
    """The command's slots stay those of the one before."""
    patch.setattr(slots, "schedule", lambda _: None)


def tokens_of_a_neighbour(slots: Any, patch: pytest.MonkeyPatch) -> None:
    schedule = slots.schedule

    def scheduled(wanted: dict[int, bool]) -> None:
        schedule(wanted)
        slots._ints["row_token"].copy_(slots._ints["row_token"].flip(0).clamp(min=0))

    patch.setattr(slots, "schedule", scheduled)


def stale_seed(slots: Any, patch: pytest.MonkeyPatch) -> None:
    take = slots.take
    patch.setattr(slots, "take", lambda slot, setup: take(slot, replace(setup, seed=7)))


FAULTS = (
    swapped_slots,
    position_off_by_one,
    stale_length,
    stale_schedule,
    tokens_of_a_neighbour,
    stale_seed,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(
    rig: Rig, driver: GpuDriver, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    """Red where the slot table is wrong; green again without the fault."""
    slots = driver.runner._slots
    driver.run(driver.first_chunk(3, prompt_of(4, 280), sampling(MAX_LEN)))
    driver.run(driver.decode(3))
    with monkeypatch.context() as patch:
        fault(slots, patch)
        tokens = driver.generate(PROMPT, NUM_NEW, 2, **SEEDED)
        with pytest.raises(AssertionError):
            assert_same(driver, 2, tokens, rig.alone["seeded"])
    tokens = driver.generate(PROMPT, NUM_NEW, 2, **SEEDED)
    assert_same(driver, 2, tokens, rig.alone["seeded"])


# Commands.


def tokens_of(results: list[StepResult], slot: int) -> list[int]:
    return [token for result in results for token in by_slot(result)[slot].token_ids]


def test_commands_overlap(rig: Rig, driver: GpuDriver) -> None:
    """All of them are put on the stream before any is waited for."""
    driver.watched = False
    ours = driver.first_chunk(1, PROMPT, sampling(TOTAL, **SEEDED))
    submitted = [driver.submit(ours, driver.first_chunk(0, prompt_of(5, 30), sampling(90)))]
    submitted.append(driver.submit(driver.decode(0), driver.decode(1), num_steps=5))
    late = driver.first_chunk(6, prompt_of(6, 129), sampling(MAX_LEN))
    submitted.append(driver.submit(driver.decode(1), driver.decode(0), late))
    both = (driver.decode(1), driver.decode(6), driver.decode(0))
    submitted += [driver.submit(*both, num_steps=4) for _ in range(4)]
    results = [driver.executor.collect(one) for one in submitted]
    assert tokens_of(results, 1) == rig.alone["seeded"].tokens
    assert [len(result.rows[0].token_ids) for result in results[2:]] == [1, 4, 4, 4, 1]
    for slot, prompt in ((0, prompt_of(5, 30)), (6, prompt_of(6, 129))):
        mine = [result for result in results if slot in by_slot(result)]
        tokens = tokens_of(mine, slot)
        assert tokens == driver.generate(prompt, len(tokens), 4)


def test_a_slot_is_taken_before_its_last_results_are_collected(rig: Rig, driver: GpuDriver) -> None:
    driver.watched = False
    old = sampling(TOTAL, **SEEDED)
    submitted = [driver.submit(driver.first_chunk(2, PROMPT, old))]
    submitted.append(driver.submit(driver.decode(2), num_steps=9))
    submitted.append(
        driver.submit(driver.first_chunk(2, PROMPT[:77], sampling(TOTAL), sample=False))
    )
    submitted.append(driver.submit(driver.chunk(2, 77, PROMPT[77:])))
    submitted.append(driver.submit(driver.decode(2), num_steps=32))
    results = [driver.executor.collect(one) for one in submitted]
    assert [result.rows[0].generation for result in results][1:3] == [
        driver.generations[2] - 1,
        driver.generations[2],
    ]
    assert tokens_of(results[:2], 2) == rig.alone["seeded"].tokens[:10]
    assert tokens_of(results[2:], 2) == rig.alone["greedy"].tokens


def test_the_ring_comes_round(driver: GpuDriver) -> None:
    """In the middle of a command too: the host's count and the device's are set before its end."""
    driver.watched = False
    slots, count = driver.runner._slots, 300
    by_length = []
    for slot, num_steps, left in ((0, 32, 100), (3, 27, 7), (1, 1, 150)):
        slots._next_row = len(slots.ring) - left
        slots._counter.fill_(slots._next_row)
        by_length.append(
            driver.generate((5, 6, 7), count, slot, num_steps=num_steps, temperature=1.0, seed=9)
        )
        assert slots._next_row < len(slots.ring) // 2, "it has not come round"
    assert len(by_length[0]) == count
    assert by_length[0] == by_length[1] == by_length[2]
    assert len(set(by_length[0])) > 16


@pytest.mark.parametrize("watched", [True, False])
def test_exact_lengths(driver: GpuDriver, watched: bool) -> None:
    """B15: the token sampled by the prompt is the first of the budget."""
    driver.watched = watched
    for num_new in (1, 2, 3, 16):
        for num_steps in (1, 8):
            assert len(driver.generate((9, 8, 7), num_new, num_steps=num_steps)) == num_new


def test_end_ids_stop_at_the_first_token_and_later(rig: Rig, driver: GpuDriver) -> None:
    """Within a command too; ids beyond the vocabulary are never drawn."""
    driver.watched = False
    free = rig.alone["seeded"].tokens
    beyond = (VOCAB_SIZE, VOCAB_SIZE + 31, 2**31, 2**32 - 1)
    assert driver.generate(PROMPT, NUM_NEW, 1, num_steps=8, end=beyond, **SEEDED) == free
    for index in (0, 4, NUM_NEW - 1):
        end = (1, free[index], *beyond)
        stop = free.index(free[index]) + 1
        for num_steps in (1, 32):
            tokens = driver.generate(PROMPT, NUM_NEW, 1, num_steps=num_steps, end=end, **SEEDED)
            assert tokens == free[:stop]
    assert driver.generate(PROMPT, NUM_NEW, 1, num_steps=32, **SEEDED) == free


def test_stopped_rows_are_skipped_beside_running_ones(driver: GpuDriver) -> None:
    driver.watched = False
    driver.run(
        driver.first_chunk(0, PROMPT, sampling(len(PROMPT) + 2)),
        driver.first_chunk(1, PROMPT, sampling(len(PROMPT) + 9)),
    )
    result = driver.run(driver.decode(0), driver.decode(1), num_steps=4)
    assert [len(row.token_ids) for row in result.rows] == [1, 4]
    result = driver.run(driver.decode(0), driver.decode(1), num_steps=2)
    assert [len(row.token_ids) for row in result.rows] == [0, 2]
    assert driver.run(driver.decode(0)).rows[0].token_ids == ()


# B23: every border value has a meaning, and harms nobody beside it.
BORDERS = [
    {"temperature": t, "top_p": p, "top_k": k, "min_p": m, "seed": 2**64 - 1}
    for t in (0.0, 1e-30, 1e-7, 2.0, 3e38)
    for p in (0.0, 1e-6, 1.0)
    for k in (0, 1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**32 - 1)
    for m in (0.0, 1.0)
]


def test_sampler_borders_in_company(rig: Rig, driver: GpuDriver) -> None:
    greedy = rig.alone["greedy"].tokens[0]
    for begin in range(0, len(BORDERS), NUM_SLOTS - 1):
        borders = BORDERS[begin : begin + NUM_SLOTS - 1]
        rows = [
            driver.first_chunk(slot, PROMPT, sampling(MAX_LEN, **border))
            for slot, border in enumerate(borders, start=1)
        ]
        ours = driver.first_chunk(0, PROMPT, sampling(TOTAL, **SEEDED))
        results = []
        for chunk in (ours, *rows):
            results.append(driver.run(chunk))
            assert not results[-1].rows[0].corrupted
        for border, result in zip(borders, results[1:], strict=True):
            single = (
                border["temperature"] <= 1e-7
                or border["top_p"] < 1e-3
                or border["top_k"] == 1
                or border["min_p"] == 1
            )
            assert not single or result.rows[0].token_ids == (greedy,), border
        decoded = driver.run(*map(driver.decode, range(len(borders) + 1)))
        assert not any(row.corrupted or len(row.token_ids) != 1 for row in decoded.rows)
        drawn = [results[0].rows[0].token_ids[0], decoded.rows[0].token_ids[0]]
        assert drawn == rig.alone["seeded"].tokens[:2]
