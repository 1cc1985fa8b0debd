"""Logprobs of the sampled tokens, from the CPU's runner and, on a fake GPU, from the GPU's."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
from tolerances import tolerance
from torch import Tensor
from worker_driver import Driver, sampling

import reference
from checkpoints import VOCAB_SIZE, make_checkpoint
from worker import rank
from worker.batch import RowResult, StepCommand, TokenLogprobs
from worker.device import CpuDevice
from worker.errors import StepError

SLOTS = 4
PROMPTS = [tuple((7 * seat + 31 * i) % VOCAB_SIZE for i in range(9 + seat)) for seat in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return make_checkpoint(directory, "qwen3", hidden_size=384, head_dim=64, seed=3)


class Watched:
    """A rank whose draws are seen: what each slot's tokens were drawn from, and what was told."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **setup: Any) -> None:
        self.driver = Driver(folder, max_seq_len=64, **{"num_slots": SLOTS, **setup})
        self.driver.decoder.forward = self.driver._forward  # type: ignore[method-assign]
        self.drawn_from: dict[int, list[Tensor]] = defaultdict(list)
        self.told: dict[int, list[tuple[int, TokenLogprobs]]] = defaultdict(list)
        runner: Any = self.driver.executor.runner
        self.on_gpu = hasattr(runner, "_slots")
        drawer = runner._ops if self.on_gpu else runner._sampler
        self._sample = drawer.sample
        patch.setattr(drawer, "sample", self._on_gpu if self.on_gpu else self._on_cpu)

    def run(self, *rows: Any, num_steps: int = 1) -> dict[int, RowResult]:
        return self.note(self.driver.executor.collect(self.submit(*rows, num_steps=num_steps)))

    def submit(self, *rows: Any, num_steps: int = 1) -> Any:
        self.driver.step_id += 1
        command = StepCommand(1, self.driver.step_id, num_steps, rows)
        return self.driver.executor.submit(command)

    def note(self, result: Any) -> dict[int, RowResult]:
        for row in result.rows:
            assert len(row.logprobs) in (0, len(row.token_ids))
            self.told[row.slot] += zip(row.token_ids, row.logprobs, strict=False)
        return {row.slot: row for row in result.rows}

    def check(self, slot: int, count: int, begin: int = 0) -> None:
        """All that was told of the slot's tokens from number `begin` on, against the oracle."""
        allowed = tolerance("logprobs")
        assert self.told[slot]
        rows = self.drawn_from[slot][begin:]
        for (token_id, got), logits in zip(self.told[slot], rows, strict=True):
            logprob, rank_, ids, logprobs = reference.logprobs(logits, token_id, count)
            assert (got.rank, list(got.best_token_ids)) == (rank_, ids)
            assert [got.logprob, *got.best_logprobs] == pytest.approx(
                [logprob, *logprobs], rel=allowed.relative, abs=allowed.absolute
            )

    def _on_cpu(self, logits: Tensor, slots: list[int], *others: Any) -> list[int]:
        for row, slot in enumerate(slots):
            self.drawn_from[slot].append(logits[row].clone())
        return list(self._sample(logits, slots, *others))

    def _on_gpu(self, table: Any, logits: Tensor, rows: Tensor | None, workspace: Tensor) -> None:
        before = int(table.counter)
        self._sample(table, logits, rows, workspace)
        # Each slot has the decode row of its own number.
        pairs = enumerate(range(table.num_rows) if rows is None else rows.tolist())
        for row, slot in pairs:
            if table.ring[before % table.ring_rows][slot] != fake_cuda.IDLE:
                self.drawn_from[slot].append(logits[row].clone())


def open_rank(folder: Path, patch: pytest.MonkeyPatch, kind: str, **setup: Any) -> Watched:
    if kind == "gpu":
        fake_cuda.install(patch)
    device = fake_cuda.device() if kind == "gpu" else CpuDevice(1)
    patch.setattr(rank, "open_device", lambda *_: device)
    return Watched(folder, patch, max_step_tokens=48, **setup)


@pytest.fixture(params=["cpu", "gpu"])
def watched(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Watched:
    return open_rank(folder, monkeypatch, request.param)


def test_prompts_and_decode_rows(watched: Watched) -> None:
    """In chunks, in steps with both, in commands of many steps; some slots want none."""
    driver, run = watched.driver, watched.run

    def first(slot: int, count: int, end: int | None = None) -> Any:
        setup = sampling(30, temperature=1.5, seed=slot, num_logprobs=count)
        return driver.first_chunk(slot, PROMPTS[slot][:end], setup, sample=end is None)

    run(first(0, 20))
    run(driver.decode(0), first(1, -1), first(2, 0, end=4))
    run(driver.decode(0), driver.decode(1), driver.chunk(2, 4, PROMPTS[2][4:]), first(3, 3))
    run(*(driver.decode(slot) for slot in (3, 0, 1, 2)), num_steps=6)
    run(driver.decode(1), num_steps=3)
    run(driver.decode(2), driver.decode(1))
    for slot, count in ((0, 20), (2, 0), (3, 3)):
        watched.check(slot, count)
    assert watched.told[1] == []
    assert {token.rank for _, token in watched.told[0]} != {1}
    assert len(watched.told[0]) == 9


def test_tokens_are_the_same_with_and_without(watched: Watched) -> None:
    driver = watched.driver
    generate = driver.generate
    for parameters in ({}, {"temperature": 1.5, "seed": 4}):
        plain = generate(PROMPTS[0], 12, num_steps=3, **parameters)
        assert generate(PROMPTS[0], 12, num_steps=3, num_logprobs=7, **parameters) == plain


def test_more_than_the_vocabulary_has(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make_checkpoint(tmp_path, "qwen3", vocab_size=11)
    kind = "gpu" if watched.on_gpu else "cpu"
    tiny = open_rank(small, monkeypatch, kind)
    tiny.run(tiny.driver.first_chunk(0, (1, 2), sampling(9, num_logprobs=20)))
    tiny.run(tiny.driver.decode(0), num_steps=3)
    tiny.check(0, 11)


def test_a_slots_last_results_are_its_tenants(watched: Watched) -> None:
    """Its next tenant, which wants another number or none, is let in before they are collected."""
    driver = watched.driver
    under_way = []
    for count in (5, 2, -1):
        setup = sampling(40, num_logprobs=count)
        under_way.append(watched.submit(driver.first_chunk(2, PROMPTS[2], setup)))
        under_way.append(watched.submit(driver.decode(2), num_steps=3))
    rows = [driver.executor.collect(submitted).rows[0] for submitted in under_way]
    assert [[len(t.best_token_ids) for t in row.logprobs] for row in rows] == [
        [5],
        [5, 5, 5],
        [2],
        [2, 2, 2],
        [],
        [],
    ]
    assert [t.best_token_ids[:2] for t in rows[1].logprobs] == [
        t.best_token_ids for t in rows[3].logprobs
    ]


def test_a_corrupted_row_has_none(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = watched.driver
    setup = sampling(40, num_logprobs=1)
    watched.run(driver.first_chunk(0, PROMPTS[0], setup), driver.first_chunk(1, PROMPTS[1], setup))
    forward, calls = driver.decoder.forward, []

    def spoilt(batch: Any) -> Tensor:
        logits = forward(batch)
        calls.append(1)
        if len(calls) == 3:
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(driver.decoder, "forward", spoilt)
    rows = watched.run(driver.decode(0), driver.decode(1), num_steps=5)
    assert rows[0].corrupted
    assert len(rows[0].logprobs) == len(rows[0].token_ids) == 2
    assert len(rows[1].logprobs) == len(rows[1].token_ids) == 5
    watched.check(1, 1)


@pytest.fixture
def small_rings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A GPU whose rings hold eight steps, and four of logprobs."""
    open_rank(folder, monkeypatch, "gpu")
    module = sys.modules["worker.cuda_slots"]
    monkeypatch.setattr(module, "RING_ROWS", 8)
    monkeypatch.setattr(module, "_LOGPROBS_BYTES", 4 * 2 * 168)
    return Watched(folder, monkeypatch, num_slots=2)


def test_the_ring_of_logprobs_goes_round(small_rings: Watched) -> None:
    driver = small_rings.driver
    small_rings.run(driver.first_chunk(1, PROMPTS[1], sampling(40, num_logprobs=2)))
    for num_steps in (3, 4, 1, 4, 2):
        small_rings.run(driver.decode(1), num_steps=num_steps)
    small_rings.check(1, 2)


def test_logprobs_that_nobody_has_read_are_not_written_over(small_rings: Watched) -> None:
    driver = small_rings.driver
    setup = sampling(40, num_logprobs=2)
    small_rings.run(driver.first_chunk(0, PROMPTS[0], sampling(40)))
    small_rings.run(driver.first_chunk(1, PROMPTS[1], setup))
    first = small_rings.submit(driver.decode(1), num_steps=2)
    second = small_rings.submit(driver.decode(0), num_steps=5)
    small_rings.note(driver.executor.collect(first))
    small_rings.note(driver.executor.collect(second))
    small_rings.check(1, 2)
    small_rings.submit(driver.decode(1), num_steps=3)
    with pytest.raises(StepError, match=r"2 steps with logprobs after 3 .* not read; at most 4"):
        small_rings.submit(driver.decode(1), num_steps=2)


def test_who_wants_none_pays_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is not launched where no slot of the command wants logprobs."""
    watched = open_rank(folder, monkeypatch, "gpu")
    driver, wants = watched.driver, sampling(40, num_logprobs=0)
    ops: Any = driver.executor.runner._ops  # type: ignore[attr-defined]
    launched: list[int] = []
    logprobs = ops.logprobs
    monkeypatch.setattr(ops, "logprobs", lambda *a: (launched.append(driver.step_id), logprobs(*a)))
    watched.run(driver.first_chunk(0, PROMPTS[0], sampling(40)))
    watched.run(driver.decode(0), driver.first_chunk(1, PROMPTS[1][:3], wants, sample=False))
    watched.run(driver.decode(0), driver.chunk(1, 3, PROMPTS[1][3:]))
    watched.run(driver.decode(0), num_steps=2)
    watched.run(driver.decode(0), driver.decode(1), num_steps=2)
    # Of both halves of a step with chunks; then once a step.
    assert launched == [3, 3, 5, 5]
