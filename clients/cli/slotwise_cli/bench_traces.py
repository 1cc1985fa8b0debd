"""`slotwise bench traces`: what it costs a server that its requests are traced."""

import asyncio
import secrets
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from slotwise_client import AsyncClient, ModelInfo, ServerInfo

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
from .span_sink import span_sink
from .turns import cost, speed_table

# By name, the flags of the traceparent that decide it.
WAYS = {"not sampled": "00", "sampled": "01"}


@dataclass(frozen=True, slots=True)
class _Measured:
    """Rounds of one server, in order."""

    model: ModelInfo
    server: ServerInfo
    runs: dict[str, list[Run]]


def traces(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    tp: TpOption = None,
    threads: ThreadsOption = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    new_tokens: Annotated[int, typer.Option("--output-tokens", min=2)] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each, by turns.")] = 10,
    json_file: JsonFileOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure tokens/s and TTFT while every request is traced and while none is, by turns.

    One server, with a collector beside it. `tests/scheduler_service/bench_traces.py` tells the
    time of a request and of a step.
    """
    check_files(json_file, None)
    output = Output(as_json)
    work = Work(prompt_tokens, new_tokens)
    flags = server_flags(device=device, dtype=dtype, tp=tp, threads=threads)
    flags += server_flags(num_slots=concurrency, max_seq_len=prompt_tokens + new_tokens)
    with output.progress() as report, span_sink() as sink:
        folder = model_folder(model or "demo", report)
        flags += server_flags(otlp_endpoint=sink.endpoint)
        with running_server(folder, flags, report) as address:
            measured = asyncio.run(_measure(address, work, concurrency, repeats, report))
        # A server that has ended has sent them all.
        spans = sink.counts()
    speeds = {name: [run.tokens_per_s for run in runs] for name, runs in measured.runs.items()}
    result = {
        "model": measured.model.name,
        "device": measured.server.workers[0].device,
        "concurrency": concurrency,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "repeats": repeats,
        **{name: summary(runs) for name, runs in measured.runs.items()},
        # Of the round that warms up too.
        "num_spans": dict(sorted(spans.items())),
        "cost_percent": asdict(cost(speeds["not sampled"], speeds["sampled"])),
    }
    write_json_file(json_file, result)
    if as_json:
        output.json(result)
    else:
        _show(result, output)


async def _measure(
    address: str, work: Work, concurrency: int, repeats: int, report: Report
) -> _Measured:
    """By turns, and each round in the other order, so that drift meets both alike."""
    async with AsyncClient(address) as client:
        model, server = await client.model_info(timeout=60), await client.server_info(timeout=60)
        measured = _Measured(model, server, {name: [] for name in WAYS})
        for repeat in range(-1, repeats):
            prompts = work.prompts(model, concurrency, seed=repeat + 2)
            for name in WAYS if repeat % 2 else reversed(WAYS):
                report(f"{name}, round {repeat + 1} of {repeats}", 0, 0)
                traced = client.with_trace(_traceparent(WAYS[name]))
                run = await run_once(traced, prompts, work.new_tokens)
                # The first one warms up.
                if repeat >= 0:
                    measured.runs[name].append(run)
    return measured


def _traceparent(flags: str) -> str:
    # The first digit: neither id may be all zeros.
    return f"00-1{secrets.token_hex(16)[1:]}-1{secrets.token_hex(8)[1:]}-{flags}"


def _show(result: dict[str, Any], output: Output) -> None:
    spent = Spread(**result["cost_percent"])
    output.line(
        f"{result['model']} on {result['device']}: {result['concurrency']} requests of "
        f"{result['prompt_tokens']} + {result['new_tokens']} tokens, {result['repeats']} rounds "
        f"by turns; {sum(result['num_spans'].values())} spans came"
    )
    output.table(speed_table({name: result[name] for name in WAYS}))
    output.line(
        f"Traces of every request cost {spent.median:.2f} % (single rounds {spent.min:.2f} to "
        f"{spent.max:.2f} %)."
    )
