"""Keeps a scheduler running for `slotwise serve`."""

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from .gateway_keeper import GatewayKeeper
from .output import CliError, Output
from .server_process import Event, ServerProcess, report_event, scheduler_command

# Between starts; a server that has lived for longer than the last is started at once.
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0
# Starts in a row that fail.
_MAX_TRIES = 5
# Exit statuses of processes that were killed; of these, in their first moments, as they were told.
_KILLED = 128
_ASKED = {_KILLED + number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}


class TakesSignals(Protocol):
    """A child, or who keeps one."""

    def send_signal(self, signum: int) -> None:
        """Pass a signal on."""


class WorkerPlaces(Protocol):
    """Knows where the workers are."""

    def tell(self, listener: Callable[[str], None]) -> None:
        """Give the listener, in place of the last one, a line now and at each change."""


class Keeper:
    """One scheduler at a time. One that is killed is followed by another on the same port."""

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        output: Output,
        *,
        restarts: bool = True,
        gateway: GatewayKeeper | None = None,
        workers: WorkerPlaces | None = None,
    ) -> None:
        """`gateway`: runs beside it, from its first readiness to its end. `workers`: where they
        are, if not spawned; the flags then say that the scheduler is told."""
        self._model = model
        self._flags = list(flags)
        self._output = output
        self._restarts = restarts
        self._gateway = gateway
        self._workers = workers
        self._gateway_failure: CliError | None = None
        # Set once somebody wants the end.
        self._is_told = threading.Event()
        self._has_served = False
        self._server = self._spawn()

    def send_signal(self, signum: int) -> None:
        """Pass a signal on; no other scheduler follows.

        The first one drains, another one ends at once. Not as it came: who sends it to all
        processes of a service has sent it to the scheduler too: that would be the second one.
        """
        is_first = not self._is_told.is_set()
        self._is_told.set()
        self._server.send_signal(signal.SIGUSR1 if is_first else signal.SIGUSR2)
        if self._gateway is not None:
            self._gateway.send_signal(signum)

    def run(self) -> None:
        """Return when the scheduler has ended as it was told. CliError when it fails."""
        try:
            self._run()
        finally:
            if self._gateway is not None:
                self._gateway.stop()
        if self._gateway_failure is not None:
            raise self._gateway_failure

    def _run(self) -> None:
        delay_s, num_failures = _FIRST_DELAY_S, 0
        while True:
            started = time.monotonic()
            was_ready = self._follow()
            code = self._server.wait()
            if code == 0 or (self._is_told.is_set() and code in _ASKED):
                return
            num_failures = 0 if was_ready else num_failures + 1
            if not self._may_follow(code, num_failures):
                raise self._server.failure()
            if time.monotonic() - started > _MAX_DELAY_S:
                delay_s = _FIRST_DELAY_S
            self._output.error(f"{self._server.failure()}; it is started anew")
            if self._is_told.wait(delay_s):
                return
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
            self._server = self._spawn()

    def _may_follow(self, code: int, num_failures: int) -> bool:
        """One that was never ready has a reason to fail; a port may be taken for a moment."""
        if self._is_told.is_set() or not self._restarts or not self._has_served:
            return False
        return code > _KILLED or 0 < num_failures <= _MAX_TRIES

    def _end_without_gateway(self, error: CliError) -> None:
        """It was asked for and cannot start."""
        self._gateway_failure = error
        self.send_signal(signal.SIGTERM)

    def _spawn(self) -> ServerProcess:
        command = scheduler_command(self._model, self._flags)
        if self._workers is None:
            return ServerProcess(command, _log_to_stderr)
        server = ServerProcess(command, _log_to_stderr, is_told=True)
        self._workers.tell(server.tell)
        return server

    def _follow(self) -> bool:
        """Shows what the scheduler tells until it ends; whether it was ready."""
        started = time.monotonic()
        ready = _follow_until_ready(self._server, self._output)
        if ready is None:
            return False
        _announce(ready, time.monotonic() - started, self._output)
        if not self._has_served:
            self._has_served = True
            # Another one of port 0 would get another port.
            address = str(ready["address"])
            self._flags += ["--port", address.rpartition(":")[2]]
            if self._gateway is not None:
                self._gateway.start(_reached_at(address), self._end_without_gateway)
        for event in self._server.events():
            if self._output.as_json:
                self._output.json(event)
        return True


def _follow_until_ready(server: ServerProcess, output: Output) -> Event | None:
    """The ready event; None when the child ended before."""
    with output.progress() as report:
        for event in server.events():
            if event.get("event") == "ready":
                return event
            report_event(event, report)
            if output.as_json:
                output.json(event)
    return None


def _announce(ready: Event, seconds: float, output: Output) -> None:
    if output.as_json:
        output.json({**ready, "seconds": round(seconds, 2)})
        return
    num_slots, max_running = ready["num_slots"], ready["max_running"]
    running = "" if max_running == num_slots else f"{max_running} run at once, "
    output.line(
        f"Slotwise ready: {ready['model']} on {ready['address']} ({num_slots} slots x "
        f"{ready['max_seq_len']} tokens, {running}{ready['device']}, {ready['weight_dtype']}, "
        f"TP {ready['tp']}, {seconds:.1f} s)"
    )


def _reached_at(address: str) -> str:
    """From this machine: a server that listens everywhere listens on loopback too."""
    host, _, port = address.rpartition(":")
    loopback = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    return f"{loopback.get(host, host)}:{port}"


@contextmanager
def forwarding_signals(server: TakesSignals) -> Iterator[None]:
    """Pass SIGTERM and SIGINT on to the child, whatever this process is doing.

    The loss of the terminal is SIGTERM to it: it drains.

    A Python handler may wait for the main thread to wake up from a lock; the byte that the
    interpreter writes on arrival does not.
    """
    arrivals, writer = socket.socketpair()
    writer.setblocking(False)

    def forward() -> None:
        while number := arrivals.recv(1):
            signum = number[0]
            server.send_signal(signal.SIGTERM if signum == signal.SIGHUP else signum)

    forwarder = threading.Thread(target=forward, daemon=True)
    forwarder.start()
    before_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    before = {signum: signal.signal(signum, _nothing) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(before_fd)
        writer.close()
        forwarder.join()
        arrivals.close()


def _nothing(signum: int, frame: FrameType | None) -> None:
    """In place of the default action; the wake-up byte has told already."""


def _log_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
