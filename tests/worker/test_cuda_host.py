"""The GPU worker's host side (slot table, batches, commands that overlap) on a fake GPU.

The same requests on the CPU worker are the reference: float32, so the tokens are equal.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import pytest
import torch
from worker_driver import Driver, by_slot, free_address, on_ranks, sampling

from checkpoints import VOCAB_SIZE, make_checkpoint
from worker import rank
from worker.batch import RowResult, StepCommand
from worker.device import CpuDevice
from worker.errors import SetupError, StepError
from worker.pipeline import Pipeline
from worker.tensor_parallel import Rendezvous

SLOTS = 4
PROMPTS = [
    tuple((7 * seat + 31 * i) % VOCAB_SIZE for i in range(9 + 5 * seat)) for seat in range(4)
]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "seed": 2**63 + 5},
}


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return make_checkpoint(directory, request.param, hidden_size=384, head_dim=64, seed=3)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Driver:
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(rank, "open_device", lambda *_: fake_cuda.device())
    driver = Driver(folder, num_slots=SLOTS, max_seq_len=64, max_step_tokens=48)
    assert [test.name for test in driver.info.self_tests if not test.passed] == []
    return unwatched(driver)


def unwatched(driver: Driver) -> Driver:
    """Without the driver's notes of logits, which know the rows of the CPU only."""
    driver.decoder.forward = driver._forward  # type: ignore[method-assign]
    return driver


@cache
def on_cpu(folder: Path) -> Driver:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "open_device", lambda *_: CpuDevice(1))
        return Driver(folder, num_slots=1, max_seq_len=64)


def expected(folder: Path, prompt: tuple[int, ...], count: int, **parameters: Any) -> list[int]:
    return on_cpu(folder).generate(prompt, count, **parameters)


@pytest.mark.parametrize("mode", MODES)
def test_every_slot_and_chunking(folder: Path, gpu: Driver, mode: str) -> None:
    wanted = expected(folder, PROMPTS[2], 12, **MODES[mode])
    for slot in range(SLOTS):
        cuts = ((), (1,), (5, 6, 17), tuple(range(1, len(PROMPTS[2]))))[slot]
        tokens = gpu.generate(PROMPTS[2], 12, slot, cuts=cuts, num_steps=slot + 1, **MODES[mode])
        assert tokens == wanted


@pytest.mark.parametrize("mode", MODES)
def test_prompts_join_while_others_decode(folder: Path, gpu: Driver, mode: str) -> None:
    """Decode rows and chunks in one command, a chunk that does not sample among them."""
    counts = [14, 11, 9, 8]
    tokens: dict[int, list[int]] = {slot: [] for slot in range(SLOTS)}

    def run(*rows: Any, num_steps: int = 1) -> None:
        for slot, row in by_slot(gpu.run(*rows, num_steps=num_steps)).items():
            tokens[slot] += row.token_ids

    def first(slot: int, end: int | None = None) -> Any:
        setup = sampling(len(PROMPTS[slot]) + counts[slot], **MODES[mode])
        return gpu.first_chunk(slot, PROMPTS[slot][:end], setup, sample=end is None)

    run(first(0))
    run(gpu.decode(0), first(3), first(1, 4))
    run(gpu.decode(0), gpu.decode(3), gpu.chunk(1, 4, PROMPTS[1][4:]), first(2))
    run(*(gpu.decode(slot) for slot in (3, 1, 0, 2)), num_steps=16)
    for slot, count in enumerate(counts):
        assert tokens[slot] == expected(folder, PROMPTS[slot], count, **MODES[mode]), slot


def test_a_slot_is_taken_anew_before_its_last_results_are_collected(
    folder: Path, gpu: Driver
) -> None:
    def submit(*rows: Any, num_steps: int = 1) -> Any:
        gpu.step_id += 1
        return gpu.executor.submit(StepCommand(1, gpu.step_id, num_steps, rows))

    long, short = sampling(40), sampling(len(PROMPTS[1]) + 5)
    under_way = [
        submit(gpu.first_chunk(2, PROMPTS[0], long)),
        submit(gpu.decode(2), num_steps=3),
        submit(gpu.first_chunk(2, PROMPTS[1], short)),
        submit(gpu.decode(2), num_steps=6),
    ]
    results = [gpu.executor.collect(submitted).rows[0].token_ids for submitted in under_way]
    assert list(results[0] + results[1]) == expected(folder, PROMPTS[0], 4)
    assert list(results[2] + results[3]) == expected(folder, PROMPTS[1], 5)


def test_a_slot_stops_at_an_end_id_inside_a_command(folder: Path, gpu: Driver) -> None:
    whole = expected(folder, PROMPTS[0], 12)
    end = whole[5]
    stop = whole.index(end)
    setup = sampling(60, end=(end, VOCAB_SIZE + 7))
    first = gpu.run(gpu.first_chunk(1, PROMPTS[0], setup)).rows[0].token_ids
    rest = gpu.run(gpu.decode(1), num_steps=16).rows[0].token_ids
    assert list(first + rest) == whole[: stop + 1]
    assert gpu.run(gpu.decode(1), num_steps=2).rows[0].token_ids == ()


def test_the_ring_of_results_goes_round(
    monkeypatch: pytest.MonkeyPatch, folder: Path, gpu: Driver
) -> None:
    monkeypatch.setattr(sys.modules["worker.cuda_slots"], "RING_ROWS", 8)
    small = unwatched(Driver(folder, num_slots=2, max_seq_len=64))
    wanted = expected(folder, PROMPTS[0], 17)
    assert small.generate(PROMPTS[0], 17, slot=1, num_steps=7) == wanted
    assert small.generate(PROMPTS[0], 17, slot=0, num_steps=1) == wanted


def test_results_that_nobody_has_read_are_not_written_over(
    monkeypatch: pytest.MonkeyPatch, folder: Path, gpu: Driver
) -> None:
    monkeypatch.setattr(sys.modules["worker.cuda_slots"], "RING_ROWS", 8)
    small = unwatched(Driver(folder, num_slots=2, max_seq_len=64))

    def submit(*rows: Any, num_steps: int = 1) -> Any:
        small.step_id += 1
        return small.executor.submit(StepCommand(1, small.step_id, num_steps, rows))

    under_way = [
        submit(small.first_chunk(0, PROMPTS[0], sampling(40))),
        submit(small.decode(0), num_steps=7),
    ]
    first = small.executor.collect(under_way[0]).rows[0].token_ids
    submit(small.decode(0))
    with pytest.raises(StepError, match="1 steps after 8 whose results were not read; at most 8"):
        submit(small.decode(0))
    rest = small.executor.collect(under_way[1]).rows[0].token_ids
    assert list(first + rest) == expected(folder, PROMPTS[0], 8)


def test_gaps_of_more_steps_than_the_ring_holds(
    monkeypatch: pytest.MonkeyPatch, folder: Path, gpu: Driver
) -> None:
    monkeypatch.setattr(sys.modules["worker.cuda_slots"], "RING_ROWS", 8)
    small = unwatched(Driver(folder, num_slots=2, max_seq_len=64))
    assert len(small.executor.runner.gaps_ns(5)) == 4
    assert len(small.executor.runner.gaps_ns(100)) == 7


def test_a_tenant_that_still_decodes_is_replaced_beside_others(folder: Path, gpu: Driver) -> None:
    """Its slot is taken in a command in which others decode, and its prompt comes in pieces."""
    lived: list[int] = []

    def run(*rows: Any, num_steps: int = 1) -> dict[int, RowResult]:
        results = by_slot(gpu.run(*rows, num_steps=num_steps))
        lived.extend(results[0].token_ids)
        return results

    long = sampling(60)
    run(gpu.first_chunk(0, PROMPTS[0], long), gpu.first_chunk(2, PROMPTS[3], long))
    run(gpu.decode(0), gpu.decode(2), num_steps=3)
    run(gpu.decode(0), gpu.first_chunk(2, PROMPTS[1][:5], long, sample=False))
    run(gpu.decode(0), num_steps=2)
    taken = run(gpu.decode(0), gpu.chunk(2, 5, PROMPTS[1][5:]))[2].token_ids
    taken += run(gpu.decode(0), gpu.decode(2), num_steps=4)[2].token_ids
    assert list(taken) == expected(folder, PROMPTS[1], 5)
    assert lived == expected(folder, PROMPTS[0], len(lived))


def test_the_thread_that_waits_is_told_its_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: Driver
) -> None:
    threads: list[str] = []
    note = lambda device: threads.append(threading.current_thread().name)  # noqa: E731
    monkeypatch.setattr(sys.modules["worker.cuda_runner"], "_enter", note)
    pipeline = Pipeline()
    command = StepCommand(1, 1, 1, (gpu.first_chunk(0, PROMPTS[0], sampling(20)),))
    assert pipeline.run(lambda: (gpu.executor, command)).result().rows[0].token_ids
    pipeline.shutdown()
    assert threads == ["result_0"]


@pytest.mark.parametrize(("other_streams", "rows"), [(True, 8), (False, 128)])
def test_ranks_run_forwards_of_as_many_rows(gpu: Driver, other_streams: bool, rows: int) -> None:
    """A vocabulary of 32,001: one rank's part of the head streams, the other's does not."""
    backend: Any = fake_cuda.device().backend("bfloat16")
    backend.pack(torch.zeros(64, 64))
    group: Any = SimpleNamespace(world_size=2, total=lambda value: value + other_streams)
    assert backend.num_rows(8) == 8
    backend.agree(group)
    assert backend.num_rows(8) == rows


def ranks_on(
    monkeypatch: pytest.MonkeyPatch, folder: Path, devices: list[Callable[[], Any]]
) -> list[Driver]:
    """A rank on each device, met over gloo."""
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(rank, "open_device", lambda _, rank, __: devices[rank]())
    address = free_address()
    setup = {"world_size": len(devices), "rendezvous_address": address, "max_seq_len": 64}
    return on_ranks(
        len(devices),
        lambda number: unwatched(Driver(folder, rank=number, max_step_tokens=48, **setup)),
    )


def test_two_ranks_share_an_odd_vocabulary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """160 rows of the head stream on one rank, 161 do not on the other: it would wait for ever."""
    shape = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "vocab_size": 321}
    make_checkpoint(tmp_path, "qwen3", seed=4, dtype="bfloat16", **shape)
    ranks = ranks_on(monkeypatch, tmp_path, [fake_cuda.device] * 2)

    def serve(number: int) -> list[list[int]]:
        alone = ranks[number].generate(PROMPTS[1], 9, 1, num_steps=3)
        cut = ranks[number].generate(PROMPTS[1], 9, 2, cuts=(5,), **MODES["seeded"])
        return [alone, cut, ranks[number].generate(PROMPTS[1], 9, 0)]

    first, second = on_ranks(2, serve)
    assert first == second
    assert first[0] == first[2]
    assert len(first[1]) == 9


def test_a_cpu_and_a_gpu_are_no_group(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Refused at once, by the rank that has the store and by the one that reads it."""
    began = time.monotonic()
    found = r"rank 0 on cpu, rank 1 on cuda:0 \(none\); start all workers with --device cpu"
    with pytest.raises(SetupError, match=found):
        ranks_on(monkeypatch, folder, [lambda: CpuDevice(1), fake_cuda.device])
    assert time.monotonic() - began < 30


def test_the_buffers_of_the_sums_are_measured(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    fake_cuda.install(monkeypatch)
    device = fake_cuda.device()
    monkeypatch.setattr(device, "resident_bytes", lambda: 1000)
    monkeypatch.setattr(rank, "open_device", lambda *_: device)
    assert Driver(folder, max_seq_len=64).info.measured_bytes == 1000
    group: Any = device.join_group(Rendezvous(0, 1, "", 1.0, lambda: False, device.name))
    group.device_bytes = 24
    monkeypatch.setattr(device, "join_group", lambda _: group)
    assert Driver(folder, max_seq_len=64).info.measured_bytes == 1024
