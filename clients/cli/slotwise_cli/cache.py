"""The user's cache folder, and a lock between processes that fill it."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# (stage, done, total); total is 0 while it is not known. Units are the caller's, mostly bytes.
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""


def cache_dir() -> Path:
    """`$SLOTWISE_CACHE`, else `$XDG_CACHE_HOME/slotwise`, else `~/.cache/slotwise`."""
    own = os.environ.get("SLOTWISE_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "slotwise"


@contextmanager
def exclusive(lock_file: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an advisory lock on `lock_file`; `on_wait` is called once if another process has it.

    The file itself stays: removing it would let two holders lock two different inodes.
    """
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
