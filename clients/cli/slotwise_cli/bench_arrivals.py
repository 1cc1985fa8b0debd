"""`slotwise bench arrivals`: latency and goodput of requests that come when they come."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import itemgetter
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from slotwise_client import AsyncClient, Client, ModelInfo, ServerInfo

from .arrivals import (
    FATES,
    Goodput,
    Lengths,
    Objective,
    Outcome,
    late_p99_ms,
    poisson,
    sender_was_bottleneck,
)
from .bench_files import JsonFileOption, ModelOption, PlotOption, ReportOption, check_files
from .bench_result import common_form, end_with
from .figures import Better, Figure
from .latency import PERCENTILES, latencies, percentile
from .measure_arrivals import LostError, OpenLoop, capacity
from .number_list import decimals
from .output import CliError, Output, Report
from .result_file import figures_json
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

Find = Callable[[dict[str, Any]], float | None]
# Of the capacity, with `--rates auto`: easy, busy, near it and beyond.
AUTO = (0.3, 0.6, 0.9, 1.2)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send. `rates` None: parts of the capacity, which is measured first."""

    rates: tuple[float, ...] | None
    prompt: Lengths
    new: Lengths
    duration_s: float
    warm_up_s: float
    repeats: int
    seed: int
    timeout_s: float
    objective: Objective
    servers: int


@dataclass(frozen=True, slots=True)
class Round:
    """What was sent at a rate, to the server of this number."""

    server: int
    rate: float
    outcomes: list[Outcome]


@dataclass(slots=True)
class Measured:
    """What was seen so far: whole rounds by what their rate is called; `part` was cut off.
    `capacities`: requests a second, by server."""

    model: ModelInfo | None = None
    server: ServerInfo | None = None
    capacities: dict[int, float] = field(default_factory=dict)
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    part: Round | None = None


def arrivals(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    rates: Annotated[
        str, typer.Option(help="Requests a second, with commas; `auto`: parts of the capacity.")
    ] = "auto",
    prompt_tokens: Annotated[str, typer.Option(help="A length, or LEAST-MOST.")] = "32",
    output_tokens: Annotated[str, typer.Option(help="The same.")] = "32",
    duration_s: Annotated[float, typer.Option(min=0.1, help="Of a round.")] = 20.0,
    warm_up_s: Annotated[float, typer.Option(min=0.0, help="Before it, not counted.")] = 3.0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the median is shown.")] = 3,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 1,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Of a request.")] = 120.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(min=0, help="Most a good one has.")] = None,
    slo_itl_ms: Annotated[float | None, typer.Option(min=0, help="Its 99th percentile.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(min=0, help="Its mean ITL.")] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(min=0, help="To the last token.")] = None,
    num_slots: Annotated[int | None, typer.Option(min=1, help="[8]")] = None,
    servers: ServersOption = 1,
    server: Annotated[str | None, typer.Option(help="Measure this running server.")] = None,
    json_file: JsonFileOption = None,
    plot: PlotOption = None,
    report_file: ReportOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Send requests at given rates, never waiting for answers: latencies, goodput, refusals."""
    check_files(json_file, plot, report_file)
    output = Output(as_json)
    plan = Plan(
        None if rates == "auto" else decimals("--rates", rates),
        Lengths.parse("--prompt-tokens", prompt_tokens),
        Lengths.parse("--output-tokens", output_tokens),
        duration_s,
        warm_up_s,
        repeats,
        seed,
        timeout_s,
        Objective(slo_ttft_ms, slo_itl_ms, slo_tpot_ms, slo_e2e_ms),
        servers,
    )
    chosen = server_flags(device=device, dtype=dtype, threads=threads, num_slots=num_slots)
    refused = ["--model"] if model else chosen
    if server is not None and refused:
        raise CliError(f"{refused[0]} is for a server of our own, not for --server", exit_code=2)
    with output.progress() as report:
        got = Measured()
        measure = partial(_measure_group, plan, report, got)
        if server is not None:
            ended_by = measure_groups(groups_of(repeats, 1), already_running(server), measure)
        else:
            chosen += server_flags(num_slots=None if num_slots else 8)
            chosen += server_flags(max_seq_len=plan.prompt.most + plan.new.most)
            start = partial(running_server, model_folder(model or "demo", report), chosen, report)
            ended_by = measure_groups(groups_of(repeats, servers), start, measure)
    if ended_by is not None and got.model is None:
        raise ended_by
    result = _result(plan, got)
    if not as_json:
        _show(result, output)
    end_with(result, output, json_file, plot, report_file, ended_by)


def _measure_group(plan: Plan, report: Report, got: Measured, address: str, group: Group) -> None:
    with Client(address) as client:
        model, got.server = client.model_info(timeout=60), client.server_info(timeout=60)
    longest = plan.prompt.most + plan.new.most
    if longest > model.max_seq_len:
        message = f"{longest} tokens are wanted; {address} has room for {model.max_seq_len}"
        raise CliError(message, exit_code=2)
    got.model = model
    try:
        run_until_ended(_measure(address, plan, report, got, group))
    except LostError as error:
        raise error.cause from error


async def _measure(address: str, plan: Plan, report: Report, got: Measured, group: Group) -> None:
    """Rounds go round the rates, so that slow drift of the machine meets all alike."""
    assert got.model is not None
    async with AsyncClient(address, reconnect=False) as client:
        rates = await _rates(client, plan, report, got, group)
        loop = OpenLoop(client, got.model, plan.warm_up_s, plan.timeout_s)
        for repeat in group.rounds:
            for number, (name, rate) in enumerate(rates.items()):
                report(f"{rate:.3g} requests/s, round {repeat + 1} of {plan.repeats}", 0, 0)
                seed = plan.seed + 1000 * (repeat + 1) + number
                seconds = plan.warm_up_s + plan.duration_s
                sent = poisson(rate, seconds, plan.prompt, plan.new, seed)
                try:
                    outcomes = await loop.run(sent, seed)
                except LostError as error:
                    got.part = Round(group.server, rate, error.outcomes)
                    raise
                got.rounds.setdefault(name, []).append(Round(group.server, rate, outcomes))


async def _rates(
    client: AsyncClient, plan: Plan, report: Report, got: Measured, group: Group
) -> dict[str, float]:
    """By name. Each server has the rates of its own capacity: how well that is known is in the
    spread then."""
    if plan.rates is not None:
        return {f"{rate:g}/s": rate for rate in plan.rates}
    assert got.model is not None
    assert got.server is not None
    report("the capacity", 0, 0)
    at_once = got.server.max_running
    per_s = 0.0
    # The first one warms up the machine.
    for count in (at_once, 4 * at_once):
        sample = poisson(count, 10.0, plan.prompt, plan.new, plan.seed)[:count]
        per_s = await capacity(client, got.model, sample, at_once, plan.timeout_s)
    got.capacities[group.server] = per_s
    return {f"{part:g} of capacity": part * per_s for part in AUTO}


def _result(plan: Plan, got: Measured) -> dict[str, Any]:
    assert got.model is not None
    assert got.server is not None
    per_s = list(got.capacities.values())
    own = {"capacity_per_s": statistics.median(per_s) if per_s else None}
    result = common_form("arrivals", got.model, got.server, asdict(plan), own)
    figures: dict[str, Figure] = {}
    if per_s:
        which = tuple(got.capacities)
        figures["capacity"] = Figure("requests/s", "higher", tuple(per_s), which)
    result["rates"] = []
    for name, rounds in got.rounds.items():
        rows = [
            {"server": one.server, "rate": one.rate, **_round(one.outcomes, plan)} for one in rounds
        ]
        mine = _figures(rows)
        figures |= {f"{name} {which}": figure for which, figure in mine.items()}
        point = {
            "name": name,
            "rate": statistics.median(one.rate for one in rounds),
            "sender_was_bottleneck": any(row["sender_was_bottleneck"] for row in rows),
        }
        result["rates"].append({**point, "figures": figures_json(mine), "rounds": rows})
    if got.part is not None:
        result["cut_off"] = {"rate": got.part.rate, **_round(got.part.outcomes, plan)}
    result["figures"] = figures_json(figures)
    return result


def _round(outcomes: Sequence[Outcome], plan: Plan) -> dict[str, Any]:
    counted = [one for one in outcomes if one.counted]
    ended = [one.timeline for one in counted if one.fate == "ended" and one.timeline.arrivals]
    good = Goodput.of(outcomes, plan.objective, plan.duration_s)
    row: dict[str, Any] = {
        "fates": {fate: sum(one.fate == fate for one in counted) for fate in FATES},
        "sent_per_s": len(counted) / plan.duration_s,
        "ended_per_s": len(ended) / plan.duration_s,
        "goodput_share": good.share,
        "goodput_per_s": good.rate,
        "late_p99_ms": late_p99_ms(outcomes),
        "sender_was_bottleneck": sender_was_bottleneck(outcomes),
    }
    for name, values in latencies(ended).items():
        row[name] = None
        if values:
            row[name] = {f"p{p}": percentile(values, p) for p in PERCENTILES}
            row[name]["mean"] = sum(values) / len(values)
    return row


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    """Of one rate; a figure that some round lacks has fewer rounds, or is left out."""

    def add(
        name: str, unit: str, better: Better, find: Callable[[dict[str, Any]], float | None]
    ) -> None:
        found = [(value, row["server"]) for row in rows if (value := find(row)) is not None]
        if found:
            values, servers = zip(*found, strict=True)
            figures[name] = Figure(unit, better, values, servers)

    figures: dict[str, Figure] = {}
    add("goodput", "requests/s", "higher", itemgetter("goodput_per_s"))
    add("good share", "", "higher", itemgetter("goodput_share"))
    for kind in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        for which in (*(f"p{p}" for p in PERCENTILES), "mean"):
            name = f"{kind.removesuffix('_ms').upper()} {which}"
            add(name, "ms", "lower", partial(_latency, kind, which))
    return figures


def _latency(kind: str, which: str, row: dict[str, Any]) -> float | None:
    found: float | None = row[kind][which] if row[kind] is not None else None
    return found


def _show(result: dict[str, Any], output: Output) -> None:
    setup, plan = result["setup"], result["plan"]
    output.line(
        f"{setup['model']}, {setup['device']}, {setup['weight_dtype']}, {setup['num_slots']} "
        f"slots; Poisson arrivals, {plan['duration_s']:g} s a round, "
        f"median of {plan['repeats']}; ms from the planned arrival"
    )
    if result["capacity_per_s"] is not None:
        output.line(f"capacity: {result['capacity_per_s']:.3g} requests/s")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    heads = ("rate", "good", "good/s", "TTFT", "p99", "ITL", "p99", "TPOT", "E2E p99")
    for head in (*heads, "refused", "failed", "sender late"):
        table.add_column(head, justify="right", no_wrap=True)
    for point in result["rates"]:
        table.add_row(*_row(point))
    output.table(table)
    if any(point["sender_was_bottleneck"] for point in result["rates"]):
        output.line("!: the sender was late itself; these figures are of it as well")


def _row(point: dict[str, Any]) -> list[str]:
    figures = point["figures"]

    def shown(name: str, form: str) -> str:
        return format(figures[name]["median"], form) if name in figures else "-"

    fates = [row["fates"] for row in point["rounds"]]
    failed = sum(one[fate] for one in fates for fate in ("timeout", "error", "lost"))
    late = max(row["late_p99_ms"] for row in point["rounds"])
    return [
        f"{point['rate']:.3g}",
        shown("good share", ".0%"),
        shown("goodput", ".2f"),
        shown("TTFT p50", ".0f"),
        shown("TTFT p99", ".0f"),
        shown("ITL p50", ".1f"),
        shown("ITL p99", ".1f"),
        shown("TPOT p50", ".1f"),
        shown("E2E p99", ".0f"),
        str(sum(one["refused"] for one in fates)),
        str(failed),
        f"{late:.1f}" + (" !" if point["sender_was_bottleneck"] else ""),
    ]
