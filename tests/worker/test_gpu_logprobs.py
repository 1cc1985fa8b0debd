"""Logprobs on a GPU: as the logits say, the same bits in any company, and tokens do not notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_driver import DEVICE, SHAPE, GpuDriver, in_company, needs_gpus, prompt_of
from tolerances import tolerance
from worker_driver import same_bits, sampling

import reference
from checkpoints import make_checkpoint
from worker.batch import TokenLogprobs

pytestmark = [pytest.mark.gpu, needs_gpus()]

PROMPT = prompt_of(1, 250)
NUM_NEW = 20
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"num_logprobs": 20},
    "drawn": {"temperature": 2.0, "seed": 2**63 + 5, "num_logprobs": 3},
    "token alone": {"temperature": 2.0, "seed": 6, "num_logprobs": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return make_checkpoint(directory, "qwen3", seed=5, dtype="bfloat16", device=DEVICE, **SHAPE)


@pytest.fixture(scope="module")
def shared(folder: Path) -> GpuDriver:
    return GpuDriver(folder, num_slots=8, max_seq_len=1536, max_step_tokens=2048)


@pytest.fixture
def driver(shared: GpuDriver) -> Iterator[GpuDriver]:
    shared.watched = True
    shared.logits.clear()
    yield shared
    for slot in range(8):
        shared.decoder.cache.clear(slot)


def told(driver: GpuDriver, slot: int) -> list[TokenLogprobs]:
    """Of the slot's present tenant."""
    return driver.logprobs[slot, driver.generations[slot]]


@pytest.mark.parametrize("mode", MODES)
def test_as_the_logits_say(driver: GpuDriver, mode: str) -> None:
    tokens = driver.generate(PROMPT, NUM_NEW, 3, **MODES[mode])
    allowed, logits = tolerance("logprobs"), driver.logits_of(3)
    assert len(logits) == NUM_NEW
    rows = [logits[position] for position in sorted(logits)]
    for token_id, got, row in zip(tokens, told(driver, 3), rows, strict=True):
        wanted = reference.logprobs(row, token_id, MODES[mode]["num_logprobs"])
        logprob, rank, ids, logprobs = wanted
        assert (got.rank, list(got.best_token_ids)) == (rank, ids)
        assert [got.logprob, *got.best_logprobs] == pytest.approx(
            [logprob, *logprobs], rel=allowed.relative, abs=allowed.absolute
        )
    assert (mode == "greedy") == ({got.rank for got in told(driver, 3)} == {1})


@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_logits_are_the_same_without(driver: GpuDriver, mode: str) -> None:
    parameters = MODES[mode]
    without = driver.generate(PROMPT, NUM_NEW, 2, **{**parameters, "num_logprobs": -1})
    assert told(driver, 2) == []
    bits = driver.logits_of(2)
    assert driver.generate(PROMPT, NUM_NEW, 5, **parameters) == without
    for position, row in driver.logits_of(5).items():
        assert same_bits(row, bits[position])
    driver.watched = False
    for wanted in (parameters["num_logprobs"], -1):
        changed = {**parameters, "num_logprobs": wanted}
        assert driver.generate(PROMPT, NUM_NEW, 1, num_steps=8, **changed) == without


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_in_company(driver: GpuDriver, mode: str, watched: bool) -> None:
    """Kernel by kernel and as a graph; beside tenants that want other numbers or none."""
    tokens = driver.generate(PROMPT, NUM_NEW, **MODES[mode])
    alone = told(driver, 0)
    assert len(alone) == NUM_NEW
    driver.watched = watched
    for ours, neighbours, cuts, num_steps in ((0, 1, (), 1), (4, 7, (1, 130), 1), (2, 5, (), 8)):
        got = in_company(driver, ours, neighbours, PROMPT, NUM_NEW, MODES[mode], cuts, num_steps)
        assert got == tokens
        assert told(driver, ours) == alone


def test_decode_and_the_end_of_a_prompt_say_the_same(driver: GpuDriver) -> None:
    tokens = driver.generate(PROMPT, NUM_NEW, 0, **MODES["drawn"])
    for count in (1, 7):
        whole = (*PROMPT, *tokens[:count])
        driver.run(driver.first_chunk(6, whole, sampling(1536, **MODES["drawn"])))
        assert told(driver, 6) == [told(driver, 0)[count]]
