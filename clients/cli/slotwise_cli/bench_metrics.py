"""`slotwise bench metrics`: what it costs a server that its metrics are read."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from slotwise_client import AsyncClient, ModelInfo, ServerInfo

from .bench_files import JsonFileOption, ModelOption, check_files, write_json_file
from .measure import Run, Work, run_once, summary
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
from .turns import cost, speed_table

READ, UNREAD = "metrics are read", "not read"


@dataclass(frozen=True, slots=True)
class _Measured:
    """Rounds of one server, in order, and how long each reading took."""

    model: ModelInfo
    server: ServerInfo
    runs: dict[str, list[Run]]
    readings_s: list[float] = field(default_factory=list)


def metrics(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    tp: TpOption = None,
    threads: ThreadsOption = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    new_tokens: Annotated[int, typer.Option("--output-tokens", min=2)] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each, by turns.")] = 10,
    every: Annotated[float, typer.Option(min=0.001, help="Seconds between readings.")] = 1.0,
    json_file: JsonFileOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure tokens/s and TTFT while metrics are read and while not, by turns, on one server.

    Counting itself is never off; `tests/scheduler_service/bench_metrics.py` tells its time.
    """
    check_files(json_file, None)
    output = Output(as_json)
    work = Work(prompt_tokens, new_tokens)
    flags = server_flags(device=device, dtype=dtype, tp=tp, threads=threads)
    flags += server_flags(num_slots=concurrency, max_seq_len=prompt_tokens + new_tokens)
    with output.progress() as report:
        folder = model_folder(model or "demo", report)
        with running_server(folder, flags, report) as address:
            rounds = _measure(address, work, concurrency, repeats, every, report)
            measured = asyncio.run(rounds)
    speeds = {name: [run.tokens_per_s for run in runs] for name, runs in measured.runs.items()}
    result = {
        "model": measured.model.name,
        "device": measured.server.workers[0].device,
        "concurrency": concurrency,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "every_s": every,
        **{name: summary(runs) for name, runs in measured.runs.items()},
        "num_readings": len(measured.readings_s),
        "reading_ms_p50": statistics.median(measured.readings_s) * 1e3,
        "cost_percent": asdict(cost(speeds[UNREAD], speeds[READ])),
    }
    write_json_file(json_file, result)
    if as_json:
        output.json(result)
    else:
        _show(result, output)


async def _measure(
    address: str, work: Work, concurrency: int, repeats: int, every_s: float, report: Report
) -> _Measured:
    """By turns, and each round in the other order, so that drift meets both alike."""
    async with AsyncClient(address) as client, AsyncClient(address) as reader:
        model, server = await client.model_info(timeout=60), await client.server_info(timeout=60)
        measured = _Measured(model, server, {UNREAD: [], READ: []})
        for repeat in range(-1, repeats):
            prompts = work.prompts(model, concurrency, seed=repeat + 2)
            for name in (UNREAD, READ) if repeat % 2 else (READ, UNREAD):
                report(f"{name}, round {repeat + 1} of {repeats}", 0, 0)
                readings_s: list[float] = []
                async with contextlib.AsyncExitStack() as stack:
                    if name == READ:
                        await stack.enter_async_context(_reading(reader, every_s, readings_s))
                    run = await run_once(client, prompts, work.new_tokens)
                # The first one warms up.
                if repeat >= 0:
                    measured.runs[name].append(run)
                    measured.readings_s.extend(readings_s)
    return measured


@contextlib.asynccontextmanager
async def _reading(
    client: AsyncClient, every_s: float, readings_s: list[float]
) -> AsyncIterator[None]:
    """Reads metrics from the block's begin on, at least once, and notes how long each took."""

    async def read() -> None:
        begin_s = time.perf_counter()
        await client.metrics(timeout=60)
        readings_s.append(time.perf_counter() - begin_s)

    async def read_on() -> None:
        while True:
            await asyncio.sleep(every_s)
            await read()

    await read()
    task = asyncio.create_task(read_on())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _show(result: dict[str, Any], output: Output) -> None:
    spent = result["cost_percent"]
    output.line(
        f"{result['model']} on {result['device']}: {result['concurrency']} requests of "
        f"{result['prompt_tokens']} + {result['new_tokens']} tokens, {result['repeats']} rounds "
        f"by turns; {result['num_readings']} readings, one each {result['every_s']:g} s, "
        f"{result['reading_ms_p50']:.1f} ms each (median)"
    )
    output.table(speed_table({name: result[name] for name in (UNREAD, READ)}))
    output.line(
        f"Reading costs {spent['median']:.2f} % (single rounds {spent['min']:.2f} to "
        f"{spent['max']:.2f} %)."
    )
