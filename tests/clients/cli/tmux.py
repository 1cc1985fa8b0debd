"""A terminal for tests: a shell in a window of tmux, typed into and read as a person would."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clients.toolchains import need

WAIT_S = 60


@dataclass(frozen=True)
class Terminal:
    """One window. Its tmux is its own, by the socket."""

    program: str
    socket: Path

    def tmux(self, *words: str) -> str:
        command = [self.program, "-u", "-S", str(self.socket), "-f", "/dev/null", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def type(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        self.tmux("resize-window", "-x", str(width), "-y", str(height))

    def screen(self, *, with_colors: bool = False) -> str:
        return self.tmux("capture-pane", "-p", *(["-e"] if with_colors else []))

    def has_alternate_screen(self) -> bool:
        return self.tmux("display-message", "-p", "#{alternate_on}").strip() == "1"

    def wait(self, is_seen: Callable[[str], object]) -> str:
        """The screen on which it is seen."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            screen = self.screen()
            if is_seen(screen):
                return screen
            time.sleep(0.1)
        raise AssertionError(f"not seen on\n{screen}")


@contextlib.contextmanager
def terminal(folder: Path, width: int, height: int) -> Iterator[Terminal]:
    """With `slotwise` on the shell's PATH."""
    program = need("tmux", "tmux")
    one = Terminal(program, folder / "tmux")
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    size = ("-x", str(width), "-y", str(height))
    shell = ("env", "-u", "NO_COLOR", "-u", "COLUMNS", "-u", "LINES", f"PATH={programs}")
    one.tmux("new-session", "-d", *size, *shell, "LC_ALL=C.UTF-8", "PS1=$ ", "sh")
    try:
        yield one
    finally:
        one.tmux("kill-server")
