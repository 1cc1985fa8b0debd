"""What the measuring commands share: the model, and where results go besides the terminal."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .output import CliError

ModelOption = Annotated[
    str | None, typer.Option(help="A checkpoint folder, or `demo` (the default).")
]
JsonFileOption = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")]
PlotOption = Annotated[Path | None, typer.Option(help="Also draw a plot into this PNG file.")]


def check_files(json_file: Path | None, plot: Path | None) -> None:
    """CliError when a result could not be written: before the work, not after it."""
    for path in (json_file, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise CliError(f"no folder {str(path.absolute().parent)!r} for {path.name}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CliError(f"--plot needs matplotlib: {sys.executable} -m pip install 'slotwise[plot]'")


def write_json_file(path: Path | None, result: dict[str, Any]) -> None:
    """Indented, for people and version control."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")
