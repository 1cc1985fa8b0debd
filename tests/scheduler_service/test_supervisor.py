"""Spawned workers: nothing is left behind, last words are kept, a killed one comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import fake_server
import psutil
import pytest
from scheduler_driver import make_request

from fakes import tokens_alone
from scheduler_service.engine import Engine
from scheduler_service.engine_types import EngineConfig, EngineFailedError, EngineState
from scheduler_service.request import TokenEvent
from scheduler_service.supervisor import Supervisor, WorkerExitError, worker_command
from scheduler_service.worker_group import WorkerGroup

PATIENCE_S = 60


def fake_command(_rank, address):
    return [sys.executable, fake_server.__file__, "--listen", address]


def python_command(code):
    return lambda _rank, _address: [sys.executable, "-c", code]


def one_that_ends(rank, _address):
    """Rank 0 stays, rank 1 ends by itself."""
    code = "import time; time.sleep(1000)" if rank == 0 else "raise SystemExit(7)"
    return [sys.executable, "-c", code]


async def until_exit(supervisor):
    """Spawns, waits for the first end of a process, and stops the others."""
    try:
        await supervisor.spawn()
        async with asyncio.timeout(PATIENCE_S):
            return await supervisor.wait_exit()
    finally:
        await supervisor.stop()


def pids(supervisor):
    return [process._process.pid for process in supervisor._processes]


@contextlib.asynccontextmanager
async def spawned_engine(world_size=1, command=fake_command, **changes):
    supervisor = Supervisor(world_size, command)
    config = EngineConfig(
        world_size=world_size, num_slots=2, max_seq_len=400, max_step_tokens=16, **changes
    )
    states: list[EngineState] = []
    group = WorkerGroup(config, lambda progress: None, supervisor)
    engine = Engine(config, states.append, lambda progress: None, group)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await engine.start()
        yield engine, supervisor, states
    finally:
        await engine.stop()


@pytest.mark.parametrize("lethal", [signal.SIGKILL, signal.SIGSTOP])
async def test_b34_b35_a_killed_or_stopped_worker_is_replaced(lethal):
    # A stopped worker is noticed by its silence; a killed one must not need that.
    timeout_s = 0.5 if lethal is signal.SIGSTOP else 2 * PATIENCE_S
    async with spawned_engine(2, worker_timeout_s=timeout_s) as (engine, supervisor, states):
        request = make_request("a", (1, 2), 380)
        stream = engine.submit([request])
        tokens = list((await anext(stream)).token_ids)
        before = pids(supervisor)
        os.kill(before[1], lethal)
        async with asyncio.timeout(PATIENCE_S):
            async for event in stream:
                if isinstance(event, TokenEvent):
                    assert event.first_index == len(tokens)
                    tokens += event.token_ids
        assert tokens == tokens_alone(request)
        assert states == [EngineState.READY, EngineState.RECOVERING, EngineState.READY]
        after = pids(supervisor)
        assert not set(before) & set(after), "the group is restarted whole"
        assert not any(psutil.pid_exists(pid) for pid in before)


async def test_stop_leaves_no_process_and_no_folder():
    async with spawned_engine(2) as (engine, supervisor, _):
        folder = supervisor._folder
        running = pids(supervisor)
        assert folder.exists()
        await engine.stop()
        assert not folder.exists()
        assert not any(psutil.pid_exists(pid) for pid in running)


async def test_a_worker_that_ends_while_starting_is_fatal_with_its_last_words():
    code = "import sys; print('loading'); sys.exit('error: no such model folder')"
    with pytest.raises(EngineFailedError, match=r"exit code 1: loading\nerror: no such model fol"):
        async with spawned_engine(command=python_command(code)):
            pass


async def test_wait_exit_names_the_rank():
    error = await until_exit(Supervisor(2, one_that_ends))
    assert isinstance(error, WorkerExitError)
    assert "worker 1 ended with exit code 7: it said nothing" in str(error)


async def test_what_a_worker_refuses_is_told_in_its_words():
    said = "2026-01-31T12:00:00.000Z INFO worker: starting\nworker: no GPU 0 here;\n0 are visible"
    error = await until_exit(Supervisor(1, python_command(f"import sys; sys.exit({said!r})")))
    assert str(error) == "worker 0: no GPU 0 here;\n0 are visible"


async def test_a_worker_deaf_to_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr("scheduler_service.supervisor._TERM_GRACE_S", 0.05)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('deaf', flush=True); time.sleep(1000)"
    )
    supervisor = Supervisor(1, python_command(code))
    await supervisor.spawn()
    process = supervisor._processes[0]
    async with asyncio.timeout(PATIENCE_S):
        while not process._last_lines:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await supervisor.stop()
    assert process._process.returncode == -signal.SIGKILL


async def test_output_goes_to_the_log_line_by_line(caplog):
    caplog.set_level("INFO")
    code = "import sys; print('to stdout', flush=True); print('to stderr', file=sys.stderr)"
    await until_exit(Supervisor(1, python_command(code)))
    lines = [record.message for record in caplog.records if record.name == "slotwise.worker"]
    assert lines == ["worker 0: to stdout", "worker 0: to stderr"]


async def test_a_log_line_of_a_worker_keeps_its_level_and_not_its_time(caplog):
    caplog.set_level("INFO")
    time = "2026-01-31T12:00:00.000Z"
    said = [
        f"{time} INFO worker: listening",
        f"{time} ERROR worker.server: stream ended",
        "Traceback (most recent call last):",
        f"{time} WARNING worker.rank: not read: a",
    ]
    await until_exit(Supervisor(1, python_command(f"print({chr(10).join(said)!r})")))
    lines = [(r.levelname, r.message) for r in caplog.records if r.name == "slotwise.worker"]
    assert lines == [
        ("INFO", "worker 0: worker: listening"),
        ("ERROR", "worker 0: worker.server: stream ended"),
        ("ERROR", "worker 0: Traceback (most recent call last):"),
        ("WARNING", "worker 0: worker.rank: not read: a"),
    ]


async def test_an_end_of_its_own_is_logged_and_one_by_us_is_not(caplog):
    await until_exit(Supervisor(2, one_that_ends))
    lines = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert lines == ["worker 1: ended with exit code 7"]


def test_the_command_of_a_worker():
    command = worker_command("/models/m", 2, 0, "auto")(1, "unix:/x.sock")
    assert command[1:5] == ["-m", "worker", "--listen", "unix:/x.sock"]
    threads = int(command[command.index("--threads") + 1])
    assert threads == max(1, (os.cpu_count() or 1) // 2)
    assert command[-1] == "--exit-with-parent"
    assert "5" in worker_command("/models/m", 2, 5, "auto")(0, "unix:/x.sock")
    assert Path(command[0]).name.startswith("python")


@pytest.mark.parametrize(("device", "given"), [("auto", ""), ("cpu", "cpu"), ("cuda", "cuda:1")])
def test_the_device_of_a_worker(device, given):
    command = worker_command("/models/m", 2, 0, device)(1, "unix:/x.sock")
    after = command[command.index("--device") + 1] if "--device" in command else ""
    assert after == given


@pytest.mark.parametrize(("own", "seen"), [(None, "0 1"), ("1", "1 1")])
async def test_workers_leave_nvlink_multicast_alone_unless_told(monkeypatch, caplog, own, seen):
    caplog.set_level("INFO")
    names = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(names[0], own)
    code = f"import os; print(*(os.environ[name] for name in {names}))"
    await until_exit(Supervisor(1, python_command(code)))
    lines = [record.message for record in caplog.records if record.name == "slotwise.worker"]
    assert lines == [f"worker 0: {seen}"]
