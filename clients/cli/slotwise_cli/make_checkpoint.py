"""`slotwise make-checkpoint`: a model folder of random weights, so that speed needs no download."""

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from .geometry import DTYPE_BYTES, MODELS, model_config
from .output import CliError, Output
from .random_checkpoint import checkpoint_bytes, write_checkpoint
from .serve import JsonFlag


def make_checkpoint(
    out: Annotated[Path, typer.Argument(help="The folder to make; it may exist if it is empty.")],
    like: Annotated[str, typer.Option(help=f"Its shape: {', '.join(MODELS)}.")],
    layers: Annotated[int | None, typer.Option(min=1, max=4096, help="Other than its own.")] = None,
    max_positions: Annotated[
        int | None, typer.Option(min=1, help="Longest sequence, other than its own.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, help="Of the weights.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Make a model folder of random weights with the shape of a known model.

    Its speed is that of the real one; its answers are noise.
    """
    output = Output(as_json)
    started = time.monotonic()
    if dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise CliError(f"--dtype {dtype!r} is not known; known: {known}", exit_code=2)
    config = model_config(like, layers=layers, max_positions=max_positions, dtype=dtype)
    needed = checkpoint_bytes(config, dtype)
    folder = Path(os.path.abspath(out))
    _check_empty(folder)
    _check_room(folder, needed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        output.progress() as report,
        tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch,
    ):
        finished = Path(scratch) / folder.name
        finished.mkdir()
        write_checkpoint(finished, config, dtype, seed, report)
        os.rename(finished, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    seconds = time.monotonic() - started
    if as_json:
        output.json({"folder": str(folder), "bytes": size, "seconds": round(seconds, 2)})
    else:
        output.line(
            f"{folder}: {like}, {config['num_hidden_layers']} layers, {dtype}, "
            f"{size / 1e9:.2f} GB in {seconds:.1f} s"
        )


def _check_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if os.path.lexists(folder):
        kind = "is not empty" if folder.is_dir() else "is not a folder"
        raise CliError(f"{folder} {kind}; name another folder, or remove it", exit_code=2)


def _check_room(folder: Path, needed: int) -> None:
    existing = next(parent for parent in folder.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CliError(f"{folder} needs {needed:,} bytes, and {existing} has {free:,} free")
