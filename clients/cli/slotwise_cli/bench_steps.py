"""`slotwise bench steps`: the time of a decode step as the context grows."""

import asyncio
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from slotwise_client import Client, ModelInfo, ServerInfo

from .bench_files import JsonFileOption, ModelOption, PlotOption, check_files, keep, write_json_file
from .limits import BandwidthOption, MemoryLimit, find_limit
from .measure import Spread, Work, decode_window
from .number_list import numbers
from .output import CliError, Output, Report
from .plots import plot_steps
from .serve import (
    DeviceOption,
    DtypeOption,
    JsonFlag,
    ThreadsOption,
    TpOption,
    model_folder,
    server_flags,
)
from .server_process import running_server

# Tokens that early requests may generate while the last one's prompt is still read.
ROOM = 4096


@dataclass(frozen=True, slots=True)
class Point:
    """Requests of one length at once."""

    concurrency: int
    context: int
    step_ms: Spread

    @property
    def tokens(self) -> int:
        """In the cache, over all requests."""
        return self.concurrency * self.context


def steps(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    tp: TpOption = None,
    threads: ThreadsOption = None,
    contexts: Annotated[str, typer.Option(help="Prompt lengths, with commas.")] = (
        "512,2048,8192,32768"
    ),
    concurrency: Annotated[str, typer.Option(help="Numbers, with commas.")] = "1,8",
    num_steps: Annotated[int, typer.Option("--steps", min=2, help="To time, per round.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the median is shown.")] = 3,
    bandwidth: BandwidthOption = None,
    json_file: JsonFileOption = None,
    plot: PlotOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure decode steps while every slot holds 512, 2K, 8K, 32K tokens; seen by the client."""
    check_files(json_file, plot)
    output = Output(as_json)
    lengths, counts = numbers("--contexts", contexts), numbers("--concurrency", concurrency)
    flags = server_flags(device=device, dtype=dtype, tp=tp, threads=threads)
    with output.progress() as report:
        folder = model_folder(model or "demo", report)
        longest = _longest(folder, max(lengths), num_steps)
        flags += server_flags(num_slots=max(counts), max_seq_len=longest)
        with running_server(folder, flags, report) as address:
            with Client(address) as client:
                info, server = client.model_info(timeout=60), client.server_info(timeout=60)
            measure = _Measure(address, info, longest, num_steps, repeats, report)
            points = [measure.point(count, length) for length in lengths for count in counts]
        limit = find_limit(folder, server, bandwidth, report)
    result = _summary(info, server, points, num_steps, repeats, limit)
    write_json_file(json_file, result)
    if plot is not None:
        keep(plot, plot_steps(result), result)
    if as_json:
        output.json(result)
    else:
        _show(result, output)


def _longest(folder: Path, context: int, num_steps: int) -> int:
    """Room of a slot: what is asked for and some more, as the model allows."""
    try:
        config = json.loads((folder / "config.json").read_text())
        most = int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CliError(f"{folder}/config.json: no max_position_embeddings: {error}") from error
    if context + num_steps + 2 > most:
        raise CliError(
            f"--contexts {context} and {num_steps} steps do not fit the model's {most} positions",
            exit_code=2,
        )
    return min(most, context + num_steps + ROOM)


@dataclass(frozen=True, slots=True)
class _Measure:
    address: str
    model: ModelInfo
    max_seq_len: int
    num_steps: int
    repeats: int
    report: Report

    def point(self, concurrency: int, context: int) -> Point:
        """One round more than asked for: the first is warm-up."""
        rounds = [self._round(concurrency, context, number) for number in range(self.repeats + 1)]
        return Point(concurrency, context, Spread.of(rounds[1:]))

    def _round(self, concurrency: int, context: int, number: int) -> float:
        self.report(f"{concurrency} at once, {context} tokens, round {number}", 0, 0)
        seed = 100_000 * number + context + concurrency
        prompts = Work(context, self.num_steps).prompts(self.model, concurrency, seed)
        room = self.max_seq_len - context
        window = decode_window(self.address, prompts, self.num_steps, room)
        times = asyncio.run(window)
        if len(times) < concurrency:
            raise CliError(
                f"{concurrency} requests of {context} tokens did not all decode at the same time: "
                f"the first ones ended, with {room} tokens, before the last one began"
            )
        return statistics.mean(times)


def _summary(
    model: ModelInfo,
    server: ServerInfo,
    points: list[Point],
    num_steps: int,
    repeats: int,
    limit: MemoryLimit | None,
) -> dict[str, Any]:
    worker = server.workers[0]
    rows = []
    for point in points:
        row = asdict(point)
        row["tokens_per_s"] = point.concurrency / point.step_ms.median * 1e3
        if limit is not None:
            row["limit_step_ms"] = limit.step_ms(point.tokens + point.concurrency * num_steps / 2)
        rows.append(row)
    bandwidth = {} if limit is None else {"memory_bytes_per_s": limit.bytes_per_s}
    return {
        "model": model.name,
        "device": worker.device,
        "weight_dtype": worker.weight_dtype,
        "kv_dtype": worker.kv_dtype,
        "tp": len(server.workers),
        "steps": num_steps,
        "repeats": repeats,
        **bandwidth,
        "points": rows,
    }


def _show(result: dict[str, Any], output: Output) -> None:
    output.line(
        f"{result['model']}, {result['device']}, {result['weight_dtype']}, TP {result['tp']}; "
        f"{result['steps']} decode steps, median of {result['repeats']}"
    )
    heads = ["context", "n", "ms/step", "least", "most", "tok/s"]
    if "limit_step_ms" in result["points"][0]:
        heads += ["limit ms", "of limit"]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for point in result["points"]:
        spread = point["step_ms"]
        cells = [f"{point['context']:,}", str(point["concurrency"])]
        cells += [f"{spread[key]:.3f}" for key in ("median", "min", "max")]
        cells.append(f"{point['tokens_per_s']:.1f}")
        if "limit_step_ms" in point:
            limit = point["limit_step_ms"]
            cells += [f"{limit:.3f}", f"{limit / spread['median'] * 100:.0f}%"]
        table.add_row(*cells)
    output.table(table)
