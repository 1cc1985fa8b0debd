"""What a command of the pages becomes in a test: the same, on the test's server, and with an end.

`python shim.py slotwise serve ...` starts a server on free ports, waits until it is ready and asks
it to end; `chat` gets a line and `/exit`; others ask the server in SLOTWISE_DOCS_SERVER.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import typer

from slotwise_cli.__main__ import build_app
from slotwise_cli.__main__ import main as slotwise

PROGRAM = str(Path(sys.executable).parent / "slotwise")
SERVER = os.environ["SLOTWISE_DOCS_SERVER"]
REQUEST = os.environ["SLOTWISE_DOCS_REQUEST"]
PORTS = ("--port", "--http-port", "--metrics-port")
# What a server says when it may be asked.
READY = {"serve": "Slotwise ready", "gateway": "http://"}
START_TIMEOUT_S = 120


def main(words: list[str]) -> int:
    """The exit status."""
    words = [word.replace("REQUEST_ID", REQUEST).replace("HOST:50051", SERVER) for word in words]
    if words[0] in READY:
        return serve(words)
    if words[0] == "chat":
        sys.stdin = io.StringIO("Hello.\n/exit\n")
    if "--server" in options(words) and "--server" not in words:
        words += ["--server", SERVER]
    sys.argv = [PROGRAM, *words]
    slotwise()
    return 0


def options(words: list[str]) -> set[str]:
    """Of the command that the words name."""
    command = typer.main.get_command(build_app())
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    return {option for one in command.params for option in one.opts}


def serve(words: list[str]) -> int:
    """Until it is ready, then to its end; that is its exit status, 1 when it was never ready."""
    for port in PORTS:
        if port in words:
            words[words.index(port) + 1] = "0"
    if "--port" not in words:
        words += ["--port", "0"]
    if words[0] == "serve" and "--max-seq-len" not in words:
        words += ["--max-seq-len", "512"]
    if words[0] == "gateway" and "--server" not in words:
        words += ["--server", SERVER]
    process = subprocess.Popen([PROGRAM, *words], stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    assert process.stdout is not None
    was_ready = False
    for line in process.stdout:
        print(line, end="")
        if READY[words[0]] in line and not was_ready:
            was_ready = True
            process.send_signal(signal.SIGTERM)
    code = process.wait()
    timer.cancel()
    return code if was_ready else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
