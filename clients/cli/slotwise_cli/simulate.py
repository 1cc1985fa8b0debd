"""`slotwise simulate`: what a fleet of replicas would serve, before there is one."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .bench_files import JsonFileOption, PlotOption, check_files, write_json_file
from .output import CliError, Output, Report
from .serve import JsonFlag
from .service_times import ServiceTimes, read_ladder
from .simulation import ROUTINGS, Fleet, Objective, Outcome, Simulation, Workload
from .simulation_plot import plot_simulation

AUTO = "auto"
# An hour's work, and some GB.
_MAX_REQUESTS = 100_000_000
_MAX_SLOTS = 10_000_000
# Of the rate that is found: its bounds are this near.
_PRECISION = 0.02
_COLUMNS = (
    *("routing", "requests/s", "good", "refused", "TTFT ms p50 / p99", "TPOT ms p50 / p99"),
    *("hit rate", "tokens/s", "busy", "failures"),
)


def simulate(
    replicas: Annotated[int, typer.Option(min=1, help="Servers behind a load balancer.")] = 10,
    rate: Annotated[
        str,
        typer.Option(
            help="Requests a second, all together; several with commas; `auto` looks for the most "
            "that keep --goodput."
        ),
    ] = AUTO,
    routing: Annotated[str, typer.Option(help="hash, least, random, with commas.")] = "hash,least",
    max_running: Annotated[int, typer.Option(min=1, help="As of `serve`, per replica.")] = 64,
    num_slots: Annotated[
        int | None, typer.Option(min=1, help="As of `serve` \\[4 x max-running].")
    ] = None,
    max_queue_len: Annotated[int, typer.Option(min=1, help="As of `serve`.")] = 256,
    ladder: Annotated[
        Path | None,
        typer.Option(help="Service times from a file of `bench ladder` \\[8B on one H200]."),
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Requests of a conversation.")] = 6,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of the first turn.")] = 1000,
    turn_tokens: Annotated[int, typer.Option(min=1, help="Of each further turn.")] = 100,
    output_tokens: Annotated[int, typer.Option(min=1)] = 200,
    system_tokens: Annotated[
        int, typer.Option(min=0, help="More, that all conversations begin with.")
    ] = 0,
    pause: Annotated[float, typer.Option(min=0.001, help="Seconds between turns, mean.")] = 10.0,
    equal_lengths: Annotated[
        bool, typer.Option("--equal-lengths", help="All of their mean; else exponential.")
    ] = False,
    slo_ttft_ms: Annotated[float, typer.Option(min=0, help="Of a good request, at most.")] = 500,
    slo_tpot_ms: Annotated[float, typer.Option(min=0, help="Of a good request, at most.")] = 25,
    goodput: Annotated[
        float, typer.Option(min=0, max=1, help="Share of good requests, for `--rate auto`.")
    ] = 0.99,
    load_bound: Annotated[
        float, typer.Option(min=1.0, help="Of hash: most requests of a replica, x the mean.")
    ] = 1.25,
    mtbf_hours: Annotated[
        float | None, typer.Option(min=1e-6, help="Between failures of one replica \\[none].")
    ] = None,
    recovery: Annotated[float, typer.Option(min=0, help="Seconds until it serves again.")] = 10.0,
    duration: Annotated[float, typer.Option(min=1, help="Seconds that count.")] = 60.0,
    warm_up: Annotated[float | None, typer.Option(min=0, help="Seconds before them.")] = None,
    seed: int = 1,
    json_file: JsonFileOption = None,
    plot: PlotOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Simulate replicas behind a load balancer: latencies, hit rate, the most they can serve.

    Needs no server. docs/scaling.md says what is modelled and what is not.
    """
    check_files(json_file, plot)
    output = Output(as_json)
    fleet = Fleet(
        times=read_ladder(ladder) if ladder else ServiceTimes(),
        num_replicas=replicas,
        max_running=max_running,
        num_slots=_slots(num_slots, max_running, replicas),
        max_queue_len=max_queue_len,
        load_bound=load_bound,
        mtbf_s=math.inf if mtbf_hours is None else mtbf_hours * 3600,
        recovery_s=recovery,
    )
    workload = Workload(
        rate=1.0,
        duration_s=duration,
        # By then conversations are in all their turns.
        warm_up_s=1.5 * turns * pause if warm_up is None else warm_up,
        turns=turns,
        prompt_tokens=prompt_tokens,
        turn_tokens=turn_tokens,
        output_tokens=output_tokens,
        system_tokens=system_tokens,
        pause_s=pause,
        is_varied=not equal_lengths,
    )
    objective = Objective(slo_ttft_ms / 1e3, slo_tpot_ms / 1e3)
    rates = [] if rate == AUTO else _rates(rate)
    _check_size(max(rates, default=0.0), workload)
    points: list[dict[str, Any]] = []
    with output.progress() as report:
        for name in _routings(routing):
            planner = Planner(replace(fleet, routing=name), workload, objective, seed, report)
            found = [planner.most(goodput)] if rate == AUTO else planner.at(rates)
            points += [{"routing": name, "rate": r, **one.as_dict()} for r, one in found]
    described = {k: v for k, v in asdict(fleet).items() if k not in ("times", "routing")}
    # JSON knows no infinity.
    described["mtbf_s"] = None if mtbf_hours is None else fleet.mtbf_s
    result = {
        "service_times": asdict(fleet.times),
        "fleet": described,
        "workload": {k: v for k, v in asdict(workload).items() if k != "rate"},
        "objective": asdict(objective),
        "seed": seed,
        "points": points,
    }
    write_json_file(json_file, result)
    if plot is not None:
        plot_simulation(result, plot)
    if as_json:
        output.json(result)
    else:
        _show(result, output)


class Planner:
    """Runs one fleet at rates that are given or looked for."""

    def __init__(
        self, fleet: Fleet, workload: Workload, objective: Objective, seed: int, report: Report
    ) -> None:
        self._fleet, self._workload = fleet, workload
        self._objective, self._seed, self._report = objective, seed, report

    def at(self, rates: Sequence[float]) -> list[tuple[float, Outcome]]:
        """Of each rate."""
        return [(rate, self._run(rate)) for rate in rates]

    def most(self, goodput: float) -> tuple[float, Outcome]:
        """The greatest rate, to 2 %, at which the share of good requests is at least `goodput`.

        CliError when not even one request in ten seconds per replica is served so.
        """
        low = 0.1 * self._fleet.num_replicas
        best = self._run(low)
        if not best.goodput >= goodput:
            raise CliError(
                f"{best.goodput:.1%} of the requests keep to the objective at {low:g} a second, "
                f"and {goodput:.1%} are asked for; give more time (--slo-ttft-ms, --slo-tpot-ms)"
            )
        high = 2 * low
        while (outcome := self._run(high)).goodput >= goodput:
            low, best, high = high, outcome, 2 * high
        while high / low > 1 + _PRECISION:
            middle = math.sqrt(low * high)
            outcome = self._run(middle)
            if outcome.goodput >= goodput:
                low, best = middle, outcome
            else:
                high = middle
        return low, best

    def _run(self, rate: float) -> Outcome:
        self._report(f"routing by {self._fleet.routing}", 0, 0)
        workload = replace(self._workload, rate=rate)
        return Simulation(self._fleet, workload, self._seed).outcome(self._objective)


def _slots(num_slots: int | None, max_running: int, replicas: int) -> int:
    if num_slots is None:
        num_slots = 4 * max_running
    if num_slots < max_running:
        raise CliError(f"--num-slots {num_slots} is below --max-running {max_running}", exit_code=2)
    if num_slots * replicas > _MAX_SLOTS:
        raise CliError(
            f"{replicas} replicas of {num_slots} slots are {num_slots * replicas} slots; at most "
            f"{_MAX_SLOTS:,} are simulated: give fewer --num-slots, --max-running or --replicas",
            exit_code=2,
        )
    return num_slots


def _check_size(rate: float, workload: Workload) -> None:
    seconds = workload.warm_up_s + workload.duration_s
    if rate * seconds > _MAX_REQUESTS:
        raise CliError(
            f"--rate {rate:g} over {seconds:g} s is {rate * seconds:.3g} requests; at most "
            f"{_MAX_REQUESTS:,} are simulated: give a lower --rate or a shorter --duration",
            exit_code=2,
        )


def _routings(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ROUTINGS:
            raise CliError(f"--routing {name!r} is not one of {', '.join(ROUTINGS)}", exit_code=2)
    return names


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise CliError(f"--rate {text!r} is neither `auto` nor a list like 1,2.5,4", exit_code=2)
    return rates


def _show(result: dict[str, Any], output: Output) -> None:
    fleet = result["fleet"]
    output.line(
        f"{fleet['num_replicas']} replicas of {result['service_times']['name']}, each "
        f"{fleet['max_running']} running of {fleet['num_slots']} slots"
    )
    table = Table(box=SIMPLE_HEAD)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "routing" else "right")
    for point in result["points"]:
        table.add_row(
            point["routing"],
            f"{point['rate']:.4g}",
            _percent(point["goodput"]),
            str(point["num_refused"]),
            f"{_ms(point['ttft_p50_s'])} / {_ms(point['ttft_p99_s'])}",
            f"{_ms(point['tpot_p50_s'])} / {_ms(point['tpot_p99_s'])}",
            _percent(point["hit_rate"]),
            f"{point['output_tokens_per_s']:,.0f}",
            _percent(point["utilization"]),
            str(point["num_failures"]),
        )
    output.table(table)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
