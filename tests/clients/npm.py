"""Packages of npm for tests, installed into build/npm once for each lock file."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from clients.toolchains import need

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "npm"
FILES = ("package.json", "package-lock.json")
TIMEOUT_S = 600


def installed(folder: Path) -> Path:
    """A folder with node_modules as the package.json and the lock file of `folder` say."""
    need_node()
    texts = [(folder / name).read_bytes() for name in FILES]
    made = BUILD / hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
    # Written at the end of an installation.
    complete = made / "node_modules" / ".package-lock.json"
    if not complete.exists():
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        for name, text in zip(FILES, texts, strict=True):
            (made / name).write_bytes(text)
        npm("ci", "--ignore-scripts", cwd=made)
    return made


def need_node() -> None:
    """Skips the test, or fails it, as `need` says."""
    need("node", "nodejs")
    need("npm", "npm")


def npm(*words: str, cwd: Path) -> str:
    """What an npm command printed."""
    return run("npm", "--no-audit", "--no-fund", "--no-update-notifier", *words, cwd=cwd)


def run(
    *command: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT_S,
) -> str:
    """What a command printed; AssertionError, with all its words, when it failed."""
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{command} ended {done.returncode}: {done.stderr}{done.stdout}"
    return done.stdout
