"""A worker that waits for its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

TIMEOUT_S = 120


def standby(sent: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worker", "--standby", "--exit-with-parent", str(os.getpid())]
    return subprocess.run(command, input=sent, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_it_ends_when_nobody_will_tell_it():
    done = standby("")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (json.dumps(["--listen", "nowhere", "--model", "x"]), "--listen 'nowhere'"),
        (json.dumps({"listen": "x"}), "no list of words"),
        ("nonsense\n", "worker: "),
    ],
)
def test_what_it_is_told_is_checked_as_any_command_line(sent, words):
    done = standby(sent)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
