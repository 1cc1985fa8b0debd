"""`slotwise bench ladder`: the same work at rising concurrency, beside the engine and a peer."""

import importlib.util
import json
import os
import re
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from slotwise_client import AsyncClient, Client, ModelInfo, ServerInfo

from .bench_arrivals import arrivals
from .bench_chat import chat
from .bench_files import JsonFileOption, ModelOption, PlotOption, ReportOption, check_files
from .bench_gateway import gateway
from .bench_interleave import interleave
from .bench_journal import journal
from .bench_kernels import kernels
from .bench_metrics import metrics
from .bench_report import join
from .bench_result import common_form, end_with
from .bench_steps import steps
from .bench_traces import traces
from .compare import compare
from .figures import Better, Figure
from .helper_process import run_json
from .ladder_table import show_ladder
from .limits import BandwidthOption, MemoryLimit, find_limit
from .measure import Level, Run, Spread, Work, run_once
from .number_list import numbers
from .output import CliError, Output, Report
from .serve import (
    DeviceOption,
    DtypeOption,
    JsonFlag,
    ThreadsOption,
    TpOption,
    model_folder,
    server_flags,
)
from .server_groups import (
    Group,
    ServersOption,
    already_running,
    groups_of,
    measure_groups,
    run_until_ended,
)
from .server_process import running_server

# As a worker logs it (worker/rank.py).
IDLE = re.compile(r"worker 0: .*idle between steps: median ([\d.]+) us,.* 99 % ([\d.]+) us")

bench = typer.Typer(help="Measure.", no_args_is_help=True)
bench.command()(arrivals)
bench.command()(interleave)
bench.command()(compare)
bench.command("report")(join)
bench.command()(steps)
bench.command()(kernels)
bench.command()(chat)
bench.command()(journal)
bench.command()(metrics)
bench.command()(traces)
bench.command()(gateway)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: R rounds of every concurrency."""

    work: Work
    concurrency: tuple[int, ...]
    repeats: int
    servers: int = 1


@dataclass(frozen=True, slots=True)
class Served:
    """What a server is and how it did; `numbers`: which server each round was on."""

    model: ModelInfo
    server: ServerInfo
    levels: tuple[Level, ...]
    numbers: tuple[int, ...] = ()


@dataclass(slots=True)
class Measured:
    """What was seen so far: whole rounds, all of a plan's concurrencies in each."""

    model: ModelInfo | None = None
    server: ServerInfo | None = None
    runs: dict[int, list[Run]] = field(default_factory=dict)
    firsts: dict[int, list[Run]] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)

    def served(self) -> Served:
        """At least one round."""
        assert self.model is not None
        assert self.server is not None
        levels = [Level.of(n, runs, self.firsts[n]) for n, runs in self.runs.items()]
        return Served(self.model, self.server, tuple(levels), tuple(self.numbers))


@bench.command()
def ladder(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    tp: TpOption = None,
    threads: ThreadsOption = None,
    concurrency: Annotated[str, typer.Option(help="Numbers, with commas.")] = "1,2,4,8",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    new_tokens: Annotated[int, typer.Option("--output-tokens", "--new-tokens", min=2)] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the median is shown.")] = 3,
    server: Annotated[
        str | None, typer.Option(help="Measure this running server, flushing its prefix cache.")
    ] = None,
    servers: ServersOption = 1,
    in_process: Annotated[bool, typer.Option(help="Also the engine without gRPC.")] = True,
    peer: Annotated[str | None, typer.Option(help="Also `transformers`, float32, n=1.")] = None,
    bandwidth: BandwidthOption = None,
    json_file: JsonFileOption = None,
    plot: PlotOption = None,
    report_file: ReportOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure 1, 2, 4, 8 requests at once: TTFT, ITL, tokens/s, ratio to one, prefill share."""
    _check_peer(peer)
    check_files(json_file, plot, report_file)
    output = Output(as_json)
    work, counts = Work(prompt_tokens, new_tokens), numbers("--concurrency", concurrency)
    plan = Plan(work, counts, repeats, servers)
    chosen = server_flags(device=device, dtype=dtype, tp=tp, threads=threads)
    # With --server a model is read by the peer alone.
    refused = ["--model"] if model and not peer else chosen
    if server is not None and refused:
        raise CliError(f"{refused[0]} is for a server of our own, not for --server", exit_code=2)
    room = server_flags(num_slots=max(plan.concurrency), max_seq_len=prompt_tokens + new_tokens)
    limit, got, log = None, Measured(), list[str]()
    with output.progress() as report:
        measure = partial(_measure_group, plan, report, got)
        if server is not None:
            ended_by = measure_groups(groups_of(repeats, 1), already_running(server), measure)
        else:
            folder = model_folder(model or "demo", report)
            start = partial(running_server, folder, chosen + room, report, log.append)
            ended_by = measure_groups(groups_of(repeats, servers), start, measure)
        if ended_by is not None and not got.numbers:
            raise ended_by
        served = got.served()
        if server is None and ended_by is None:
            limit = find_limit(folder, served.server, bandwidth, report)
        result = _summary(served, plan, limit)
        if server is None:
            _add_idle(result, log)
        if ended_by is not None:
            in_process, peer = False, None
        if in_process and server is None and (tp or 1) == 1:
            _add_engine(result, _run_engine(folder, served, plan, report))
        elif in_process:
            output.note("the engine without gRPC is measured for one rank of a server of our own")
        if peer:
            folder = model_folder(model or "demo", report)
            _add_peer(result, _run_peer(folder, served, plan, report))
    whole = common_form("ladder", served.model, served.server, asdict(plan), result)
    whole["figures"] = _figures(result, served.numbers)
    if not as_json:
        show_ladder(result, output)
    end_with(whole, output, json_file, plot, report_file, ended_by)


def _check_peer(peer: str | None) -> None:
    if peer not in (None, "transformers"):
        raise CliError(f"--peer {peer!r} is not known; known: transformers", exit_code=2)
    if peer and importlib.util.find_spec("transformers") is None:
        raise CliError(f"--peer needs transformers: {sys.executable} -m pip install transformers")


def _measure_group(plan: Plan, report: Report, got: Measured, address: str, group: Group) -> None:
    with Client(address) as client:
        got.model, got.server = client.model_info(timeout=60), client.server_info(timeout=60)
    run_until_ended(_measure(address, plan, got.model, report, got, group))


async def _measure(
    address: str, plan: Plan, model: ModelInfo, report: Report, got: Measured, group: Group
) -> None:
    """Rounds go round the concurrencies, so that slow drift of the machine meets all alike.

    One client sends them all: a service keeps its channel too.
    """
    async with AsyncClient(address, reconnect=False) as client:
        for count in (1, max(plan.concurrency)):
            await run_once(client, plan.work.prompts(model, count, seed=0), 2)
        for repeat in group.rounds:
            whole: list[tuple[int, Run, Run]] = []
            for count in plan.concurrency:
                report(f"{count} at once, round {repeat + 1} of {plan.repeats}", 0, 0)
                prompts = plan.work.prompts(model, count, seed=1000 * (repeat + 1) + count)
                run = await run_once(client, prompts, plan.work.new_tokens)
                whole.append((count, run, await run_once(client, prompts, 1)))
            for count, run, first in whole:
                got.runs.setdefault(count, []).append(run)
                got.firsts.setdefault(count, []).append(first)
            got.numbers.append(group.server)


def _summary(served: Served, plan: Plan, limit: MemoryLimit | None) -> dict[str, Any]:
    worker = served.server.workers[0]
    one = next((level for level in served.levels if level.concurrency == 1), None)
    levels = []
    for level in served.levels:
        row = {**asdict(level), **_ratios(level, one)}
        if limit is not None:
            # In the middle of the answer, as many tokens lie in the cache as on average.
            tokens = plan.work.prompt_tokens + plan.work.new_tokens / 2
            step_ms = limit.step_ms(level.concurrency * tokens)
            row["limit_tokens_per_s"] = level.concurrency / step_ms * 1e3
        levels.append(row)
    bandwidth = {} if limit is None else {"memory_bytes_per_s": limit.bytes_per_s}
    return {
        "model": served.model.name,
        "device": worker.device,
        "weight_dtype": worker.weight_dtype,
        "kv_dtype": worker.kv_dtype,
        "tp": len(served.server.workers),
        "num_threads": worker.num_threads,
        "num_cores": len(os.sched_getaffinity(0)),
        "prompt_tokens": plan.work.prompt_tokens,
        "new_tokens": plan.work.new_tokens,
        "repeats": plan.repeats,
        **bandwidth,
        "levels": levels,
    }


def _add_idle(result: dict[str, Any], log: list[str]) -> None:
    """What the first rank said at its end, if it is on a GPU: of the last steps, at all levels."""
    for line in log:
        if found := IDLE.search(line):
            median, most = float(found[1]), float(found[2])
            result["idle_between_steps_us"] = {"median": median, "percentile_99": most}


def _ratios(level: Level, one: Level | None) -> dict[str, float | None]:
    """tokens/s of a level over those of one request: of the whole work, and of decode alone."""
    ratios: dict[str, float | None] = {}
    for name in ("", "decode_", "difference_"):
        mine, its = (getattr(at, f"{name}tokens_per_s", None) for at in (level, one))
        ratios[f"{name}ratio_to_one"] = mine.median / its.median if mine and its else None
    return ratios


def _run_engine(folder: Path, served: Served, plan: Plan, report: Report) -> dict[int, list[float]]:
    """Wall times in ms of the engine in its own process, by concurrency; the same shape of work."""
    report("the engine without gRPC", 0, 0)
    worker = served.server.workers[0]
    rounds = [str(count) for count in plan.concurrency for _ in range(plan.repeats)]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as prompts_file:
        prompts = plan.work.prompts(served.model, max(plan.concurrency), seed=1)
        json.dump(prompts, prompts_file)
        prompts_file.flush()
        command = [sys.executable, "-m", "worker", "bench", "--model", str(folder)]
        command += ["--device", "cuda" if worker.device.startswith("cuda") else "cpu"]
        command += ["--dtype", worker.weight_dtype, "--kv-dtype", worker.kv_dtype]
        if worker.num_threads:
            command += ["--threads", str(worker.num_threads)]
        command += ["--new-tokens", str(plan.work.new_tokens)]
        command += ["--prompt-token-ids-json", prompts_file.name, "--concurrency", *rounds]
        answer = run_json(command)
    walls: dict[int, list[float]] = {}
    for level in answer["ladder"]:
        walls.setdefault(level["concurrency"], []).append(level["wall_ms"])
    return walls


def _add_engine(result: dict[str, Any], walls: dict[int, list[float]]) -> None:
    """Put the engine's figures beside the server's; `grpc_time_ratio` is server over engine."""
    for level in result["levels"]:
        count = level["concurrency"]
        tokens = count * result["new_tokens"]
        speed = Spread.of([tokens / wall * 1e3 for wall in walls[count]])
        level["in_process_tokens_per_s"] = asdict(speed)
        level["grpc_time_ratio"] = level["wall_ms"]["median"] / statistics.median(walls[count])


def _run_peer(folder: Path, served: Served, plan: Plan, report: Report) -> dict[str, Any]:
    report("transformers, one request at a time", 0, 0)
    job = {
        "model": str(folder),
        "prompts": plan.work.prompts(served.model, plan.repeats, seed=2),
        "new_tokens": plan.work.new_tokens,
        "num_threads": served.server.workers[0].num_threads or os.cpu_count() or 1,
    }
    return run_json([sys.executable, "-m", "slotwise_cli.peer_transformers"], json.dumps(job))


def _add_peer(result: dict[str, Any], answer: dict[str, Any]) -> None:
    speed = Spread.of(answer["tokens_per_s"])
    peer = {
        "name": f"transformers {answer['version']}, float32, n=1",
        "num_threads": answer["num_threads"],
        "tokens_per_s": asdict(speed),
        "ttft_ms_p50": statistics.median(answer["ttft_ms"]),
    }
    for level in result["levels"]:
        if level["concurrency"] == 1:
            peer["ratio_at_one"] = level["tokens_per_s"]["median"] / speed.median
    result["peer"] = peer


def _figures(result: dict[str, Any], numbers: tuple[int, ...]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for level in result["levels"]:
        of = f"n={level['concurrency']}"
        for name, values in level["rounds"].items():
            rate = name.endswith("tokens/s")
            better: Better = "higher" if rate else "lower"
            figures[f"{of} {name}"] = Figure(
                "tokens/s" if rate else "ms", better, tuple(values), numbers
            )
    return figures
