"""`slotwise top`: a server at work, seat by seat, in a terminal."""

import dataclasses
import itertools
import os
import queue
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group
from rich.live import Live

from slotwise_client import (
    Client,
    DeadlineError,
    Slot,
    SlotwiseError,
    UnauthenticatedError,
    UnavailableError,
)

from .connection import Connection, connects
from .interrupt import Ended
from .output import Output
from .serve import JsonFlag
from .top_state import Figures, Sample, Window
from .top_view import ASCII, UNICODE, Glyphs, Head, Scene, view

# How long an answer may take: a server that hangs is one that does not answer.
_TIMEOUT_S: Final = 5.0
# How soon a key and a new size of the terminal are seen.
_KEYS_S: Final = 0.1
# Of a picture that goes to no terminal, which has no height.
_NO_LIMIT: Final = 10_000
_NOT_NOW = (UnavailableError, DeadlineError)


@connects
def top(
    connection: Connection,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")
    ] = 1.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print one view and end, as where stdout is no terminal."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Watch a server: seats, queue, speed, latencies. q ends.

    With --json one object per interval, without an end unless --once says so.
    """
    with connection.client() as client:
        source = _Source(client, connection.server)
        if as_json:
            _write_json(source, interval, once)
            return
        console = Console(highlight=False)
        if once or not console.is_terminal or console.is_dumb_terminal:
            _print_once(source, interval, console)
        else:
            _watch(source, interval, console)


@dataclass(frozen=True, slots=True)
class _Look:
    """What one look found: a sample, or why the server does not answer."""

    head: Head
    sample: Sample | None
    error: SlotwiseError | None = None
    no_seats: str = ""

    @property
    def lost(self) -> str:
        return "" if self.error is None else " ".join(self.error.message.split())


class _Source:
    """Asks a server how it is."""

    def __init__(self, client: Client, address: str) -> None:
        self.address = address
        self._client = client
        self._head = Head(address)

    def look(self) -> _Look:
        """SlotwiseError where the server answers that it will not tell."""
        try:
            load = self._client.load(timeout=_TIMEOUT_S)
            slots, no_seats = self._slots()
            self._know()
        except _NOT_NOW as error:
            # Another one may come back.
            self._head = Head(self.address, self._head.model)
            return _Look(self._head, None, error)
        return _Look(self._head, Sample(time.monotonic(), load, slots), no_seats=no_seats)

    def _slots(self) -> tuple[tuple[Slot, ...] | None, str]:
        try:
            return tuple(self._client.slots(timeout=_TIMEOUT_S)), ""
        except (*_NOT_NOW, UnauthenticatedError):
            raise
        except SlotwiseError as error:
            return None, error.message

    def _know(self) -> None:
        """What does not change while the server runs; not told before its workers are there."""
        if self._head.version:
            return
        try:
            model = self._client.model_info(timeout=_TIMEOUT_S)
            server = self._client.server_info(timeout=_TIMEOUT_S)
        except _NOT_NOW:
            return
        started_s = time.time() - server.uptime_ns / 1e9
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started_s))
        self._head = Head(self.address, model.name, server.version, server.max_queue_len, since)


class _Top:
    """The picture: what was seen, whether it stands still."""

    def __init__(self, address: str, *, has_keys: bool) -> None:
        self._address = address
        self._window = Window()
        self._has_keys = has_keys
        self._look: _Look | None = None
        self._no_seats = ""
        self._figures: Figures | None = None
        self._is_paused = False
        self.is_ended = False

    def see(self, look: _Look) -> None:
        if look.sample is not None:
            self._window.add(look.sample)
            self._no_seats = look.no_seats
        if self._is_paused:
            return
        self._look = look
        if look.sample is not None:
            self._figures = self._window.figures()

    def press(self, key: str) -> None:
        if key == "q":
            self.is_ended = True
        elif key == "p":
            self._is_paused = not self._is_paused
        elif key == "r" and self._figures is not None:
            self._window.reset()
            self._figures = self._window.figures()

    def scene(self) -> Scene:
        if self._look is None:
            return Scene(Head(self._address), None, has_keys=self._has_keys)
        return Scene(
            self._look.head,
            self._figures,
            self._look.lost,
            self._no_seats,
            self._is_paused,
            self._has_keys,
        )


class _Looking:
    """Looks at each interval in a thread, so that a key need not wait for an answer."""

    def __init__(self, source: _Source, interval_s: float) -> None:
        self._source = source
        self._interval_s = interval_s
        self._is_over = threading.Event()
        self._found: queue.SimpleQueue[_Look | SlotwiseError] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def found(self) -> Iterator[_Look]:
        """What was found since the last call; the SlotwiseError that ended the looking."""
        while not self._found.empty():
            look = self._found.get()
            if isinstance(look, SlotwiseError):
                raise look
            yield look

    def stop(self) -> None:
        self._is_over.set()

    def _run(self) -> None:
        next_s = time.monotonic()
        try:
            while not self._is_over.is_set():
                self._found.put(self._source.look())
                next_s = max(next_s + self._interval_s, time.monotonic())
                self._is_over.wait(next_s - time.monotonic())
        except SlotwiseError as error:
            if not self._is_over.is_set():
                self._found.put(error)


def _watch(source: _Source, interval_s: float, console: Console) -> None:
    has_keys = sys.stdin.isatty()
    picture = _Top(source.address, has_keys=has_keys)
    looking = _Looking(source, interval_s)
    with (
        _ended_by_sigterm(),
        _keys(has_keys),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        try:
            shown: object = None
            while not picture.is_ended:
                for look in looking.found():
                    picture.see(look)
                state = (picture.scene(), console.size)
                if state != shown:
                    live.update(_rendered(state[0], console, console.height), refresh=True)
                    shown = state
                for key in _pressed(has_keys):
                    picture.press(key)
        finally:
            looking.stop()


def _print_once(source: _Source, interval_s: float, console: Console) -> None:
    """Of two looks, since one alone knows no rates. The server must be there."""
    picture = _Top(source.address, has_keys=False)
    for pause_s in (0.0, interval_s):
        time.sleep(pause_s)
        look = source.look()
        if look.error is not None:
            raise look.error
        picture.see(look)
    console.print(_rendered(picture.scene(), console, _NO_LIMIT))


def _write_json(source: _Source, interval_s: float, once: bool) -> None:
    window, output = Window(), Output(as_json=True)
    for number in itertools.count():
        look = source.look()
        told = _json(look, window)
        if once and look.error is not None:
            raise look.error
        if not once or number == 1:
            output.json(told)
        if once and number == 1:
            return
        time.sleep(interval_s)


def _json(look: _Look, window: Window) -> dict[str, Any]:
    told: dict[str, Any] = {
        "server": look.head.address,
        "model": look.head.model or None,
        "version": look.head.version or None,
        "max_queue_len": look.head.max_queue_len or None,
        "unreachable": look.lost or None,
        "no_seats": look.no_seats or None,
    }
    if look.sample is None:
        return {**told, "figures": None}
    window.add(look.sample)
    return {**told, "figures": dataclasses.asdict(window.figures())}


def _rendered(scene: Scene, console: Console, height: int) -> Group:
    return Group(*view(scene, console.width, height, _glyphs(console)))


def _glyphs(console: Console) -> Glyphs:
    is_unicode = console.encoding.lower().replace("-", "").startswith("utf8")
    return UNICODE if is_unicode and not console.is_dumb_terminal else ASCII


def _pressed(has_keys: bool) -> str:
    """Waits a moment for keys."""
    if not has_keys:
        time.sleep(_KEYS_S)
        return ""
    fd = sys.stdin.fileno()
    if not select.select([fd], [], [], _KEYS_S)[0]:
        return ""
    # Nothing: the terminal is gone, and there is nobody to watch.
    return os.read(fd, 64).decode(errors="replace") or "q"


@contextmanager
def _keys(has_keys: bool) -> Iterator[None]:
    """Keys come at once, unshown. Ctrl-Z does nothing: it would leave the screen behind."""
    if not has_keys:
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        modes = termios.tcgetattr(fd)
        modes[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSANOW, modes)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """As an exception, so that the terminal is left as it was."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(signum: int, frame: FrameType | None) -> None:
    raise Ended(signum)
