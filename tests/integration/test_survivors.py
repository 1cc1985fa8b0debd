"""Real ranks on the CPU that are killed and stopped: streams go on to the bit, survivors keep their
weights."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from scheduler_driver import make_request

from checkpoints import make_checkpoint
from scheduler_service.engine import Engine
from scheduler_service.engine_types import EngineConfig, EngineState, LoadProgress
from scheduler_service.request import FinishedEvent, TokenEvent
from scheduler_service.request_stream import RequestStream
from scheduler_service.supervisor import Supervisor, standby_command, worker_command
from scheduler_service.worker_group import WorkerGroup

PATIENCE_S = 600
# A stopped rank says nothing for so long until it is given up.
SILENCE_S = 2.0
# For a survivor to say that it lives, on a busy machine; one that is stopped never does.
ANSWER_S = 8.0
PROMPT = tuple(range(7, 250))
NUM_NEW = 120


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.worker_group._ANSWER_S", ANSWER_S)


class Ranks:
    """An engine with two ranks of its own."""

    def __init__(self, folder: Path, silence_s: float, num_standby: int = 0) -> None:
        config = EngineConfig(
            world_size=2,
            model_dir=str(folder),
            num_slots=2,
            max_seq_len=400,
            max_step_tokens=16,
            max_steps_per_command=2,
            worker_timeout_s=silence_s,
            recovery_timeout_s=PATIENCE_S,
            num_standby_workers=num_standby,
        )
        command = worker_command(str(folder), 2, 1, "cpu")
        self.supervisor = Supervisor(2, command, standby_command())
        self.states: list[EngineState] = []
        # Ranks to kill when they begin to start.
        self.doomed: list[int] = []
        group = WorkerGroup(config, self._on_progress, self.supervisor)
        self.engine = Engine(config, self.states.append, self._on_progress, group)

    def pid(self, rank: int) -> int:
        return self.supervisor._processes[rank]._process.pid

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), how)

    def submit(self, name: str) -> RequestStream:
        return self.engine.submit([make_request(name, PROMPT, NUM_NEW, seed=3)])

    def _on_progress(self, progress: LoadProgress) -> None:
        if progress.rank in self.doomed:
            self.doomed.remove(progress.rank)
            self.kill(progress.rank)


async def rest_of(stream: RequestStream, tokens: list[int]) -> list[int]:
    """All tokens of the stream, each exactly once."""
    async for event in stream:
        if isinstance(event, TokenEvent):
            assert event.first_index == len(tokens)
            tokens += event.token_ids
        elif isinstance(event, FinishedEvent):
            assert event.reason.value != "error", event
    return tokens


def reads(caplog: pytest.LogCaptureFixture, rank: int) -> int:
    """How often a rank has read its weights."""
    return sum(
        message.startswith(f"worker {rank}: worker.rank: weights read")
        for message in caplog.messages
    )


@pytest.mark.parametrize("victim", [0, 1])
async def test_b37_streams_outlive_a_rank_killed_in_any_phase(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, victim: int
) -> None:
    caplog.set_level("INFO")
    ranks = Ranks(make_checkpoint(tmp_path, "llama"), 2 * PATIENCE_S)
    survivor = 1 - victim
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ranks.engine.start()
            expected = await rest_of(ranks.submit("alone"), [])
            kept, lost = ranks.pid(survivor), ranks.pid(victim)
            assert len(expected) == NUM_NEW

            # In decode.
            stream = ranks.submit("decode")
            tokens = list((await anext(stream)).token_ids)
            ranks.kill(victim)
            assert await rest_of(stream, tokens) == expected
            assert ranks.pid(victim) != lost

            # In prefill, and again while it starts.
            ranks.engine.flush()
            stream = ranks.submit("prefill")
            ranks.doomed.append(victim)
            await asyncio.sleep(0)
            ranks.kill(victim)
            assert await rest_of(stream, []) == expected
            assert ranks.doomed == []
        assert ranks.states.count(EngineState.RECOVERING) == 2
        assert ranks.pid(survivor) == kept
        assert reads(caplog, survivor) == 1
    finally:
        await ranks.engine.stop()


async def test_b35_a_stopped_rank_is_replaced_and_the_other_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ranks = Ranks(make_checkpoint(tmp_path, "llama"), SILENCE_S)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ranks.engine.start()
            expected = await rest_of(ranks.submit("alone"), [])
            kept, stopped = ranks.pid(0), ranks.pid(1)
            stream = ranks.submit("stopped")
            tokens = list((await anext(stream)).token_ids)
            ranks.kill(1, signal.SIGSTOP)
            assert await rest_of(stream, tokens) == expected
        assert ranks.pid(0) == kept
        assert reads(caplog, 0) == 1
        assert ranks.pid(1) != stopped
    finally:
        await ranks.engine.stop()


async def test_a_standby_takes_over_and_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ranks = Ranks(make_checkpoint(tmp_path, "llama"), 2 * PATIENCE_S, num_standby=1)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ranks.engine.start()
            expected = await rest_of(ranks.submit("alone"), [])
            for victim in (1, 0):
                stream = ranks.submit("decode")
                tokens = list((await anext(stream)).token_ids)
                ranks.kill(victim)
                assert await rest_of(stream, tokens) == expected
                assert f"worker {victim}: taken by a standby" in caplog.text
    finally:
        await ranks.engine.stop()
