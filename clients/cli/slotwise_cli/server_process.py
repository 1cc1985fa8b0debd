"""The scheduler or a gateway as a child process, followed through the JSON lines of `--events`."""

import contextlib
import ctypes
import json
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from .output import CliError, Report

STOP_TIMEOUT_S: Final = 60.0
_PR_SET_PDEATHSIG: Final = 1

Event = dict[str, Any]
LogSink = Callable[[str], None]


def scheduler_command(model: Path, flags: Sequence[str]) -> list[str]:
    """The command line of a scheduler that serves `model`."""
    command = [sys.executable, "-m", "scheduler_service", "--model", str(model), "--events"]
    return [*command, *flags]


class ServerProcess:
    """A running child; it ends when this process does.

    It runs in a session of its own, so that a Ctrl-C reaches it once: through us.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: LogSink,
        name: str = "the scheduler",
        *,
        is_told: bool = False,
        end_signal: int = signal.SIGKILL,
    ) -> None:
        """`name`: what it is called when it fails. `is_told`: it reads what `tell` is given.
        `end_signal`: what it gets when this process ends."""
        self._name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if is_told else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=partial(_end_with_parent, end_signal) if sys.platform == "linux" else None,
        )
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._last_lines: deque[str] = deque(maxlen=50)
        # The paragraph in which the child says why it ends, the last that it prints.
        self._error: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=self._read_log, args=(log,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def events(self) -> Iterator[Event]:
        """The child's events as they come; ends when the child does."""
        while (event := self._events.get()) is not None:
            yield event

    def wait_ready(self, report: Report) -> Event:
        """The ready event; CliError with the child's own words when it ends before."""
        for event in self.events():
            if event.get("event") == "ready":
                return event
            report_event(event, report)
        raise self.failure()

    def tell(self, line: str) -> None:
        """Writes a line to the child's standard input; nothing once it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def failure(self) -> CliError:
        """Why the child ended."""
        code = self.wait()
        if self._error:
            return CliError("\n".join(self._error).removeprefix("error: "), exit_code=code or 1)
        if code > 128:
            # What it said last has nothing to do with that.
            return CliError(f"{self._name} was killed by signal {code - 128}", exit_code=code)
        last = self._last_lines[-1] if self._last_lines else "it printed nothing"
        message = f"{self._name} ended with status {code}; its last words: {last}"
        return CliError(message, exit_code=code or 1)

    def send_signal(self, signum: int) -> None:
        """Pass a signal on."""
        self._process.send_signal(signum)

    def wait(self) -> int:
        """The child's exit status, as a shell would give it (128 + n for signal n)."""
        code = self._process.wait()
        for reader in self._readers:
            reader.join()
        return code if code >= 0 else 128 - code

    def stop(self) -> None:
        """Ask the child to drain and wait for it; kill it when it does not end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self.wait()

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._events.put(json.loads(line))
            except ValueError:
                self._last_lines.append(line.rstrip())
        self._events.put(None)

    def _read_log(self, log: LogSink) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.rstrip()
            if self._error or text.startswith("error: "):
                self._error.append(text)
                continue
            self._last_lines.append(text)
            log(text)


def report_event(event: Event, report: Report) -> None:
    """Show a loading event as progress; the first rank stands for all, they do the same."""
    if event.get("event") == "loading" and event.get("rank", 0) == 0:
        stage = str(event.get("stage", "loading"))
        report(stage, int(event.get("done", 0)), int(event.get("total", 0)))


@contextmanager
def running_server(
    model: Path, flags: Sequence[str], report: Report, log: LogSink | None = None
) -> Iterator[str]:
    """A server on a free port of this machine for the time of a block; gives its address.

    Its log goes to `log`, the last lines when it ends.
    """
    local = ["--host", "127.0.0.1", "--port", "0"]
    server = ServerProcess(scheduler_command(model, [*local, *flags]), log or _drop)
    # SIGTERM as an exception, so that the server is ended with us.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield str(server.wait_ready(report)["address"])
    finally:
        server.stop()
        signal.signal(signal.SIGTERM, before)


def _end(signum: int, _frame: object) -> None:
    sys.exit(128 + signum)


def _drop(line: str) -> None:
    """The log of a helper server is shown only in the error when it fails."""


def _end_with_parent(signum: int) -> None:
    # A scheduler at once: whoever starts another one wants its port and its journal.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
