"""`slotwise bench kernels`: each CUDA operator at a model's shapes, beside torch."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .bench_files import JsonFileOption, check_files, write_json_file
from .geometry import MODELS, model_config
from .helper_process import run_json
from .number_list import numbers
from .output import Output, Report
from .serve import JsonFlag, model_folder


def kernels(
    model: Annotated[
        str, typer.Option(help="A known model's name, a checkpoint folder, or `demo`.")
    ] = "qwen3-8b",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    contexts: Annotated[str, typer.Option(help="For attention, with commas.")] = (
        "512,2048,8192,32768"
    ),
    chunks: Annotated[str, typer.Option(help="Rows of a prompt's chunk.")] = "512,2048",
    only: Annotated[str | None, typer.Option(help="Kernels whose name contains this.")] = None,
    json_file: JsonFileOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Time the CUDA operators at the shapes of a model; shares of the measured rates.

    Share: the time that the bytes (at the rate of a copy) or the arithmetic (at that of a large
    product) would take, whichever is longer, over the time taken.
    """
    check_files(json_file, None)
    output = Output(as_json)
    flags = ["--dtype", dtype, "--contexts", *map(str, numbers("--contexts", contexts))]
    flags += ["--chunks", *map(str, numbers("--chunks", chunks))]
    flags += ["--only", only] if only else []
    with output.progress() as report, tempfile.TemporaryDirectory() as scratch:
        config_file = _config_file(model, Path(scratch), report)
        report("kernels on the GPU", 0, 0)
        command = [sys.executable, "-m", "worker", "bench-kernels", "--config", str(config_file)]
        result = {"model": model, **run_json([*command, *flags])}
    write_json_file(json_file, result)
    if as_json:
        output.json(result)
    else:
        _show(result, output)


def _config_file(model: str, scratch: Path, report: Report) -> Path:
    """A known model's shape needs no checkpoint."""
    if model not in MODELS:
        return model_folder(model, report) / "config.json"
    path = scratch / "config.json"
    path.write_text(json.dumps(model_config(model)))
    return path


def _show(result: dict[str, Any], output: Output) -> None:
    output.line(
        f"{result['model']} on {result['device']}, {result['dtype']}, torch {result['torch']}; "
        f"copy {result['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"product {result['matrix_flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption="us: median, p10 to p90")
    for head in ("kernel", "size"):
        table.add_column(head, no_wrap=True)
    for head in ("us", "p10 to p90", "TB/s", "TFLOP/s", "share", "of"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("torch, us", no_wrap=True)
    for row in result["kernels"]:
        table.add_row(row["kernel"], row.get("shape", ""), *_figures(row), _torch(row))
    output.table(table)


def _figures(row: dict[str, Any]) -> list[str]:
    """Of our operator, or of torch's where it is the one in use."""
    figures = row.get("own") or next(iter(row.get("torch", {}).values()), row)
    if "error" in figures:
        return ["failed", "", "", "", "", ""]
    return [
        f"{figures['median_us']:.1f}",
        f"{figures['p10_us']:.1f} to {figures['p90_us']:.1f}",
        f"{figures['bytes_per_s'] / 1e12:.2f}",
        f"{figures['flops_per_s'] / 1e12:.1f}",
        f"{figures['share'] * 100:.0f}%",
        figures["roof"],
    ]


def _torch(row: dict[str, Any]) -> str:
    """The times of torch's operators; where ours failed, why."""
    failed = row if "error" in row else row.get("own") or {}
    if "error" in failed:
        return str(failed["error"])
    times = [
        f"{name} {'failed' if 'error' in figures else format(figures['median_us'], '.1f')}"
        for name, figures in row["torch"].items()
    ]
    return ("" if row["own"] else "torch alone: ") + "; ".join(times)
