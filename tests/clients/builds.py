"""Programs of other languages, built once for each state of their sources."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def files_under(*places: Path) -> list[Path]:
    """The files there; a place may itself be one."""
    found = [one for place in places for one in (place.rglob("*") if place.is_dir() else [place])]
    return sorted(one for one in found if one.is_file())


def build_once(
    folder: Path, sources: Iterable[Path], tools: Iterable[str], build: Callable[[], None]
) -> None:
    """Builds into the folder, unless it was built there from such sources by such tools."""
    digest = hashlib.sha256("\0".join(tools).encode())
    for source in sources:
        content = source.read_bytes()
        digest.update(f"\0{source.relative_to(ROOT)}\0{len(content)}\0".encode() + content)
    stamp = folder / "built-from"
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return
    stamp.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    build()
    stamp.write_text(digest.hexdigest())
