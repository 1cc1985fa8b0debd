"""How commands reach a server, and how signals end them."""

from __future__ import annotations

import signal
import subprocess
import sys

import grpc
import pytest
from certificates import Authority
from clients.scripted_server import scripted_server

TIMEOUT_S = 30


@pytest.mark.parametrize(
    "command", [["generate", "x"], ["replay", "x"], ["doctor"], ["attach", "x"]]
)
def test_every_command_can_be_told_of_tls_and_a_token(slotwise, tmp_path, command):
    authority = Authority(tmp_path, "ca")
    mine, server = authority.pair("client"), authority.pair("server", hosts=("a.example",))
    token = tmp_path / "token"
    token.write_text("secret\n")
    credentials = grpc.ssl_server_credentials([server.content], authority.content, True)
    with scripted_server(credentials=credentials) as served:
        flags = ["--tls-ca", authority.path, "--tls-cert", mine.cert, "--tls-key", mine.key]
        flags += ["--tls-server-name", "a.example", "--token-file", token]
        slotwise(*command, "--server", served.address, *map(str, flags))
        assert "Bearer secret" in served.script.tokens or command[0] in ("replay", "attach")
        assert slotwise(*command, "--tls", "--server", served.address).code in (1, 3)


def test_the_token_of_the_environment(slotwise, served, monkeypatch):
    monkeypatch.setenv("SLOTWISE_TOKEN", "secret")
    assert slotwise("generate", "x", "--server", served.address).code == 0
    assert served.script.tokens == ["Bearer secret"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--token-file", "/no/such"], "--token-file /no/such: "),
        (["--tls-ca", "/no/such"], "/no/such"),
        (["--tls-cert", "/no/such"], "needs its key"),
    ],
)
def test_what_cannot_be_used_is_wrong_usage(slotwise, served, flags, words):
    done = slotwise("generate", "x", *flags, "--server", served.address)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_a_token_over_a_network_needs_a_word(slotwise, monkeypatch):
    monkeypatch.setenv("SLOTWISE_TOKEN", "secret")
    done = slotwise("generate", "x", "--server", "192.0.2.1:1")
    assert done.code == 2
    assert "--insecure-token" in done.err
    assert "secret" not in done.err


@pytest.mark.parametrize(
    ("signum", "code", "message"),
    [
        (signal.SIGINT, 130, ""),
        (signal.SIGTERM, 143, "error: ended by SIGTERM\n"),
        (signal.SIGHUP, 129, "error: ended by SIGHUP\n"),
    ],
)
def test_a_signal_cancels_the_request(lossy, signum, code, message):
    lossy.script.blocked = True
    command = ["generate", "x", "--request-id", "mine", "--server", lossy.address]
    program = start(*command)
    try:
        assert lossy.script.first_delta.wait(TIMEOUT_S)
        program.send_signal(signum)
        out, err = program.communicate(timeout=TIMEOUT_S)
    finally:
        program.kill()
    assert (program.returncode, err) == (code, message)
    # The program waits for the answer, but on a busy machine not long enough.
    assert lossy.script.was_cancelled.wait(TIMEOUT_S)
    assert lossy.script.cancelled == ["mine"]
    assert "error" not in out


def test_who_ignores_the_loss_of_the_terminal_goes_on(served):
    served.script.blocked = True
    command = ["generate", "x", "--json", "--server", served.address]
    program = start(*command, hangup=signal.SIG_IGN)
    try:
        assert served.script.first_delta.wait(TIMEOUT_S)
        program.send_signal(signal.SIGHUP)
        program.send_signal(signal.SIGTERM)
        _, err = program.communicate(timeout=TIMEOUT_S)
    finally:
        program.kill()
    assert err == "error: ended by SIGTERM\n"


def start(*words: str, hangup: signal.Handlers = signal.SIG_DFL) -> subprocess.Popen[str]:
    """`hangup`: what SIGHUP does when the command begins; in a suite under nohup, nothing."""
    command = [sys.executable, "-m", "slotwise_cli", *words]
    pipe = subprocess.PIPE
    before = signal.signal(signal.SIGHUP, hangup)
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    finally:
        signal.signal(signal.SIGHUP, before)
