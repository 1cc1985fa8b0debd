"""Measurements that end early, by signals to the program and to a real server: they are kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.servers import Server, running_server
from slotwise_client import Client

KINDS = {
    "ladder": ("--concurrency", "1,2", "--new-tokens", "20"),
    "arrivals": ("--rates", "10", "--duration-s", "0.5", "--warm-up-s", "0"),
    "interleave": ("--streams", "2", "--long-tokens", "100", "--window-s", "0.1"),
}
WAIT_S = 60


@contextmanager
def benchmark(kind: str, server: Server, file: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in its third round of many."""
    command = [sys.executable, "-m", "slotwise_cli", "bench", kind, *KINDS[kind]]
    command += ["--repeats", "100000", "--server", server.address, "--json-file", str(file)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert any("round 3 of" in line for line in process.stderr)
            yield process
        finally:
            process.kill()


def check_kept(file: Path, words: str) -> None:
    kept = json.loads(file.read_text())
    assert not kept["complete"]
    assert words in kept["incomplete_because"]
    assert kept["figures"]
    assert all(len(figure["rounds"]) >= 2 for figure in kept["figures"].values())


@pytest.mark.parametrize(
    ("kind", "signum"),
    [
        ("ladder", signal.SIGINT),
        ("arrivals", signal.SIGTERM),
        ("interleave", signal.SIGHUP),
    ],
)
def test_signals_keep_what_was_measured(small_server, tmp_path, kind, signum):
    with benchmark(kind, small_server, tmp_path / "a.json") as process:
        process.send_signal(signum)
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + signum
    assert "incomplete" in told
    words = "interrupted" if signum == signal.SIGINT else f"ended by {signum.name}"
    check_kept(tmp_path / "a.json", words)
    with Client(small_server.address) as client:
        assert client.load().num_waiting == 0


@pytest.mark.parametrize(
    ("kind", "signum"), [("ladder", signal.SIGKILL), ("arrivals", signal.SIGTERM)]
)
def test_a_server_that_is_killed_or_drains_leaves_what_was_measured(tmp_path, kind, signum):
    from checkpoints import make_checkpoint

    make_checkpoint(tmp_path / "model", "qwen3", tokenizer=True)
    with running_server(tmp_path / "model", "--grace", "30") as server:
        with benchmark(kind, server, tmp_path / "a.json") as process:
            server.process.send_signal(signum)
            _, told = process.communicate(timeout=WAIT_S)
        server.process.wait(WAIT_S)
    assert process.returncode == 3, told
    check_kept(tmp_path / "a.json", "")
