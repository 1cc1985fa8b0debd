"""`slotwise bench journal`: what the journal costs, beside the same server without one."""

import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from slotwise_client import AsyncClient, Client, ModelInfo

from .bench_files import JsonFileOption, ModelOption, check_files, write_json_file
from .measure import Run, Spread, Work, run_once, summary
from .output import Output, Report
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

WITH, WITHOUT = "with a journal", "without"


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Of one server, in order."""

    runs: list[Run]

    @property
    def speeds(self) -> list[float]:
        return [run.tokens_per_s for run in self.runs]


def journal(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    tp: TpOption = None,
    threads: ThreadsOption = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    new_tokens: Annotated[int, typer.Option("--output-tokens", min=2)] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each pair, by turns.")] = 5,
    pairs: Annotated[
        int, typer.Option(min=1, help="Pairs of servers; equal ones differ by their luck too.")
    ] = 4,
    folder: Annotated[
        Path | None, typer.Option(help="For the journal; else in the system's temporary folder.")
    ] = None,
    json_file: JsonFileOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure tokens/s and TTFT with a journal and without, by turns, on pairs of equal servers.

    The one with a journal is started first in every other pair.
    """
    check_files(json_file, None)
    output = Output(as_json)
    work = Work(prompt_tokens, new_tokens)
    flags = server_flags(device=device, dtype=dtype, tp=tp, threads=threads)
    flags += server_flags(num_slots=concurrency, max_seq_len=prompt_tokens + new_tokens)
    measured: list[dict[str, _Rounds]] = []
    with output.progress() as report:
        checkpoint = model_folder(model or "demo", report)
        for pair in range(pairs):
            with _pair(checkpoint, flags, folder, pair % 2 == 1, report) as addresses:
                with Client(addresses[WITH]) as client:
                    info, server = client.model_info(timeout=60), client.server_info(timeout=60)
                rounds = _measure(addresses, work, info, concurrency, repeats, report)
                measured.append(asyncio.run(rounds))
    together = {
        name: _Rounds([run for one in measured for run in one[name].runs])
        for name in (WITHOUT, WITH)
    }
    result = {
        "model": info.name,
        "device": server.workers[0].device,
        "concurrency": concurrency,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "pairs": pairs,
        **{name: summary(rounds.runs) for name, rounds in together.items()},
        "cost_percent": asdict(
            _cost([(one[WITHOUT].speeds, one[WITH].speeds) for one in measured])
        ),
    }
    write_json_file(json_file, result)
    if as_json:
        output.json(result)
    else:
        _show(result, output)


@contextmanager
def _pair(
    checkpoint: Path, flags: list[str], folder: Path | None, is_swapped: bool, report: Report
) -> Iterator[dict[str, str]]:
    """Addresses of two servers that differ in nothing but the journal."""
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        extra = {WITHOUT: [], WITH: ["--journal", place]}
        addresses = {}
        for name in (WITH, WITHOUT) if is_swapped else (WITHOUT, WITH):
            server = running_server(checkpoint, [*flags, *extra[name]], report)
            addresses[name] = stack.enter_context(server)
        yield addresses


async def _measure(
    addresses: dict[str, str],
    work: Work,
    model: ModelInfo,
    concurrency: int,
    repeats: int,
    report: Report,
) -> dict[str, _Rounds]:
    """By turns, and each round in the other order, so that drift meets both alike."""
    rounds = {name: _Rounds([]) for name in addresses}
    for repeat in range(-1, repeats):
        prompts = work.prompts(model, concurrency, seed=repeat + 2)
        names = list(addresses) if repeat % 2 else list(reversed(addresses))
        for name in names:
            report(f"{name}, round {repeat + 1} of {repeats}", 0, 0)
            async with AsyncClient(addresses[name]) as client:
                run = await run_once(client, prompts, work.new_tokens)
            # The first one warms up.
            if repeat >= 0:
                rounds[name].runs.append(run)
    return rounds


def _cost(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Spread:
    """Percent of tokens/s that the journal costs, over pairs of (without, with): of each pair by
    the medians of its rounds."""
    return Spread.of(
        [100 * (1 - statistics.median(mine) / statistics.median(other)) for other, mine in pairs]
    )


def _show(result: dict[str, Any], output: Output) -> None:
    table = Table(box=SIMPLE_HEAD)
    for title in ("", "tok/s", "spread", "TTFT ms", "TTFT p90 ms"):
        table.add_column(title, justify="right" if title else "left")
    for name in (WITHOUT, WITH):
        row = result[name]
        speed = Spread(**row["tokens_per_s"])
        table.add_row(
            name,
            f"{speed.median:.1f}",
            f"{speed.min:.1f} to {speed.max:.1f}",
            f"{row['ttft_ms_p50']:.2f}",
            f"{row['ttft_ms_p90']:.2f}",
        )
    cost = result["cost_percent"]
    output.line(
        f"{result['model']} on {result['device']}: {result['concurrency']} requests of "
        f"{result['prompt_tokens']} + {result['new_tokens']} tokens, {result['repeats']} rounds of "
        f"{result['pairs']} pairs"
    )
    output.table(table)
    output.line(
        f"The journal costs {cost['median']:.2f} % (single pairs {cost['min']:.2f} to "
        f"{cost['max']:.2f} %)."
    )
