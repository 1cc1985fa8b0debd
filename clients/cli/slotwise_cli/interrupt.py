"""Signals to a command: a request that it reads is ended with it."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from slotwise_client import Stream

# Ctrl-C, a polite end, and the loss of the terminal.
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """A signal told the program to end. No Exception: nothing on the way out handles it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.message = f"ended by {signal.Signals(signum).name}"
        self.exit_code = 128 + signum


class Interrupt:
    """The first of some signals that came."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._came = threading.Event()

    def set(self, signum: int, frame: FrameType | None) -> None:
        """As a signal handler."""
        self.signum = self.signum or signum
        self._came.set()

    def check(self) -> None:
        """KeyboardInterrupt after Ctrl-C, Ended after another signal."""
        if self.signum == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signum is not None:
            raise Ended(self.signum)

    def close_when_set(self, stream: Stream[Any]) -> None:
        """In a thread: waits for `set`, or `release`."""
        self._came.wait()
        stream.close()

    def release(self) -> None:
        """No signal will come."""
        self._came.set()


@contextmanager
def closed_by_signals(stream: Stream[Any], signals: Sequence[int] = ENDING) -> Iterator[Interrupt]:
    """Signals close the stream, which cancels its request, instead of ending the program.

    An exception in the middle of gRPC's own code could leave a call behind that nobody cancels.
    """
    interrupt = Interrupt()
    wanted = [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, interrupt.set) for signum in wanted}
    closer = threading.Thread(target=interrupt.close_when_set, args=(stream,), daemon=True)
    closer.start()
    try:
        yield interrupt
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        interrupt.release()
        closer.join()


def end_on_hang_up() -> None:
    """The loss of the terminal raises Ended, so that what was begun is ended in order.

    Unless the program was told to live on, as by nohup.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _end)


def _end(signum: int, frame: FrameType | None) -> None:
    raise Ended(signum)
