"""What the measuring commands share: the model, and where results go besides the terminal."""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from .output import CliError
from .result_file import write_whole

ModelOption = Annotated[
    str | None, typer.Option(help="A checkpoint folder, or `demo` (the default).")
]
JsonFileOption = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")]
PlotOption = Annotated[Path | None, typer.Option(help="Also draw a plot into this PNG file.")]
ReportOption = Annotated[
    Path | None,
    typer.Option("--report", help="Also write a report, one HTML file with everything in it."),
]


def check_files(json_file: Path | None, plot: Path | None, report: Path | None = None) -> None:
    """CliError when a result could not be written: before the work, not after it."""
    for path in (json_file, plot, report):
        if path is not None:
            _check_writable(path)
    for flag, wanted in (("--plot", plot), ("--report", report)):
        if wanted is not None and importlib.util.find_spec("matplotlib") is None:
            how = f"{sys.executable} -m pip install 'slotwise[plot]'"
            raise CliError(f"{flag} needs matplotlib: {how}")


def _check_writable(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise CliError(f"no folder {str(folder)!r} for {path.name}")
    if path.is_dir():
        raise CliError(f"{path} is a folder")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}.") as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}") from error


def write_json_file(path: Path | None, result: dict[str, Any]) -> None:
    """Indented, for people and version control; CliError once the result lies elsewhere."""
    if path is not None:
        keep(path, (json.dumps(result, indent=2) + "\n").encode(), result)


def keep(path: Path, data: bytes, result: dict[str, Any]) -> None:
    """Write a file of a result. If it cannot be, the result itself is put where it can (another
    folder, else stdout), and CliError tells why and where: nothing measured is lost."""
    try:
        write_whole(path, data)
    except OSError as error:
        where = _rescue(result)
        raise CliError(f"{path} cannot be written: {error.strerror}; {where}") from error


def _rescue(result: dict[str, Any]) -> str:
    text = json.dumps(result, indent=2) + "\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="slotwise-bench-", suffix=".json", delete=False
        ) as file:
            file.write(text)
    except OSError:
        print(text, flush=True)
        return "the result is on stdout"
    return f"the result is in {file.name}"
