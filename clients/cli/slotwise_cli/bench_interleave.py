"""`slotwise bench interleave`: what a long prompt does to streams that run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import typer

from slotwise_client import AsyncClient, Client, ModelInfo, ServerInfo

from .bench_files import JsonFileOption, ModelOption, PlotOption, ReportOption, check_files
from .bench_result import common_form, end_with
from .figures import Figure
from .latency import percentile
from .measure import random_prompts
from .measure_interleave import Interleave, Interleaved, StreamEndedError
from .output import CliError, Output, Report
from .serve import DeviceOption, DtypeOption, JsonFlag, ThreadsOption, model_folder, server_flags
from .server_groups import (
    Group,
    ServersOption,
    already_running,
    groups_of,
    measure_groups,
    run_until_ended,
)
from .server_process import running_server


@dataclass(frozen=True, slots=True)
class Plan:
    """`streams` short ones, and a long prompt `window_s` after their first tokens."""

    streams: int
    prompt_tokens: int
    long_tokens: int
    room_tokens: int
    window_s: float
    repeats: int
    seed: int
    servers: int


@dataclass(slots=True)
class Measured:
    """What was seen so far: whole rounds, each with the number of its server."""

    model: ModelInfo | None = None
    server: ServerInfo | None = None
    rounds: list[tuple[int, Interleaved]] = field(default_factory=list)


def interleave(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    streams: Annotated[int, typer.Option(min=1, help="Short ones that run.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a short one.")] = 16,
    long_tokens: Annotated[int, typer.Option(min=1, help="Of the long prompt.")] = 1024,
    room_tokens: Annotated[int, typer.Option(min=2, help="Most that a short one makes.")] = 4096,
    window_s: Annotated[float, typer.Option(min=0.05, help="Before it, and after it.")] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the median is shown.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 1,
    servers: ServersOption = 1,
    server: Annotated[
        str | None, typer.Option(help="Measure this running server, flushing its prefix cache.")
    ] = None,
    json_file: JsonFileOption = None,
    plot: PlotOption = None,
    report_file: ReportOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Drop a long prompt into running streams: their ITL before, meanwhile and after; TTFTs."""
    check_files(json_file, plot, report_file)
    output = Output(as_json)
    plan = Plan(streams, prompt_tokens, long_tokens, room_tokens, window_s, repeats, seed, servers)
    chosen = server_flags(device=device, dtype=dtype, threads=threads)
    refused = ["--model"] if model else chosen
    if server is not None and refused:
        raise CliError(f"{refused[0]} is for a server of our own, not for --server", exit_code=2)
    with output.progress() as report:
        got = Measured()
        measure = partial(_measure_group, plan, report, got)
        if server is not None:
            ended_by = measure_groups(groups_of(repeats, 1), already_running(server), measure)
        else:
            # One seat more, for the long one. The room is what the model allows.
            chosen += server_flags(num_slots=streams + 1)
            start = partial(running_server, model_folder(model or "demo", report), chosen, report)
            ended_by = measure_groups(groups_of(repeats, servers), start, measure)
    if ended_by is not None and not got.rounds:
        raise ended_by
    result = _result(plan, got)
    if not as_json:
        _show(result, output)
    end_with(result, output, json_file, plot, report_file, ended_by)


def _measure_group(plan: Plan, report: Report, got: Measured, address: str, group: Group) -> None:
    with Client(address) as client:
        got.model, got.server = client.model_info(timeout=60), client.server_info(timeout=60)
    if plan.long_tokens + 2 > got.model.max_seq_len:
        message = (
            f"--long-tokens {plan.long_tokens}: {address} has room for {got.model.max_seq_len}"
        )
        raise CliError(message, exit_code=2)
    if got.server.max_running <= plan.streams:
        message = f"{plan.streams} streams and a long prompt want {plan.streams + 1} at once; "
        raise CliError(f"{message}{address} runs {got.server.max_running}", exit_code=2)
    try:
        run_until_ended(_measure(address, got.model, plan, report, got, group))
    except StreamEndedError as error:
        raise CliError(str(error)) from error


async def _measure(
    address: str, model: ModelInfo, plan: Plan, report: Report, got: Measured, group: Group
) -> None:
    room = min(plan.room_tokens, model.max_seq_len - plan.prompt_tokens)
    lengths = [plan.prompt_tokens] * (plan.streams + 2) + [plan.long_tokens] * 2
    async with AsyncClient(address, reconnect=False) as client:
        bench = Interleave(client, plan.window_s, room)
        # The first round warms up.
        for number in (-1, *group.rounds):
            report(f"round {number + 1} of {plan.repeats}", 0, 0)
            *shorts, long, other = random_prompts(model, lengths, plan.seed + 1000 * (number + 1))
            found = await bench.round(shorts, long, other)
            if number >= 0:
                got.rounds.append((group.server, found))


def _result(plan: Plan, got: Measured) -> dict[str, Any]:
    assert got.model is not None
    assert got.server is not None
    own = {"timeline": _timeline(got.rounds[-1][1])}
    result = common_form("interleave", got.model, got.server, asdict(plan), own)
    result["figures"] = _figures(got.rounds)
    return result


def _figures(rounds: Sequence[tuple[int, Interleaved]]) -> dict[str, Figure]:
    values: dict[str, list[tuple[int, float]]] = {}
    for server, one in rounds:
        gaps = one.gaps()
        row = {
            "TTFT of the long prompt": one.long_ttft_ms,
            "TTFT of a short prompt alone": one.alone_ttft_ms,
            "TTFT of a short prompt behind a long one": one.behind_ttft_ms,
        }
        for name, part in (("before", gaps.before), ("during", gaps.during), ("after", gaps.after)):
            for percent in (50, 99, 100) if part else ():
                which = "max" if percent == 100 else f"p{percent}"
                row[f"ITL {name}, {which}"] = percentile(part, percent)
        for name, value in row.items():
            values.setdefault(name, []).append((server, value))
    return {
        name: Figure("ms", "lower", tuple(v for _, v in found), tuple(s for s, _ in found))
        for name, found in values.items()
    }


def _timeline(one: Interleaved) -> dict[str, Any]:
    """The gaps of a round in order of their ends, in s since all streams had begun."""
    start = max(arrivals[0][0] for arrivals in one.streams)
    gaps = sorted(
        (end - start, (end - begin) * 1e3 / count)
        for arrivals in one.streams
        for (begin, _), (end, count) in pairwise(arrivals)
    )
    return {
        "at_s": [round(at, 4) for at, _ in gaps],
        "itl_ms": [round(gap, 3) for _, gap in gaps],
        "long_s": [one.sent - start, one.first - start],
    }


def _show(result: dict[str, Any], output: Output) -> None:
    setup, plan = result["setup"], result["plan"]
    output.line(
        f"{setup['model']}, {setup['device']}, {setup['weight_dtype']}; {plan['streams']} streams, "
        f"a prompt of {plan['long_tokens']:,} tokens between them; at most "
        f"{setup['max_step_tokens']:,} prompt tokens a step; median of {plan['repeats']}"
    )
    for name, figure in result["figures"].items():
        low, high = figure.spread
        output.line(f"{name}: {figure.median:.1f} ms ({low:.1f} to {high:.1f})")
