"""Spawned workers: nothing is left behind, last words are kept, a killed one comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import sys
import tempfile
from pathlib import Path

import fake_server
import psutil
import pytest
from scheduler_driver import make_request

from fakes import tokens_alone
from scheduler_service.engine import Engine
from scheduler_service.engine_types import EngineConfig, EngineFailedError, EngineState
from scheduler_service.errors import SetupError, WorkerLostError
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
    return [supervisor._processes[rank]._process.pid for rank in sorted(supervisor._processes)]


@contextlib.asynccontextmanager
async def spawned_engine(
    world_size=1,
    command=fake_command,
    supervisor=None,
    on_progress=lambda progress: None,
    **changes,
):
    supervisor = supervisor or Supervisor(world_size, command)
    config = EngineConfig(
        world_size=world_size, num_slots=2, max_seq_len=400, max_step_tokens=16, **changes
    )
    states: list[EngineState] = []
    group = WorkerGroup(config, on_progress, supervisor)
    engine = Engine(config, states.append, lambda progress: None, group)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await engine.start()
        yield engine, supervisor, states
    finally:
        await engine.stop()


@pytest.mark.parametrize("lethal", [signal.SIGKILL, signal.SIGSTOP])
async def test_b34_b35_a_killed_or_stopped_worker_is_replaced_alone(lethal):
    # A stopped worker is noticed by its silence; a killed one must not need that.
    timeout_s = 3.0 if lethal is signal.SIGSTOP else 2 * PATIENCE_S
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
        assert after[0] == before[0], "the survivor goes on"
        assert after[1] != before[1]
        assert not psutil.pid_exists(before[1])


async def test_stop_leaves_no_process_and_no_folder():
    async with spawned_engine(2) as (engine, supervisor, _):
        folder = supervisor._folder.path
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


async def test_a_deaf_worker_is_killed(monkeypatch):
    monkeypatch.setattr("scheduler_service.supervisor._END_GRACE_S", 0.05)
    code = (
        "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); "
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


async def test_a_log_line_as_json_keeps_its_fields(caplog):
    caplog.set_level("INFO")
    own = {"time": "2026-01-31T12:00:00.000Z", "logger": "worker", "rank": 0, "epoch": 7}
    said = [
        json.dumps({**own, "level": "info", "message": "starting"}),
        json.dumps({**own, "level": "error", "message": "a bug", "exception": "Trace\n  why"}),
        # No log lines, and passed on as they are.
        '{"level": "loud", "logger": "x", "message": "y"}',
        '{"level": 3}',
        "{a library",
    ]
    error = await until_exit(Supervisor(1, python_command(f"print({chr(10).join(said)!r})")))
    records = [record for record in caplog.records if record.name == "slotwise.worker"]
    assert [(record.levelname, record.message) for record in records] == [
        ("INFO", "worker 0: worker: starting"),
        ("ERROR", "worker 0: worker: a bug"),
        ("ERROR", "worker 0: Trace"),
        ("ERROR", "worker 0:   why"),
        *(("ERROR", f"worker 0: {line}") for line in said[2:]),
    ]
    assert [record.fields for record in records[:4]] == [{"rank": 0, "epoch": 7}] * 4
    assert records[4].fields == {"rank": 0}
    # The logger's name is not taken for the words of a worker that cannot start.
    assert str(error).startswith("worker 0 ended with exit code 0: INFO worker: starting\nERROR")


async def test_an_end_of_its_own_is_logged_and_one_by_us_is_not(caplog):
    await until_exit(Supervisor(2, one_that_ends))
    lines = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert lines == ["worker 1: ended with exit code 7"]


async def test_the_folder_that_a_killed_service_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, file in (("slotwise-left0000", "worker-0.sock"), ("slotwise-other000", "notes")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    (tmp_path / "slotwise-empty000").mkdir()
    one, two = (Supervisor(1, python_command("import time; time.sleep(1000)")) for _ in range(2))
    try:
        (address,) = await one.spawn()
        await two.spawn()
        living = Path(address.removeprefix("unix:")).parent
        assert stat.S_IMODE(living.stat().st_mode) == 0o700
        left = {folder.name for folder in tmp_path.iterdir()}
        assert left >= {"slotwise-other000", living.name}
        assert not left & {"slotwise-left0000", "slotwise-empty000"}
    finally:
        await one.stop()
        await two.stop()
    assert [folder.name for folder in tmp_path.iterdir()] == ["slotwise-other000"]


def test_the_command_of_a_worker():
    command = worker_command("/models/m", 2, 0, "auto")(1, "unix:/x.sock")
    assert command[1:5] == ["-m", "worker", "--listen", "unix:/x.sock"]
    threads = int(command[command.index("--threads") + 1])
    assert threads == max(1, (os.cpu_count() or 1) // 2)
    assert command[-2:] == ["--exit-with-parent", str(os.getpid())]
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


@pytest.mark.parametrize("code", ["os.kill(os.getpid(), 9)", "os._exit(75)"])
async def test_an_end_that_is_no_refusal_is_worth_another_try(code):
    error = await until_exit(Supervisor(1, python_command(f"import os; {code}")))
    assert isinstance(error, WorkerLostError)
    assert not isinstance(error, SetupError)


async def test_workers_listen_where_nobody_else_can_reach_them():
    supervisor = Supervisor(2, fake_command)
    try:
        addresses = await supervisor.spawn()
        assert all(address.startswith("unix:") for address in addresses)
        folders = {Path(address.removeprefix("unix:")).parent for address in addresses}
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700]
    finally:
        await supervisor.stop()


async def test_only_the_lost_and_the_ended_are_started_anew(caplog):
    caplog.set_level("INFO")
    supervisor = Supervisor(3, python_command("import time; time.sleep(1000)"))
    try:
        await supervisor.spawn()
        before = pids(supervisor)
        os.kill(before[1], signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            await supervisor.wait_exit()
        await supervisor.spawn({2: "it is deaf"})
        after = pids(supervisor)
        assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False]
        assert not any(psutil.pid_exists(pid) for pid in before[1:])
        lines = [record.message for record in caplog.records]
        assert "worker 0 goes on and keeps its weights" in lines
        assert "worker 2 is started anew: it is deaf" in lines
    finally:
        await supervisor.stop()


class Killer:
    """Kills a rank of the supervisor when it tells of its start for the first times."""

    def __init__(self, supervisor, rank, num_kills=1):
        self.supervisor = supervisor
        self.rank = rank
        self.num_kills = num_kills

    def on_progress(self, progress):
        if progress.rank == self.rank and self.num_kills:
            self.num_kills -= 1
            os.kill(pids(self.supervisor)[self.rank], signal.SIGKILL)


async def test_b37_a_worker_killed_while_it_starts_is_replaced():
    supervisor = Supervisor(2, fake_command)
    killer = Killer(supervisor, 1, num_kills=2)
    async with spawned_engine(2, supervisor=supervisor, on_progress=killer.on_progress) as (
        engine,
        _,
        states,
    ):
        assert killer.num_kills == 0
        assert states == [EngineState.READY]
        request = make_request("a", (1, 2), 5)
        events = [event async for event in engine.submit([request])]
        assert [t for e in events if isinstance(e, TokenEvent) for t in e.token_ids]


@pytest.mark.parametrize("second", [0, 1])
async def test_b37_a_worker_killed_during_a_recovery_is_replaced(second):
    supervisor = Supervisor(2, fake_command)
    killer = Killer(supervisor, second, num_kills=0)
    async with spawned_engine(2, supervisor=supervisor, on_progress=killer.on_progress) as (
        engine,
        _,
        states,
    ):
        request = make_request("a", (1, 2), 380)
        stream = engine.submit([request])
        tokens = list((await anext(stream)).token_ids)
        killer.num_kills = 1
        os.kill(pids(supervisor)[1], signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            async for event in stream:
                if isinstance(event, TokenEvent):
                    assert event.first_index == len(tokens)
                    tokens += event.token_ids
        assert killer.num_kills == 0
        assert tokens == tokens_alone(request)
        assert states == [EngineState.READY, EngineState.RECOVERING, EngineState.READY]


# Waits for a line, and is then what the line says.
WAITING = """
import json, sys, time
line = sys.stdin.readline()
if line:
    print("INFO is", *json.loads(line), flush=True)
    time.sleep(1000)
"""


async def test_a_standby_takes_the_place_of_a_lost_rank(caplog):
    caplog.set_level("INFO")
    command = python_command("import time; time.sleep(1000)")
    supervisor = Supervisor(2, command, [sys.executable, "-c", WAITING])
    try:
        await supervisor.spawn()
        await supervisor.prepare(1)
        await supervisor.prepare(1)
        (standby,) = supervisor._waiting
        await supervisor.spawn({1: "it is deaf"})
        assert supervisor._processes[1] is standby
        assert (standby.rank, supervisor._waiting) == (1, [])
        assert "taken by a standby" in caplog.text
        # Without another one it is a start as any other.
        await supervisor.spawn({0: "it is deaf"})
        assert "worker 0: started" in caplog.text
    finally:
        await supervisor.stop()


async def test_a_standby_that_has_ended_is_no_help():
    command = python_command("import time; time.sleep(1000)")
    supervisor = Supervisor(1, command, [sys.executable, "-c", "raise SystemExit(3)"])
    try:
        await supervisor.spawn()
        await supervisor.prepare(1)
        (standby,) = supervisor._waiting
        async with asyncio.timeout(PATIENCE_S):
            await standby.wait()
        await supervisor.spawn({0: "it is deaf"})
        assert supervisor._processes[0] is not standby
        assert psutil.pid_exists(pids(supervisor)[0])
    finally:
        await supervisor.stop()


async def test_no_standby_is_left():
    command = python_command("import time; time.sleep(1000)")
    supervisor = Supervisor(1, command, [sys.executable, "-c", WAITING])
    await supervisor.spawn()
    await supervisor.prepare(2)
    waiting = [one._process.pid for one in supervisor._waiting]
    assert len(waiting) == 2
    await supervisor.stop()
    assert not any(psutil.pid_exists(pid) for pid in waiting)


async def test_a_standby_that_has_ended_is_replaced():
    command = python_command("import time; time.sleep(1000)")
    supervisor = Supervisor(1, command, [sys.executable, "-c", WAITING])
    try:
        await supervisor.prepare(1)
        (first,) = supervisor._waiting
        first._process.kill()
        await first.wait()
        await supervisor.prepare(1)
        (second,) = supervisor._waiting
        assert second is not first
        assert psutil.pid_exists(second._process.pid)
    finally:
        await supervisor.stop()


async def test_a_worker_that_starts_does_not_listen_yet():
    """The socket of the one before it is gone."""
    supervisor = Supervisor(1, python_command("import time; time.sleep(1000)"))
    try:
        await supervisor.spawn()
        supervisor._socket(0).touch()
        assert list(supervisor.listening()) == [0]
        await supervisor.spawn({0: "it is deaf"})
        assert supervisor.listening() == {}
    finally:
        await supervisor.stop()
