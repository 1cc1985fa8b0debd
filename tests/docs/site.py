"""Builds the documentation's site as `make docs` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def build(root: Path, folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        [*command, "--site-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=root,
        # Without a network: a proxy that nobody serves.
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "https_proxy": "http://127.0.0.1:9"},
    )
