from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest

from slotwise_cli import server_process
from slotwise_cli.output import CliError
from slotwise_cli.server_process import ServerProcess

READY = {"event": "ready", "address": "127.0.0.1:5"}
LOADING = {"event": "loading", "stage": "weights", "done": 5, "total": 10}


def child(body: str, log=None) -> ServerProcess:
    """A child that runs `body`, with `say` to print an event."""
    script = "import json, signal, sys, time\n"
    script += "def say(**event): print(json.dumps(event), flush=True)\n"
    lines: list[str] = [] if log is None else log
    return ServerProcess([sys.executable, "-c", script + textwrap.dedent(body)], lines.append)


def test_progress_then_ready():
    seen = []
    server = child(f"say(**{LOADING}); say(**{READY}); sys.stdin.read(); signal.pause()")
    assert server.wait_ready(lambda *report: seen.append(report)) == READY
    assert seen == [("weights", 5, 10)]
    server.stop()


def test_one_rank_stands_for_all():
    second = {**LOADING, "rank": 1, "done": 9}
    seen = []
    server = child(f"say(**{second}); say(**{LOADING}, rank=0); say(**{READY})")
    server.wait_ready(lambda *report: seen.append(report))
    assert seen == [("weights", 5, 10)]
    server.wait()


def test_the_words_of_the_child_become_the_error():
    log: list[str] = []
    server = child("sys.exit('warming up\\nerror: port 5 is in use;\\nuse another')", log)
    with pytest.raises(CliError, match=r"^port 5 is in use;\nuse another$") as caught:
        server.wait_ready(lambda *_: None)
    assert caught.value.exit_code == 1
    assert log == ["warming up"]


def test_a_crash_without_words_is_told_with_its_status():
    with pytest.raises(CliError, match="status 7; its last words: it printed nothing") as caught:
        child("sys.exit(7)").wait_ready(lambda *_: None)
    assert caught.value.exit_code == 7


def test_a_traceback_gives_its_last_line():
    with pytest.raises(CliError, match="KeyError: 'x'"):
        child("{}['x']").wait_ready(lambda *_: None)


def test_a_signal_counts_as_in_a_shell():
    server = child("signal.raise_signal(signal.SIGKILL)")
    assert server.wait() == 128 + signal.SIGKILL


def test_stop_lets_the_child_drain():
    server = child(
        """
        def drain(*_):
            say(event="drained")
            sys.exit(0)
        signal.signal(signal.SIGTERM, drain)
        say(event="ready", address="a:1")
        while True: signal.pause()
        """
    )
    server.wait_ready(lambda *_: None)
    server.stop()
    assert server.wait() == 0
    assert list(server.events()) == [{"event": "drained"}]


def test_stop_kills_a_child_that_does_not_end(monkeypatch):
    monkeypatch.setattr("slotwise_cli.server_process.STOP_TIMEOUT_S", 0.1)
    server = child(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(event="ready", address="a:1")
        while True: signal.pause()
        """
    )
    server.wait_ready(lambda *_: None)
    server.stop()
    assert server.wait() == 128 + signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_the_child_ends_with_its_parent():
    body = "import signal; print('{}', flush=True); signal.pause()"
    script = f"""
import sys, json
from slotwise_cli.server_process import ServerProcess
server = ServerProcess([sys.executable, "-c", {body!r}], print)
next(server.events())
print(json.dumps(server._process.pid), flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = json.loads(parent.stdout.readline())
    watch = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    assert select.select([watch], [], [], 30)[0], "the child outlived its parent"
    os.close(watch)


def test_sigterm_ends_the_server_too(monkeypatch, tmp_path):
    ended = tmp_path / "ended"
    script = f"""
        import json, pathlib, signal, sys
        def end(*_):
            pathlib.Path({str(ended)!r}).write_text("")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print(json.dumps({{"event": "ready", "address": "here:1"}}), flush=True)
        while True:
            signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    monkeypatch.setattr(server_process, "scheduler_command", lambda model, flags: command)
    before = signal.getsignal(signal.SIGTERM)

    def be_ended() -> None:
        with server_process.running_server(tmp_path, [], lambda *_: None):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        be_ended()
    assert caught.value.code == 128 + signal.SIGTERM
    assert ended.exists()
    assert signal.getsignal(signal.SIGTERM) is before
