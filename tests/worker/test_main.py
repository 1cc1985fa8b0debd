"""The process: start, stop, refusals, and its end with its parent."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slotwise.worker.v1 import worker_pb2, worker_pb2_grpc
from worker.__main__ import main

TIMEOUT_S = 180


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "w.sock"


def command(socket_path: Path) -> list[str]:
    listen = f"unix:{socket_path}"
    return [sys.executable, "-m", "worker", "--listen", listen, "--model", str(socket_path.parent)]


def wait_until_serving(socket_path: Path) -> None:
    with grpc.insecure_channel(f"unix:{socket_path}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        answer = health.Check(request, wait_for_ready=True, timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def process(socket_path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command(socket_path), stderr=subprocess.PIPE, text=True) as worker:
        try:
            wait_until_serving(socket_path)
            yield worker
        finally:
            worker.kill()


def test_ends_cleanly_on_sigterm_and_keeps_its_address(
    process: subprocess.Popen[str], socket_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(socket_path)[3:]) == 1
    assert "another process serves there" in capsys.readouterr().err
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, log
    # The form that scheduler_service/supervisor.py reads.
    line = rf"\d+-\d+-\d+T\d+:\d+:\d+\.\d+Z INFO worker: listening on unix:{socket_path}\n"
    assert re.match(line, log), log


def test_ends_with_its_parent(socket_path: Path) -> None:
    worker = [*command(socket_path), "--exit-with-parent"]
    script = (
        "import subprocess, sys; process = subprocess.Popen(sys.argv[1:]);"
        "print(process.pid, flush=True); process.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, *worker], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_until_serving(socket_path)
        parent.kill()
    psutil.wait_procs([child], timeout=TIMEOUT_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_parent_that_has_ended_before_is_noticed(socket_path: Path) -> None:
    """A scheduler may be killed while its workers import their libraries."""
    worker = [*command(socket_path), "--exit-with-parent", str(os.getppid())]
    assert subprocess.run(worker, timeout=TIMEOUT_S).returncode == 1


class Stream:
    """A scheduler's stream to a worker, which waits for its first message."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: queue.Queue[worker_pb2.RunRequest | None] = queue.Queue()
        self.call = worker_pb2_grpc.WorkerStub(channel).Run(iter(self._requests.get, None))

    def end(self) -> str:
        """Half-closes it; the status that it ends with."""
        self._requests.put(None)
        return self.call.code().name


@contextlib.contextmanager
def worker_with_stream(socket_path: Path, *flags: str) -> Iterator[tuple[Any, Stream]]:
    """The process and a stream that it has taken."""
    process = subprocess.Popen([*command(socket_path), *flags], stderr=subprocess.PIPE, text=True)
    with process as worker, grpc.insecure_channel(f"unix:{socket_path}") as channel:
        try:
            wait_until_serving(socket_path)
            stream = Stream(channel)
            # It is there when another is refused.
            while (code := Stream(channel).end()) != "ALREADY_EXISTS":
                assert code == "INVALID_ARGUMENT"
                assert stream.call.is_active()
            yield worker, stream
        finally:
            worker.kill()


def read_until(worker: subprocess.Popen[str], words: str) -> None:
    assert worker.stderr is not None
    while words not in (line := worker.stderr.readline()):
        assert line, f"no line with {words!r}"


def test_after_sigterm_the_scheduler_may_end_its_stream(socket_path: Path) -> None:
    with worker_with_stream(socket_path) as (worker, stream):
        worker.send_signal(signal.SIGTERM)
        read_until(worker, "waiting for the scheduler to end its stream")
        with grpc.insecure_channel(f"unix:{socket_path}") as channel:
            assert Stream(channel).end() == "UNAVAILABLE"
        assert worker.poll() is None
        assert stream.end() == "INVALID_ARGUMENT"
        _, log = worker.communicate(timeout=TIMEOUT_S)
        assert worker.returncode == 0, log
        assert "WARNING" not in log
        assert "Traceback" not in log


def test_the_second_sigterm_ends_at_once(socket_path: Path) -> None:
    with worker_with_stream(socket_path, "--grace", "1000") as (worker, _):
        worker.send_signal(signal.SIGTERM)
        read_until(worker, "waiting for the scheduler")
        worker.send_signal(signal.SIGTERM)
        _, log = worker.communicate(timeout=TIMEOUT_S)
        assert worker.returncode == 0
        assert "told to end twice" in log


def test_a_stream_that_outlives_the_grace_is_ended(socket_path: Path) -> None:
    with worker_with_stream(socket_path, "--grace", "0.1") as (worker, stream):
        worker.send_signal(signal.SIGTERM)
        _, log = worker.communicate(timeout=TIMEOUT_S)
        assert worker.returncode == 0
        assert "the stream has outlived the grace of 0.1 s" in log
        assert "cannot schedule new futures" not in log
        assert "Traceback" not in log
        assert stream.call.code().name in ("UNAVAILABLE", "CANCELLED")


def test_a_spawned_worker_is_ended_by_its_parent_alone(socket_path: Path) -> None:
    """Whoever ends a service may signal all its processes, and the scheduler drains first."""
    with worker_with_stream(socket_path, "--exit-with-parent") as (worker, _):
        worker.send_signal(signal.SIGTERM)
        worker.send_signal(signal.SIGINT)
        wait_until_serving(socket_path)
        assert worker.poll() is None
        worker.send_signal(signal.SIGUSR1)
        _, log = worker.communicate(timeout=TIMEOUT_S)
        assert worker.returncode == 0
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--listen", "nowhere"], "'nowhere' is neither"),
        (["--listen", "localhost:99999"], "99999"),
        (["--listen", "unix:/no/such/folder/w.sock"], "/no/such/folder does not exist"),
        (["--listen", "localhost:0", "--threads", "0"], "--threads must be at least 1, not 0"),
        (["--listen", "localhost:0", "--device", "tpu"], "'tpu'.*cpu"),
    ],
)
def test_refused_at_once(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--model", "x"]) == 1
    message = capsys.readouterr().err
    assert re.search(named, message)
    assert message.count("\n") == 1
