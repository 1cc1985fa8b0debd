"""Tools of other languages that tests need: found, skipped without, or asked for."""

from __future__ import annotations

import os
import shutil

import pytest


def need(command: str, package: str) -> str:
    """The path of a command. Without it the test is skipped, with the Debian package's name; where
    all are to be there (SLOTWISE_ALL_TOOLCHAINS=1) it fails."""
    path = shutil.which(command)
    if path is not None:
        return path
    reason = f"no {command}; on Debian and Ubuntu: sudo apt-get install {package}"
    if os.environ.get("SLOTWISE_ALL_TOOLCHAINS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
