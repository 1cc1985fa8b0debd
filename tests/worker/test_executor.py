"""The promise (same request, same bits), stopping, corrupted rows, borders of sampling."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from worker_driver import Driver, by_slot, same_bits, sampling

from checkpoints import VOCAB_SIZE, make_checkpoint
from worker.batch import StepCommand
from worker.errors import ProtocolError, StepError

NUM_SLOTS = 8
MAX_LEN = 96
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 42}
MODES = {"greedy": {}, "seeded": SEEDED}


@pytest.fixture(scope="module", params=["llama", "qwen3-bfloat16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, _, dtype = request.param.partition("-")
    directory = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(directory, family, seed=5, dtype=dtype or "float32")


@pytest.fixture
def driver(folder: Path) -> Driver:
    return Driver(folder, num_slots=NUM_SLOTS, max_seq_len=MAX_LEN, max_step_tokens=256)


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, VOCAB_SIZE), k=length))


PROMPT = prompt_of(1, 37)
NUM_NEW = 12


def alone(folder: Path, mode: str) -> tuple[list[int], dict[int, torch.Tensor]]:
    driver = Driver(folder, num_slots=1, max_seq_len=64, max_step_tokens=64)
    return driver.generate(PROMPT, NUM_NEW, **MODES[mode]), driver.logits_of(0)


def assert_same(
    driver: Driver, slot: int, tokens: list[int], expected: tuple[list[int], dict[int, Any]]
) -> None:
    assert tokens == expected[0]
    logits = driver.logits_of(slot)
    assert logits.keys() == expected[1].keys()
    for position, row in expected[1].items():
        assert same_bits(logits[position], row), f"logits differ at position {position}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slot", range(NUM_SLOTS))
def test_every_slot(folder: Path, driver: Driver, mode: str, slot: int) -> None:
    assert_same(
        driver, slot, driver.generate(PROMPT, NUM_NEW, slot, **MODES[mode]), alone(folder, mode)
    )


@pytest.mark.parametrize("cuts", [(1,), (36,), (16,), (5, 11, 12, 30), tuple(range(1, 37))])
def test_every_chunking(folder: Path, driver: Driver, cuts: tuple[int, ...]) -> None:
    tokens = driver.generate(PROMPT, NUM_NEW, 3, cuts=cuts, num_steps=3)
    assert_same(driver, 3, tokens, alone(folder, "greedy"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("neighbours", [1, 2, 5, 7])
def test_joining_and_leaving_neighbours(
    folder: Path, driver: Driver, mode: str, neighbours: int
) -> None:
    """Neighbours of random lengths come and go, their prompts in chunks beside our decode rows."""
    rng = random.Random(neighbours)
    ours = neighbours // 2
    setup = sampling(len(PROMPT) + NUM_NEW, **MODES[mode])
    tokens = list(driver.run(driver.first_chunk(ours, PROMPT, setup)).rows[0].token_ids)
    others = [slot for slot in range(neighbours + 1) if slot != ours]
    left: dict[int, int] = {}
    while True:
        rows: list[Any] = [driver.decode(slot) for slot in (ours, *left) if left.get(slot, 1)]
        rng.shuffle(rows)
        arriving = [slot for slot in others if slot not in left and rng.random() < 0.4]
        for slot in arriving:
            prompt = prompt_of(rng.random().__hash__(), rng.randrange(1, 30))
            left[slot] = rng.randrange(1, 8)
            noise = sampling(MAX_LEN, temperature=1.5, seed=rng.getrandbits(64))
            rows.append(driver.first_chunk(slot, prompt, noise))
        result = by_slot(driver.run(*rows))
        for slot in list(left):
            left[slot] -= 1
            if left[slot] <= 0:
                del left[slot]
        if not result[ours].token_ids:
            break
        tokens += result[ours].token_ids
    assert_same(driver, ours, tokens, alone(folder, mode))


def test_prefill_writes_what_decode_writes(driver: Driver) -> None:
    """A dead worker's state can be rebuilt: prefill of prompt + tokens gives the same K and V."""
    tokens = driver.generate(PROMPT, NUM_NEW, 0, **SEEDED)
    whole = (*PROMPT, *tokens[:-1])
    driver.run(driver.first_chunk(5, whole, sampling(MAX_LEN, **SEEDED)))
    for tensor in (*driver.decoder.cache.keys, *driver.decoder.cache.values):
        left, right = tensor[0, : len(whole)].float(), tensor[5, : len(whole)].float()
        assert same_bits(left, right)
    resumed = driver.logits_of(5)[len(whole)]
    assert same_bits(resumed, driver.logits_of(0)[len(whole)])


def test_continues_with_the_same_tokens_after_a_rebuild(driver: Driver) -> None:
    tokens = driver.generate(PROMPT, NUM_NEW, 0, **SEEDED)
    for done in (1, 5, NUM_NEW - 1):
        rest = driver.generate((*PROMPT, *tokens[:done]), NUM_NEW - done, 2, **SEEDED)
        assert rest == tokens[done:]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_steps", [1, 4, 32])
def test_threads_and_steps_per_command(folder: Path, num_threads: int, num_steps: int) -> None:
    driver = Driver(folder, num_threads, max_seq_len=64)
    tokens = driver.generate(PROMPT, NUM_NEW, 1, num_steps=num_steps, **SEEDED)
    assert_same(driver, 1, tokens, alone(folder, "seeded"))


@pytest.mark.parametrize("num_new", [1, 2, 3, 16])
@pytest.mark.parametrize("num_steps", [1, 8])
def test_exact_lengths(driver: Driver, num_new: int, num_steps: int) -> None:
    """B15: the token sampled by the prompt is the first of the budget."""
    assert len(driver.generate(PROMPT, num_new, num_steps=num_steps)) == num_new


def test_end_ids_stop_at_the_first_token_and_later(driver: Driver) -> None:
    free = driver.generate(PROMPT, NUM_NEW)
    for index in (0, 4):
        end = (free[index],)
        stop = free.index(end[0]) + 1
        for num_steps in (1, 16):
            tokens = driver.generate(PROMPT, NUM_NEW, end=(1, *end), num_steps=num_steps)
            assert tokens == free[:stop]


def test_stopped_rows_are_skipped_beside_running_ones(driver: Driver) -> None:
    """Run-ahead: rows planned before their stop was known."""
    driver.run(
        driver.first_chunk(0, PROMPT, sampling(len(PROMPT) + 2)),
        driver.first_chunk(1, PROMPT, sampling(len(PROMPT) + 9)),
    )
    result = driver.run(driver.decode(0), driver.decode(1), num_steps=4)
    assert [len(row.token_ids) for row in result.rows] == [1, 4]
    result = driver.run(driver.decode(0), driver.decode(1), num_steps=2)
    assert [len(row.token_ids) for row in result.rows] == [0, 2]
    assert driver.run(driver.decode(0)).rows[0].token_ids == ()


def test_a_slot_forgets_its_tenant(folder: Path, driver: Driver) -> None:
    # The old tenant would stop at, and be shorter than, what the new one generates.
    ends = tuple(alone(folder, "greedy")[0][1:4])
    driver.generate(prompt_of(9, 30), 10, 3, temperature=1.0, seed=7, end=ends)
    driver.run(driver.first_chunk(3, prompt_of(8, 5), sampling(MAX_LEN), sample=False))
    assert_same(driver, 3, driver.generate(PROMPT, NUM_NEW, 3), alone(folder, "greedy"))


@pytest.mark.parametrize("where", ["keys", "values"])
def test_nan_in_one_slot_harms_nobody_else(folder: Path, driver: Driver, where: str) -> None:
    setup = sampling(len(PROMPT) + NUM_NEW, **SEEDED)
    tokens = list(
        by_slot(
            driver.run(
                driver.first_chunk(0, prompt_of(2, 20), sampling(MAX_LEN)),
                driver.first_chunk(1, PROMPT, setup),
            )
        )[1].token_ids
    )
    getattr(driver.decoder.cache, where)[0][0, 3] = float("nan")
    bad, good = driver.run(driver.decode(0), driver.decode(1), num_steps=3).rows
    assert bad.corrupted
    assert bad.token_ids == ()
    assert not good.corrupted
    tokens += good.token_ids
    after = by_slot(driver.run(driver.decode(0), driver.decode(1), num_steps=32))
    assert after[0].token_ids == ()
    assert not after[0].corrupted
    assert_same(driver, 1, tokens + list(after[1].token_ids), alone(folder, "seeded"))
    assert_same(driver, 0, driver.generate(PROMPT, NUM_NEW, 0), alone(folder, "greedy"))


@pytest.mark.parametrize("cuts", [(), (5,), tuple(range(1, 37))])
def test_what_is_left_in_a_slot_is_not_read(
    folder: Path, driver: Driver, cuts: tuple[int, ...]
) -> None:
    """Nothing is cleared for a new tenant: a NaN past its position must not reach it."""
    for tensor in (*driver.decoder.cache.keys, *driver.decoder.cache.values):
        tensor.fill_(float("nan"))
    tokens = driver.generate(PROMPT, NUM_NEW, 2, cuts=cuts, num_steps=3)
    assert_same(driver, 2, tokens, alone(folder, "greedy"))


def test_corrupted_prompt_is_skipped_by_planned_decode_rows(driver: Driver) -> None:
    forward = driver.decoder.forward
    driver.decoder.forward = lambda batch: forward(batch).fill_(float("nan"))  # type: ignore
    row = driver.run(driver.first_chunk(0, PROMPT, sampling(MAX_LEN))).rows[0]
    assert row.corrupted
    assert row.token_ids == ()
    row = driver.run(driver.decode(0)).rows[0]
    assert (row.token_ids, row.corrupted) == ((), False)


# B23: every border value has a meaning, and harms nobody beside it.
BORDERS = [
    {"temperature": t, "top_p": p, "top_k": k, "min_p": m, "seed": 2**64 - 1}
    for t in (0.0, 1e-30, 1e-7, 1e-4, 2.0, 3e38)
    for p in (0.0, 1e-6, 1.0)
    for k in (0, 1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**32 - 1)
    for m in (0.0, 1.0)
]


def test_sampler_borders_in_company(folder: Path, driver: Driver) -> None:
    expected = alone(folder, "seeded")
    greedy = alone(folder, "greedy")[0][0]
    for begin in range(0, len(BORDERS), 5):
        borders = BORDERS[begin : begin + 5]
        setup = sampling(len(PROMPT) + NUM_NEW, **SEEDED)
        rows = [
            driver.first_chunk(slot, PROMPT, sampling(MAX_LEN, **border))
            for slot, border in enumerate(borders, start=1)
        ]
        result = driver.run(driver.first_chunk(0, PROMPT, setup), *rows)
        assert not any(row.corrupted for row in result.rows)
        for border, row in zip(borders, result.rows[1:], strict=True):
            single = (
                border["temperature"] <= 1e-7
                or border["top_p"] < 1e-3
                or border["top_k"] == 1
                or border["min_p"] == 1
            )
            assert not single or row.token_ids == (greedy,), border
        assert list(result.rows[0].token_ids) == expected[0][:1]
        decoded = driver.run(*(driver.decode(slot) for slot in range(len(borders) + 1)))
        assert list(decoded.rows[0].token_ids) == expected[0][1:2]


def test_seeds_and_positions_matter(driver: Driver) -> None:
    draws = {
        tuple(driver.generate(PROMPT, 8, temperature=1.5, seed=seed))
        for seed in (0, 1, 2**63, 2**64 - 1)
    }
    assert len(draws) == 4
    flat = driver.generate((5,), 40, temperature=1e6, seed=3)
    assert len(set(flat)) > 25, "draws at different positions must differ"


def test_digest_covers_step_slot_generation_position_and_token(
    driver: Driver, folder: Path
) -> None:
    def digests(slot: int, length: int, generation: int) -> tuple[int, ...]:
        fresh = Driver(folder, num_slots=2, max_seq_len=64)
        fresh.generations[slot] = generation
        prompt = fresh.first_chunk(slot, PROMPT[:length], sampling(60))
        return (fresh.run(prompt).digest, fresh.run(fresh.decode(slot), num_steps=2).digest)

    base = digests(0, 20, 0)
    assert base == digests(0, 20, 0)
    assert all(digest < 2**64 for digest in base)
    others = [digests(1, 20, 0), digests(0, 21, 0), digests(0, 20, 4)]
    assert len({base, *others}) == 4
    assert base[0] != base[1]


def test_wrong_epoch_and_step_id(driver: Driver, folder: Path) -> None:
    row = driver.first_chunk(0, PROMPT, sampling(MAX_LEN))
    with pytest.raises(ProtocolError, match=r"epoch 2.*epoch 1"):
        driver.executor.run(StepCommand(2, 1, 1, (row,)))
    with pytest.raises(ProtocolError, match="earlier command failed"):
        driver.executor.run(StepCommand(1, 1, 1, (row,)))
    fresh = Driver(folder)
    with pytest.raises(ProtocolError, match="step id 2 does not follow 0"):
        fresh.executor.run(StepCommand(1, 2, 1, (row,)))


def test_failure_within_a_step(driver: Driver) -> None:
    def fail(_: object) -> torch.Tensor:
        raise RuntimeError("connection reset by peer")

    driver.decoder.forward = fail  # type: ignore
    with pytest.raises(StepError, match="step 1 failed: connection reset"):
        driver.run(driver.first_chunk(0, PROMPT, sampling(MAX_LEN)))
    with pytest.raises(ProtocolError, match="earlier command failed"):
        driver.run(driver.first_chunk(0, PROMPT, sampling(MAX_LEN)))


def test_memory_does_not_grow(folder: Path) -> None:
    driver = Driver(folder, num_slots=NUM_SLOTS, max_seq_len=MAX_LEN, max_step_tokens=256)
    rng = random.Random(0)

    def requests(count: int) -> int:
        for _ in range(count):
            prompt = prompt_of(rng.getrandbits(32), rng.randrange(1, 80))
            slot = rng.randrange(NUM_SLOTS)
            driver.run(driver.first_chunk(slot, prompt, sampling(MAX_LEN, **SEEDED)))
            driver.run(driver.decode(slot), num_steps=rng.randrange(1, 6))
            driver.logits.clear()
        return psutil.Process().memory_info().rss

    early = requests(50)
    assert requests(950) < early * 1.03
