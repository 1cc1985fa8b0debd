"""The workers of `slotwise serve --launcher ray`: a process beside this one has Ray place them and
tells where they are; what it tells goes on to the scheduler."""

import importlib.util
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from .output import CliError, Output, Report
from .server_process import Event, ServerProcess, report_event

# Between drivers that end.
_FIRST_DELAY_S: Final = 1.0
_MAX_DELAY_S: Final = 30.0

Listener = Callable[[str], None]


class RayLauncher:
    """One driver at a time. One that ends, as it does when its cluster is lost, is followed by
    another, which has all workers placed anew."""

    def __init__(self, model: Path, flags: Sequence[str], world_size: int, output: Output) -> None:
        """CliError when Ray is not installed."""
        if importlib.util.find_spec("ray") is None:
            raise CliError(
                "--launcher ray needs Ray, which is not installed; pip install 'slotwise[ray]'",
                exit_code=2,
            )
        driver = [sys.executable, "-m", "slotwise_cli.ray_driver", "--model", str(model)]
        self._command = [*driver, "--tp", str(world_size), *flags]
        self._output = output
        self._lock = threading.Lock()
        self._nowhere = _line([None] * world_size)
        self._places = self._nowhere
        self._listener: Listener | None = None
        self._is_told = threading.Event()
        self._driver = self._spawn()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def wait(self, report: Report) -> None:
        """Returns when every worker listens. CliError, with the driver's words, when it ends
        before."""
        for event in self._driver.events():
            report_event(event, report)
            if self._heard(event) and None not in event["workers"]:
                self._thread.start()
                return
        raise self._driver.failure()

    def tell(self, listener: Listener) -> None:
        """As WorkerPlaces."""
        with self._lock:
            self._listener = listener
            listener(self._places)

    def stop(self) -> None:
        """Ends the workers, and gives back what they had of the cluster."""
        with self._lock:
            self._is_told.set()
            driver = self._driver
        driver.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _keep(self) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            for event in self._driver.events():
                if self._heard(event):
                    delay_s = _FIRST_DELAY_S
            self._set_places(self._nowhere)
            if self._is_told.is_set():
                return
            failure = self._driver.failure()
            self._output.error(f"{failure}; the workers are placed anew in {delay_s:g} s")
            self._is_told.wait(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
            with self._lock:
                if self._is_told.is_set():
                    return
                self._driver = self._spawn()

    def _spawn(self) -> ServerProcess:
        # It ends what it has begun, also after us.
        name, end_signal = "the driver of Ray", signal.SIGTERM
        return ServerProcess(self._command, _log_to_stderr, name, end_signal=end_signal)

    def _heard(self, event: Event) -> bool:
        if event.get("event") != "workers":
            return False
        self._set_places(_line(event["workers"], event["rendezvous"]))
        return True

    def _set_places(self, line: str) -> None:
        with self._lock:
            self._places = line
            if self._listener is not None:
                self._listener(line)


@contextmanager
def running_ray_workers(
    model: Path, flags: Sequence[str], world_size: int, output: Output
) -> Iterator[RayLauncher]:
    """Workers that listen, for the time of a block."""
    # SIGTERM as an exception, so that what was begun is ended.
    before = signal.signal(signal.SIGTERM, _end)
    launcher = RayLauncher(model, flags, world_size, output)
    try:
        with output.progress() as report:
            launcher.wait(report)
        yield launcher
    finally:
        launcher.stop()
        signal.signal(signal.SIGTERM, before)


def _line(workers: Sequence[str | None], rendezvous: str = "") -> str:
    return json.dumps({"workers": workers, "rendezvous": rendezvous})


def _end(signum: int, _frame: object) -> None:
    sys.exit(128 + signum)


def _log_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
