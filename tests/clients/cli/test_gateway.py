"""The gateway's commands: `slotwise gateway`, and the gateway beside `slotwise serve`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from slotwise_cli.gateway_keeper import GatewayKeeper, check_port
from slotwise_cli.output import CliError, Output

TIMEOUT_S = 120


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "slotwise_cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def events(program: subprocess.Popen[str], *kinds: str) -> list[dict]:
    """One of each kind, as they come."""
    found = []
    assert program.stdout is not None
    for kind in kinds:
        for line in program.stdout:
            event = json.loads(line)
            if event["event"] == kind:
                found.append(event)
                break
        else:
            assert program.stderr is not None
            raise AssertionError(program.stderr.read())
    return found


def end(program: subprocess.Popen[str]) -> int:
    program.send_signal(signal.SIGTERM)
    try:
        program.communicate(timeout=TIMEOUT_S)
    finally:
        program.kill()
        program.wait()
    return program.returncode


def children(pid: int, module: str) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if module in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
                found.append(int(child))
    return found


def models(address: str) -> list[str]:
    with urllib.request.urlopen(f"{address}/v1/models", timeout=TIMEOUT_S) as answer:
        return [card["id"] for card in json.load(answer)["data"]]


def test_a_gateway_by_itself(served):
    words = ("--server", served.address, "--port", "0", "--model-alias", "gpt")
    program = start("gateway", *words)
    try:
        line = program.stdout.readline()
        ready = "OpenAI API on http://127.0.0.1:"
        assert line.startswith(ready), line or program.stderr.read()
        assert models(line.split()[-1].removesuffix("/v1")) == ["script", "gpt"]
    finally:
        assert end(program) == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--grace", "-1"], 2, "grace is -1"),
        (["--tls-ca", "/nowhere"], 1, "/nowhere"),
        (["--https-cert", "/nowhere", "--https-key", "/nowhere"], 1, "https-cert /nowhere"),
        (["--host", "no.such.host.invalid"], 1, "cannot listen on no.such.host.invalid"),
    ],
)
def test_a_gateway_that_cannot_be(slotwise, words, code, message):
    done = slotwise("gateway", "--port", "0", *words)
    assert done.code == code
    assert message in done.err
    assert "Traceback" not in done.err


def test_a_port_that_is_taken(slotwise):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = slotwise("gateway", "--port", port)
        assert (done.code, f"port {port}" in done.err) == (1, True)
        # Before a model is loaded.
        done = slotwise("serve", "/", "--http-port", port)
        assert (done.code, f"port {port}" in done.err) == (1, True)
        assert "--http-port" in done.err


def test_settings_that_do_not_go_together(slotwise):
    done = slotwise("serve", "/", "--http-host", "::1")
    assert (done.code, "--http-port is not" in done.err) == (2, True)
    done = slotwise("serve", "/", "--http-port", "0", "--tls-cert", "c")
    assert (done.code, "slotwise gateway --tls-ca" in done.err) == (2, True)


def test_beside_a_server(tmp_path):
    folder = tmp_path / "tiny"
    make_checkpoint(folder, "llama", tokenizer=True)
    words = ("--port", "0", "--http-port", "0", "--max-seq-len", "64", "--json")
    program = start("serve", str(folder), *words)
    try:
        _, first = events(program, "ready", "gateway")
        assert models(first["address"]) == ["tiny"]
        (pid,) = children(program.pid, "slotwise_gateway")
        os.kill(pid, signal.SIGKILL)
        (second,) = events(program, "gateway")
        assert second == first
        (server,) = children(program.pid, "scheduler_service")
        os.kill(server, signal.SIGKILL)
        events(program, "ready")
        (alive,) = children(program.pid, "slotwise_gateway")
        assert alive != pid
    finally:
        assert end(program) == 0
    with pytest.raises(OSError):
        models(first["address"])


def test_a_gateway_that_cannot_start_ends_its_server():
    """Told by the caller's way of failing, not by a thread that dies."""
    failures = []
    keeper = GatewayKeeper(["--grace", "-1"], Output(as_json=True))
    keeper.start("127.0.0.1:1", failures.append)
    keeper._thread.join(TIMEOUT_S)
    (failure,) = failures
    assert "grace is -1" in failure.message


def test_check_port():
    check_port("127.0.0.1", 0)
    check_port("::1", 0)
    with pytest.raises(CliError, match="cannot listen on 203"):
        check_port("203.0.113.7", 0)
