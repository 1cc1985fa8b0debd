"""Keeps a gateway, which speaks the OpenAI API over HTTP, running beside a server."""

import errno
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

from .output import CliError, Output
from .server_process import Event, ServerProcess

# Between starts; one that has lived for longer than the last is started at once.
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0


def gateway_command(flags: Sequence[str]) -> list[str]:
    """The command line of a gateway."""
    return [sys.executable, "-m", "slotwise_gateway", "--events", *flags]


class GatewayKeeper:
    """One gateway at a time. One that dies is followed by another on the same port."""

    def __init__(self, flags: Sequence[str], output: Output, *, restarts: bool = True) -> None:
        self._flags = list(flags)
        self._output = output
        self._restarts = restarts
        # Set once somebody wants the end.
        self._is_told = threading.Event()
        self._lock = threading.Lock()
        self._process: ServerProcess | None = None
        self._has_served = False
        self._thread: threading.Thread | None = None

    def start(self, server: str, on_failure: Callable[[CliError], None]) -> None:
        """Beside the caller, once. `on_failure` is called when it cannot start at all."""
        if self._thread is not None:
            return
        self._flags += ["--server", server]

        def run() -> None:
            try:
                self.run()
            except CliError as error:
                on_failure(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Return when the gateway has ended as it was told. CliError when it fails."""
        delay_s = _FIRST_DELAY_S
        while (process := self._spawn()) is not None:
            started = time.monotonic()
            for event in process.events():
                self._show(event)
            code = process.wait()
            if code == 0 or self._is_told.is_set():
                return
            if not self._restarts or not self._has_served:
                raise process.failure()
            if time.monotonic() - started > _MAX_DELAY_S:
                delay_s = _FIRST_DELAY_S
            self._output.error(f"{process.failure()}; it is started anew")
            if self._is_told.wait(delay_s):
                return
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    def send_signal(self, signum: int) -> None:
        """Pass a signal on; no other gateway follows. The first drains, another ends at once."""
        with self._lock:
            is_first = not self._is_told.is_set()
            self._is_told.set()
            if self._process is not None:
                self._process.send_signal(signal.SIGUSR1 if is_first else signal.SIGUSR2)

    def stop(self) -> None:
        """Ends it at once, and waits: its server is gone."""
        for _ in range(2):
            self.send_signal(signal.SIGTERM)
        if self._thread is not None:
            self._thread.join()

    def _spawn(self) -> ServerProcess | None:
        with self._lock:
            if self._is_told.is_set():
                return None
            command = gateway_command(self._flags)
            self._process = ServerProcess(command, _log_to_stderr, "the gateway")
            return self._process

    def _show(self, event: Event) -> None:
        if event.get("event") != "ready":
            return
        address = str(event["address"])
        if not self._has_served:
            self._has_served = True
            # Another one of port 0 would get another port.
            self._flags += ["--port", address.rpartition(":")[2]]
        if self._output.as_json:
            self._output.json({"event": "gateway", "address": address})
        else:
            self._output.line(f"OpenAI API on {address}/v1")


def check_port(host: str, port: int) -> None:
    """CliError when nothing can listen there: better told before a model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), port), family=family).close()
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        advice = "; another --http-port may be free, 0 takes one" if is_taken else ""
        raise CliError(
            f"the gateway cannot listen on {host} port {port}: {error.strerror or error}{advice}"
        ) from error


def _log_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
