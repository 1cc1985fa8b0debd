"""The GPU worker's host side (slot table, batches, commands that overlap) on a fake GPU.

The same requests on the CPU worker are the reference: float32, so the tokens are equal.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
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
from worker.batch import LogitAdjustment, RowResult, StepCommand, StepResult, TokenLogprobs
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


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("lengths", "sample", "room"),
    [
        ((1,), True, 16),
        ((16,), True, 16),
        ((17,), True, 32),
        ((33,), True, 48),
        ((48,), True, 48),
        ((49,), True, None),
        ((9,), False, None),
        ((5, 5), True, None),
    ],
)
def test_lone_short_ends_of_prompts_have_forwards_of_their_own(
    gpu: Driver, lengths: tuple[int, ...], sample: bool, room: int | None, mixed: bool
) -> None:
    """Of at least as many rows; a step has 48 at most."""
    chunks = tuple(
        gpu.first_chunk(slot, (7,) * length, sampling(60), sample=sample)
        for slot, length in enumerate(lengths)
    )
    forward = gpu.executor.runner._chunks._captured(chunks, mixed)
    assert (None if forward is None else forward.chunk.room) == room


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


ADJUSTED = LogitAdjustment(
    frequency_penalty=0.7,
    presence_penalty=-0.3,
    repetition_penalty=1.4,
    prompt_token_ids=tuple(range(0, VOCAB_SIZE, 3)),
    generated_token_ids=(5, 9, 5),
    biases=((7, 2.5), (VOCAB_SIZE - 1, 3.0), (11, -100.0)),
    min_len=26,
)


def mask_of(*allowed: int) -> bytes:
    """As worker.proto packs the tokens."""
    bits = sum(1 << token_id for token_id in allowed)
    return bits.to_bytes(-(-VOCAB_SIZE // 8), "little")


def crowded(driver: Driver) -> list[StepResult]:
    """Six slots with three rows: prefixes, masks, adjustments and logprobs beside each other."""
    odd = mask_of(*range(1, VOCAB_SIZE, 2))
    drawn = {"temperature": 1.3, "seed": 8}
    told = sampling(60, num_logprobs=2, num_prompt_logprobs=3, end=(3,), adjustment=ADJUSTED)
    again = replace(told, num_prompt_logprobs=-1)
    masked = sampling(60, masked=True, num_prompt_logprobs=0, **drawn)
    free = sampling(60, adjustment=replace(ADJUSTED, repetition_penalty=1.0, biases=()), **drawn)
    plain = sampling(60, **drawn)
    rest = PROMPTS[1][4:]
    run = driver.run
    return [
        run(
            driver.first_chunk(5, PROMPTS[0], told),
            driver.first_chunk(1, PROMPTS[1][:4], masked, sample=False, next_token_id=rest[0]),
        ),
        run(driver.decode(5), driver.chunk(1, 4, rest, allowed_tokens=odd)),
        run(driver.decode(1, odd), driver.decode(5), num_steps=3),
        # Of a busy slot, some of it generated, beside rows that decode.
        run(
            driver.decode(5),
            driver.decode(1, mask_of(6)),
            driver.first_chunk(3, PROMPTS[2], free, source=5, num_cached=11),
        ),
        run(
            *(driver.decode(slot) for slot in (3, 5)), driver.decode(1, mask_of(2, 4)), num_steps=4
        ),
        run(driver.decode(1, odd), num_steps=5),
        # Slot 5's row goes to slot 2, while slot 3 goes on; slot 0 has none of the rows yet.
        run(driver.decode(3), driver.first_chunk(2, PROMPTS[3], plain)),
        run(driver.decode(2), driver.decode(3), num_steps=3),
        run(driver.first_chunk(1, PROMPTS[0][5:], again, source=1, num_cached=5)),
        run(driver.decode(2), driver.decode(1), driver.decode(3), num_steps=6),
        run(driver.decode(2), driver.decode(3), num_steps=6),
    ]


def close(got: tuple[TokenLogprobs, ...], wanted: tuple[TokenLogprobs, ...]) -> bool:
    """But for the last bits, which are another device's."""
    return [(one.rank, one.best_token_ids) for one in got] == [
        (one.rank, one.best_token_ids) for one in wanted
    ] and all(
        [a.logprob, *a.best_logprobs] == pytest.approx([b.logprob, *b.best_logprobs], abs=1e-4)
        for a, b in zip(got, wanted, strict=True)
    )


LIMITS = {"num_slots": 6, "max_running": 3, "max_seq_len": 64, "max_step_tokens": 48}


def test_more_slots_than_rows_and_all_that_they_can_want(folder: Path, gpu: Driver) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "open_device", lambda *_: CpuDevice(1))
        wanted = crowded(Driver(folder, **LIMITS))
    got = crowded(unwatched(Driver(folder, **LIMITS)))
    assert [result.digest for result in got] == [result.digest for result in wanted]
    for result, expected_result in zip(got, wanted, strict=True):
        for row, other in zip(result.rows, expected_result.rows, strict=True):
            assert row.token_ids == other.token_ids
            assert close(row.logprobs, other.logprobs)
            assert close(row.prompt_logprobs, other.prompt_logprobs)
    assert [len(row.token_ids) for row in got[4].rows] == [4, 4, 1]
    assert [len(row.prompt_logprobs) for row in got[0].rows] == [len(PROMPTS[0]) - 1, 4]


def test_a_step_does_what_its_rows_want_and_no_more(gpu: Driver) -> None:
    runner: Any = gpu.executor.runner
    ran: list[tuple[bool, bool]] = []

    def noting(variant: Any, step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            ran.append((variant.logprobs, variant.adjusted))
            step()

        return run

    runner._steps = {variant: noting(variant, step) for variant, step in runner._steps.items()}
    for slot, setup in enumerate(
        (
            sampling(60),
            sampling(60, num_logprobs=0),
            sampling(60, adjustment=LogitAdjustment(presence_penalty=1.0)),
            sampling(60, masked=True, adjustment=LogitAdjustment()),
        )
    ):
        mask = mask_of(9) if setup.masked else b""
        gpu.run(gpu.first_chunk(slot, PROMPTS[slot], setup, allowed_tokens=mask))
    masked = gpu.decode(3, mask_of(8))
    for rows in ([0], [1, 0], [0, 2], [1, 2]):
        gpu.run(*map(gpu.decode, rows))
    gpu.run(masked, num_steps=7)
    gpu.run(gpu.decode(0), masked, num_steps=2)
    gpu.run(gpu.decode(0))
    adjusted = (False, True)
    plain = (False, False)
    assert ran == [plain, (True, False), adjusted, (True, True), adjusted, *[adjusted] * 2, plain]


def test_steps_with_logprobs_fit_as_far_as_the_runner_says(
    monkeypatch: pytest.MonkeyPatch, folder: Path, gpu: Driver
) -> None:
    """Each of them with a chunk, which takes a row of the ring of its own."""
    cuda_slots = sys.modules["worker.cuda_slots"]
    monkeypatch.setattr(cuda_slots, "_LOGPROBS_BYTES", 8 * 2 * 168)
    small = unwatched(Driver(folder, num_slots=2, max_seq_len=64))
    most = small.executor.runner.max_logprobs_steps
    assert most == 4
    small.run(small.first_chunk(0, PROMPTS[0], sampling(60, num_logprobs=1)))

    def submit() -> Any:
        small.step_id += 1
        chunk = small.first_chunk(1, PROMPTS[1], sampling(60))
        rows = (small.decode(0), chunk)
        return small.executor.submit(StepCommand(1, small.step_id, 1, rows))

    under_way = [submit() for _ in range(most)]
    with pytest.raises(StepError, match=r"2 steps with logprobs after 8 .* at most 8"):
        submit()
    results = [small.executor.collect(one) for one in under_way]
    got = [row.token_ids[0] for row in (result.rows[0] for result in results)]
    assert got == expected(folder, PROMPTS[0], 5)[1:]


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


@pytest.mark.parametrize(
    ("other_streams", "rows"), [(True, (8, 33, 64, 128)), (False, (128, 128, 128, 128))]
)
def test_ranks_run_forwards_of_as_many_rows(
    gpu: Driver, other_streams: bool, rows: tuple[int, ...]
) -> None:
    """A vocabulary of 32,001: one rank's part of the head streams, the other's does not."""
    backend: Any = fake_cuda.device().backend("bfloat16")
    backend.pack(torch.zeros(64, 64))
    group: Any = SimpleNamespace(world_size=2, total=lambda value: value + other_streams)
    assert backend.num_rows(8) == 8
    backend.agree(group)
    assert tuple(map(backend.num_rows, (8, 33, 64, 65))) == rows


def ranks_on(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    devices: list[Callable[[], Any]],
    start: Callable[..., Any] = Driver,
) -> list[Any]:
    """A rank on each device, met over sockets."""
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(rank, "open_device", lambda _, rank, __: devices[rank]())
    address = free_address()
    setup = {"world_size": len(devices), "rendezvous_address": address, "max_seq_len": 64}
    return on_ranks(
        len(devices),
        lambda number: start(folder, rank=number, max_step_tokens=48, **setup),
    )


def test_two_ranks_share_an_odd_vocabulary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """160 rows of the head stream on one rank, 161 do not on the other: it would wait for ever."""
    shape = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "vocab_size": 321}
    make_checkpoint(tmp_path, "qwen3", seed=4, dtype="bfloat16", **shape)
    ranks = [unwatched(one) for one in ranks_on(monkeypatch, tmp_path, [fake_cuda.device] * 2)]

    def serve(number: int) -> list[list[int]]:
        alone = ranks[number].generate(PROMPTS[1], 9, 1, num_steps=3)
        cut = ranks[number].generate(PROMPTS[1], 9, 2, cuts=(5,), **MODES["seeded"])
        return [alone, cut, ranks[number].generate(PROMPTS[1], 9, 0)]

    first, second = on_ranks(2, serve)
    assert first == second
    assert first[0] == first[2]
    assert len(first[1]) == 9

    def tell(number: int) -> list[RowResult]:
        setup = sampling(40, num_logprobs=2, num_prompt_logprobs=3, adjustment=ADJUSTED)
        driver = ranks[number]
        first = driver.run(driver.first_chunk(3, PROMPTS[2], setup))
        warm = driver.first_chunk(0, PROMPTS[2][6:], sampling(40), source=3, num_cached=6)
        rows = [driver.run(driver.decode(3), warm), driver.run(driver.decode(3), num_steps=4)]
        return [row for result in (first, *rows) for row in result.rows]

    rows, others = on_ranks(2, tell)
    assert rows == others
    assert [len(row.token_ids) for row in rows] == [1, 1, 1, 4]
    assert len(rows[0].prompt_logprobs) == len(PROMPTS[2]) - 1


def test_a_cpu_and_a_gpu_are_no_group(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Told by the rank that has the store and by the one that reads it: neither waits in vain."""
    found = r"rank 0 on cpu, rank 1 on cuda:0 \(none\); start all workers with --device cpu"

    def refused(*arguments: Any, **setup: Any) -> None:
        with pytest.raises(SetupError, match=found):
            Driver(*arguments, **setup)

    ranks_on(monkeypatch, folder, [lambda: CpuDevice(1), fake_cuda.device], refused)


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
