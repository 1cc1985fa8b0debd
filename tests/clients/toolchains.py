"""Tools of other languages that tests need: found, skipped without, or asked for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest


def need(command: str, package: str) -> str:
    """The path of a command. Without it the test is skipped, with the Debian package's name; where
    all are to be there (SLOTWISE_ALL_TOOLCHAINS=1) it fails."""
    path = shutil.which(command)
    return path if path is not None else _miss(command, package)


def need_file(path: str, package: str) -> Path:
    """The same for a file or a folder."""
    return Path(path) if os.path.exists(path) else _miss(path, package)


def _miss(what: str, package: str) -> NoReturn:
    reason = f"no {what}; on Debian and Ubuntu: sudo apt-get install {package}"
    if os.environ.get("SLOTWISE_ALL_TOOLCHAINS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
