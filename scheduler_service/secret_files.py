"""Files with secrets: read with care at start, and again whenever they change."""

from __future__ import annotations

import logging
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from .config import ConfigError

T = TypeVar("T")

MAX_FILE_BYTES = 1 << 20

log = logging.getLogger(__name__)


def read_file(path: Path, *, is_secret: bool) -> bytes:
    """ConfigError when it cannot be read, is too long, or is a secret that others may read."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
            mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is too long; at most {MAX_FILE_BYTES} bytes are accepted")
    if is_secret and mode & stat.S_IRWXO:
        raise ConfigError(
            f"{path} holds a secret, and its mode is {mode:04o}: every user of this machine may "
            f"read or change it; run chmod o-rwx {path}"
        )
    return content


class Reloaded(Generic[T]):
    """What `read` made of some files; made anew when one of them has changed.

    A change that cannot be read is logged once, and what was read before stays. Any thread.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """Raises what `read` raises."""
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._stamps = self._look()
        self._value = read()

    def get(self) -> T:
        """Costs one look at each file's metadata where nothing has changed."""
        with self._lock:
            # Taken before reading: what changes meanwhile is seen the next time.
            stamps = self._look()
            if stamps != self._stamps:
                self._stamps = stamps
                self._reload()
            return self._value

    def _reload(self) -> None:
        names = ", ".join(map(str, self._paths))
        try:
            self._value = self._read()
        except ConfigError as error:
            log.error("changed, and refused; what was read before stays in use: %s", error)
            return
        log.info("read again, for it has changed: %s", names)

    def _look(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Of the file that a link leads to: Kubernetes replaces links. None when there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev)
