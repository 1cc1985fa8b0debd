"""`slotwise prepare`: what a container looks at before servers start, with advice for its user."""

import os
import platform
from pathlib import Path
from typing import Annotated

import typer

from .demo_model import demo_model_dir, ensure_demo_model
from .output import CliError, Output, Report

_DRIVER = Path("/proc/driver/nvidia/version")


def prepare(
    model: Annotated[
        Path | None, typer.Argument(help="The folder that will be served.", show_default=False)
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Is there a driver for GPUs?")] = False,
) -> None:
    """Have all that a server in a container needs: its model's folder, a GPU's driver.

    The demo model is fetched when its folder is not there ($SLOTWISE_CACHE/models/...).
    """
    output = Output(as_json=False)
    if gpu:
        output.line(f"NVIDIA driver: {_driver()}")
    if model is not None:
        with output.progress() as report:
            _have_model(model, report)
        output.line(f"model: {model}")


def _driver() -> str:
    """What it says about itself. A container sees this file of its host, with or without GPUs."""
    try:
        return _DRIVER.read_text().splitlines()[0]
    except FileNotFoundError:
        # There the driver is that of Windows.
        if "microsoft" in platform.release().lower():
            return "that of Windows"
    raise CliError(
        "this machine has no NVIDIA driver, and the profiles gpu and gpu-tp2 need one; install it "
        "and the NVIDIA Container Toolkit, or leave the profile out to serve on the CPU"
    )


def _have_model(folder: Path, report: Report) -> None:
    parent = folder.parent
    if folder == demo_model_dir():
        try:
            ensure_demo_model(report)
        except PermissionError:
            raise CliError(
                f"user {os.geteuid()} may not write to {parent}, where the demo model is to be "
                f"put; make that folder or volume its own (chown {os.geteuid()}), or put a model "
                "there and name it in SLOTWISE_MODEL"
            ) from None
        return
    try:
        if (folder / "config.json").is_file():
            return
        found = sorted(path.name for path in parent.iterdir() if (path / "config.json").is_file())
    except FileNotFoundError:
        raise CliError(f"there is no folder {parent}; mount one that holds models") from None
    except PermissionError as error:
        raise CliError(
            f"user {os.geteuid()} may not read {error.filename}; give it the right, or run the "
            "containers as another user (SLOTWISE_USER)"
        ) from None
    what = "holds no config.json" if folder.is_dir() else "is not there"
    models = f"it holds: {', '.join(found)}" if found else "it holds no model"
    raise CliError(
        f"{folder} {what}. Set SLOTWISE_MODEL to the name of a model's folder in {parent} "
        f"({models}), and SLOTWISE_MODELS to the folder or volume of your machine that is mounted "
        "there"
    )
