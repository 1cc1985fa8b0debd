"""The process: start, stop, refusals, and its end with its parent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from worker.__main__ import main

TIMEOUT_S = 60


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
