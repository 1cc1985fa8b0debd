"""The commands with the real scheduler and worker behind them, on a tiny random checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from certificates import Authority

from checkpoints import make_checkpoint
from slotwise_cli.keeper import forwarding_signals
from slotwise_cli.serve import server_flags
from slotwise_client import Client, Delta, Health, UnavailableError

TIMEOUT_S = 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_checkpoint(folder, "llama", tokenizer=True)
    return folder


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "slotwise_cli", "serve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_one_line_when_ready_an_answer_and_a_clean_end(checkpoint, slotwise):
    server = start(
        str(checkpoint),
        "--port",
        "0",
        "--num-slots",
        "3",
        "--max-running",
        "2",
        "--max-seq-len",
        "64",
    )
    try:
        line = server.stdout.readline()
        found = re.fullmatch(
            r"Slotwise ready: tiny on (127\.0\.0\.1:\d+) \(3 slots x 64 tokens, 2 run at once, "
            r"cpu, \w+, TP 1, \d+\.\d s\)\n",
            line,
        )
        assert found, line or server.stderr.read()
        words = ["generate", "a b", "--max-new-tokens", "4", "--ignore-eos", "--json"]
        done = slotwise(*words, "--temperature", "0", "--server", found[1])
        assert done.code == 0, done.err
        assert len(json.loads(done.out)["token_ids"]) == 4
        looked = json.loads(slotwise("doctor", "--json", "--server", found[1]).out)
        whats = [finding["what"] for finding in looked["findings"]]
        assert "worker 0 memory" in whats
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=TIMEOUT_S)
    finally:
        server.kill()
        server.wait()
    assert (server.returncode, out) == (0, ""), err


def test_json_lines_until_ready(checkpoint):
    server = start(str(checkpoint), "--port", "0", "--max-seq-len", "64", "--json")
    try:
        events = []
        while not events or events[-1]["event"] != "ready":
            events.append(json.loads(server.stdout.readline()))
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=TIMEOUT_S)
    finally:
        server.kill()
        server.wait()
    assert events[0]["event"] == "loading"
    assert events[-1]["model"] == "tiny"
    assert events[-1]["max_seq_len"] == 64
    assert server.returncode == 0, err


def test_a_taken_port_is_one_clear_line(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = start(str(checkpoint), "--port", port)
        out, err = server.communicate(timeout=TIMEOUT_S)
    assert server.returncode == 1
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert port in errors[0]


def test_settings_that_cannot_be_are_wrong_usage_in_one_line(checkpoint):
    server = start(str(checkpoint), "--dtype", "int4")
    out, err = server.communicate(timeout=TIMEOUT_S)
    assert (server.returncode, out) == (2, "")
    assert err.count("\n") == 1
    assert "--dtype: invalid choice: 'int4'" in err


def test_what_a_worker_refuses_is_told_in_its_words(checkpoint):
    server = start(str(checkpoint), "--port", "0", "--device", "cpu", "--dtype", "float16")
    out, err = server.communicate(timeout=TIMEOUT_S)
    assert (server.returncode, out) == (1, "")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "worker 0: weight_dtype 'float16' is not supported" in errors[0]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_it_is_ready_ends_it(checkpoint, signum):
    # On a busy machine it may be ready before we are: then once more.
    for _ in range(5):
        server = start(str(checkpoint), "--port", "0")
        try:
            server.stderr.readline()  # the first stage of loading
            server.send_signal(signum)
            out, _ = server.communicate(timeout=TIMEOUT_S)
        finally:
            server.kill()
            server.wait()
        assert server.returncode == 0
        if not out:
            break
    assert out == ""


def test_no_such_folder(slotwise):
    done = slotwise("serve", "/no/such/model")
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: no folder '/no/such/model'; give a checkpoint folder, or `demo`\n"


def test_a_signal_is_passed_on_although_the_main_thread_sleeps():
    passed = threading.Event()

    class Child:
        def send_signal(self, number: int) -> None:
            if number == signal.SIGTERM:
                passed.set()

    before = signal.getsignal(signal.SIGTERM)
    release = threading.Event()
    other = threading.Thread(target=release.wait, daemon=True)
    other.start()
    try:
        with forwarding_signals(Child()):
            # Taken by another thread, the signal does not wake this one from its lock.
            sender = threading.Timer(0.2, signal.pthread_kill, (other.ident, signal.SIGTERM))
            sender.start()
            assert passed.wait(TIMEOUT_S)
    finally:
        release.set()
        other.join()
    # Whatever it was: the tests before this one are of the same process.
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_is_ready_where_nobody_may_call_without_a_token(checkpoint, tmp_path):
    pair = Authority(tmp_path, "ca").pair("server")
    tokens = tmp_path / "tokens.json"
    tokens.touch(mode=0o600)
    tokens.write_text('[{"name": "alice", "token": "alice-0123456789"}]')
    tls = ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    server = start(str(checkpoint), "--port", "0", *tls, "--tokens", str(tokens))
    try:
        line = server.stdout.readline()
        ready = "Slotwise ready: tiny on 127.0.0.1:"
        assert line.startswith(ready), line or server.stderr.read()
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=TIMEOUT_S)
    finally:
        server.kill()
        server.wait()
    assert (server.returncode, out) == (0, ""), err


def test_a_token_file_that_all_may_read_is_one_clear_line(checkpoint, tmp_path):
    tokens = tmp_path / "tokens.json"
    tokens.write_text('[{"name": "alice", "token": "alice-0123456789"}]')
    tokens.chmod(0o644)
    server = start(str(checkpoint), "--port", "0", "--tokens", str(tokens))
    out, err = server.communicate(timeout=TIMEOUT_S)
    assert (server.returncode, out) == (1, "")
    assert err.startswith(f"error: {tokens} holds a secret, and its mode is 0644")
    assert err.count("\n") == 1


def test_switches_are_sent_only_when_on():
    flags = server_flags(no_reflection=True, insecure_tokens=False, tokens="t")
    assert flags == ["--no-reflection", "--tokens", "t"]


def test_flags_are_sent_only_when_set():
    assert server_flags(port=0, num_slots=None, kv_dtype="bfloat16") == [
        "--port",
        "0",
        "--kv-dtype",
        "bfloat16",
    ]


def scheduler_of(server: subprocess.Popen[str]) -> int:
    (pid,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return int(pid)


def test_a_scheduler_that_is_killed_is_started_anew(checkpoint, tmp_path):
    """On the same port; its requests go on from the journal."""
    server = start(str(checkpoint), "--port", "0", "--json", "--journal", str(tmp_path / "j"))
    try:
        first = ready_event(server)
        with Client(first["address"]) as client:
            options = {"max_new_tokens": 200, "ignore_eos": True, "seed": 1, "temperature": 1.0}
            want = client.complete([5, 6], **options).token_ids
            got = []
            for event in client.generate([5, 6], **options):
                if not isinstance(event, Delta):
                    continue
                if not got:
                    os.kill(scheduler_of(server), signal.SIGKILL)
                got += event.token_ids
            assert tuple(got) == tuple(want)
        assert ready_event(server)["address"] == first["address"]
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=TIMEOUT_S)
        assert server.returncode == 0
        assert "killed by signal 9" in err
        assert "started anew" in err
    finally:
        server.kill()
        server.communicate()


def test_a_signal_to_all_processes_drains(tmp_path):
    """As systemd and others send it; one more to `serve` ends at once."""
    make_checkpoint(tmp_path, "qwen3", tokenizer=True, max_position_embeddings=1 << 16)
    # The second one has far more than it is left time for.
    for is_hasty, num_tokens in ((False, 3000), (True, 60_000)):
        sizes = ("--num-slots", "1", "--max-seq-len", "65536")
        server = start(str(tmp_path), "--port", "0", "--json", *sizes)
        address = ready_event(server)["address"]
        with Client(address, reconnect=False) as client:
            options = {"max_new_tokens": num_tokens, "ignore_eos": True, "seed": 1}
            stream = client.generate([5, 6], **options)
            tokens = 0
            while not tokens:
                tokens += len(getattr(next(stream), "token_ids", ()))
            for pid in (scheduler_of(server), server.pid):
                os.kill(pid, signal.SIGTERM)
            if is_hasty:
                # Two that wait to be delivered are one.
                while client.health() is Health.SERVING:
                    pass
                os.kill(server.pid, signal.SIGTERM)
                with pytest.raises(UnavailableError):
                    list(stream)
            else:
                tokens += sum(len(getattr(event, "token_ids", ())) for event in stream)
                assert tokens == num_tokens
        server.communicate(timeout=TIMEOUT_S)
        assert server.returncode == 0


def test_it_ends_with_a_killed_scheduler_when_asked_to(checkpoint):
    server = start(str(checkpoint), "--port", "0", "--json", "--no-restart")
    try:
        ready_event(server)
        os.kill(scheduler_of(server), signal.SIGKILL)
        _, err = server.communicate(timeout=TIMEOUT_S)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 137
    assert "killed by signal 9" in err


def ready_event(server: subprocess.Popen[str]) -> dict:
    while True:
        event = json.loads(server.stdout.readline())
        if event["event"] == "ready":
            return event
