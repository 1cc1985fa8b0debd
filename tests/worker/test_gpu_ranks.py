"""Two ranks on two GPUs: the promise holds for a group as it does for one, and ranks never differ.

Each rank is a process: this file again, as a program. SLOTWISE_RANKS_SHARE_GPUS=1 lets them take
turns on one GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_driver import DEVICE, VOCAB_SIZE, GpuDriver, in_company, num_gpus, prompt_of
from worker_driver import free_address, same_bits, sampling

from checkpoints import make_checkpoint
from worker.batch import LogitAdjustment, StepResult

SHARED = os.environ.get("SLOTWISE_RANKS_SHARE_GPUS") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(num_gpus() < (1 if SHARED else 2), reason="needs 2 GPUs and CUDA"),
]

WORLD_SIZE = 2
NUM_SLOTS = 8
TIMEOUT_S = 150
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 42},
}
PROMPT = prompt_of(1, 250)
NUM_NEW = 20


class Group:
    """A rank, and what it answers alone: tokens and logits by mode."""

    def __init__(self, driver: GpuDriver) -> None:
        self.driver = driver
        self.alone = {}
        for mode, parameters in MODES.items():
            tokens = driver.generate(PROMPT, NUM_NEW, 0, **parameters)
            self.alone[mode] = (tokens, driver.logits_of(0))
            assert len(tokens) == len(driver.logits_of(0)) == NUM_NEW

    def check(self, mode: str, slot: int, tokens: list[int]) -> None:
        """The slot's tenant gave the same bits."""
        expected, logits = self.alone[mode]
        assert tokens == expected
        mine = self.driver.logits_of(slot)
        assert mine.keys() == logits.keys()
        assert all(same_bits(mine[position], row) for position, row in logits.items())

    def hash(self) -> str:
        """Of all tokens and logits of the lone requests."""
        digest = hashlib.blake2b()
        for tokens, logits in self.alone.values():
            digest.update(json.dumps(tokens).encode())
            for position in sorted(logits):
                digest.update(logits[position].numpy().tobytes())
        return digest.hexdigest()


def promise(group: Group) -> None:
    """Every slot, chunk size, neighbours, and the graph."""
    driver = group.driver
    for mode, parameters in MODES.items():
        for slot in (1, NUM_SLOTS - 1):
            group.check(mode, slot, driver.generate(PROMPT, NUM_NEW, slot, **parameters))
        for size in (16, 37, 200):
            cuts = tuple(range(size, len(PROMPT), size))
            tokens = driver.generate(PROMPT, NUM_NEW, 3, cuts=cuts, **parameters)
            group.check(mode, 3, tokens)
        for neighbours, cuts in ((1, ()), (7, ()), (7, (117,))):
            tokens = in_company(driver, 1, neighbours, PROMPT, NUM_NEW, parameters, cuts)
            group.check(mode, 1, tokens)
        driver.watched = False
        for num_steps in (1, 8):
            tokens = in_company(driver, 2, 7, PROMPT, NUM_NEW, parameters, (), num_steps)
            assert tokens == group.alone[mode][0]
        driver.watched = True
        known = (*PROMPT, *group.alone[mode][0][:6])
        rest = driver.generate(known, NUM_NEW - 6, 5, **parameters)
        assert rest == group.alone[mode][0][6:]


def reuse(group: Group) -> None:
    """Every rank copies its heads' part of a prefix."""
    driver = group.driver
    for mode, parameters in MODES.items():
        driver.generate(PROMPT, NUM_NEW, 6, **parameters)
        setup = sampling(len(PROMPT) + NUM_NEW, **parameters)
        for slot in (2, 6):
            warm = driver.first_chunk(slot, PROMPT[150:], setup, source=6, num_cached=150)
            tokens = list(driver.run(warm).rows[0].token_ids)
            while found := driver.run(driver.decode(slot)).rows[0].token_ids:
                tokens += found
            group.check(mode, slot, tokens)


def told(driver: GpuDriver) -> list[str]:
    """Logprobs of a prompt, and of tokens drawn from adjusted logits of some."""
    adjustment = LogitAdjustment(
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        prompt_token_ids=tuple(sorted(set(PROMPT))),
        biases=((7, 3.0), (VOCAB_SIZE - 1, 4.0)),
        min_len=len(PROMPT) + 5,
    )
    setup = sampling(
        len(PROMPT) + NUM_NEW,
        temperature=1.0,
        seed=4,
        end=(9,),
        num_logprobs=5,
        num_prompt_logprobs=2,
        adjustment=adjustment,
    )
    allowed = b"\x5a" * -(-driver.decoder.config.vocab_size // 8)
    masked = driver.first_chunk(5, PROMPT, sampling(400, masked=True), allowed_tokens=allowed)
    rows = [*driver.run(driver.first_chunk(3, PROMPT, setup), masked).rows]
    rows += driver.run(driver.decode(3), driver.decode(5, allowed), num_steps=6).rows
    assert [len(row.token_ids) for row in rows] == [1, 1, 6, 1]
    assert len(rows[0].prompt_logprobs) == len(PROMPT) - 1
    return [repr(row) for row in rows]


def drawn(driver: GpuDriver, num_steps: list[int], seed: int) -> list[StepResult]:
    """All slots draw at temperature 1."""
    driver.watched = False
    rows = [
        driver.first_chunk(slot, prompt_of(slot, 30), sampling(400, temperature=1.0, seed=seed))
        for slot in range(NUM_SLOTS)
    ]
    results = [driver.run(*rows)]
    slots = [driver.decode(slot) for slot in range(NUM_SLOTS)]
    results += [driver.run(*slots, num_steps=count) for count in num_steps]
    for result in results[1:]:
        assert not any(row.corrupted or not row.token_ids for row in result.rows)
    return results


def run_rank(rank: int, address: str, folder: Path) -> dict[str, Any]:
    device = f"{DEVICE}:{rank % num_gpus()}" if DEVICE == "cuda" else DEVICE
    driver = GpuDriver(
        folder,
        device,
        rank=rank,
        world_size=WORLD_SIZE,
        rendezvous_address=address,
        num_slots=NUM_SLOTS,
        max_seq_len=512,
        max_step_tokens=2048,
    )
    failed = [test.detail for test in driver.info.self_tests if not test.passed]
    assert not failed, failed
    memory = check_memory(driver)
    group = Group(driver)
    promise(group)
    reuse(group)
    logprobs = told(driver)
    # 300 steps, in commands of one and of many.
    digests = [result.digest for result in drawn(driver, [1] * 44 + [32] * 8, seed=7)]
    # What the scheduler compares must show a rank that draws for itself, at the first step.
    strayed = [result.digest for result in drawn(driver, [1], seed=100 + rank)]
    driver.rank.release()
    return {
        "hash": group.hash(),
        "digests": digests,
        "strayed": strayed,
        "memory": memory,
        "told": logprobs,
    }


def check_memory(driver: GpuDriver) -> int:
    """What is measured holds the buffers that the ranks write to, and the plan has room for them.

    Returns their bytes.
    """
    info, group, device = driver.info, driver.decoder.group, driver.rank._device
    assert device is not None
    assert info.measured_bytes == device.resident_bytes() + group.device_bytes
    assert group.device_bytes < device.footprint.group_bytes
    assert info.measured_bytes < info.plan.predicted_bytes
    return group.device_bytes


@pytest.fixture(scope="module", params=[VOCAB_SIZE, VOCAB_SIZE + 1])
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What the ranks print; the checks within a rank have passed.

    Of an odd vocabulary one rank has 1,024 rows, which stream, and the other 1,025, which do not.
    """
    folder = tmp_path_factory.mktemp("model")
    shape = {**SHAPE, "vocab_size": request.param}
    make_checkpoint(folder, "qwen3", seed=5, dtype="bfloat16", device=DEVICE, **shape)
    address = free_address()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    logs = [folder / f"rank{rank}.log" for rank in range(WORLD_SIZE)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, __file__, str(rank), address, str(folder)]
        with log.open("w") as file:
            processes.append(
                subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
            )
    wait(processes)
    for rank in sorted(range(WORLD_SIZE), key=lambda rank: -processes[rank].returncode):
        assert processes[rank].returncode == 0, f"rank {rank}:\n{logs[rank].read_text()[-4000:]}"
    return [report_in(log.read_text()) for log in logs]


def report_in(log: str) -> dict[str, Any]:
    """Libraries may write lines after it."""
    (line,) = (line for line in log.splitlines() if line.startswith('{"hash"'))
    report: dict[str, Any] = json.loads(line)
    return report


def wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, or one has failed: the others would wait for it."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and not any(process.poll() for process in processes):
        if all(process.poll() == 0 for process in processes):
            return
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()


def test_alone_in_company_and_in_chunks(reports: list[dict[str, Any]]) -> None:
    """Each rank has compared within itself; the ranks also have each other's tokens and logits."""
    assert reports[0]["hash"] == reports[1]["hash"]


def test_ranks_draw_the_same_tokens(reports: list[dict[str, Any]]) -> None:
    """B24: the digest covers slot, position and token of every draw."""
    first, second = (report["digests"] for report in reports)
    assert len(first) == 1 + 44 + 8
    assert first == second
    assert len(set(first)) == len(first)


def test_ranks_tell_the_same_logprobs(reports: list[dict[str, Any]]) -> None:
    """Of a prompt, and beside adjusted and masked rows."""
    assert reports[0]["told"] == reports[1]["told"]


def test_the_ranks_have_buffers(reports: list[dict[str, Any]]) -> None:
    """256 lanes of 16 KB for each rank, twice, and the packets of few rows."""
    first, second = (report["memory"] for report in reports)
    if first == second == 0:
        pytest.skip("these GPUs do not reach each other's memory: NCCL sums")
    assert 2 * WORLD_SIZE * 256 * (16 << 10) < first == second


def test_a_rank_that_draws_for_itself_is_seen(reports: list[dict[str, Any]]) -> None:
    first, second = (report["strayed"] for report in reports)
    assert first[0] != second[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run_rank(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))), flush=True)
