"""`slotwise bench compare`: two results, figure by figure, each with its spread."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .bench_files import JsonFileOption, ReportOption, check_files, keep, write_json_file
from .figures import Figure
from .output import CliError, Output
from .report import page, table
from .result_file import read_result
from .serve import JsonFlag


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of both. `verdict`: same (within spread), better, worse, or not known."""

    name: str
    unit: str
    a: float
    b: float
    a_spread: tuple[float, float]
    b_spread: tuple[float, float]
    verdict: str
    # How much worse B is than A, in percent of A; negative when it is better; None of 0.
    worse_percent: float | None

    @property
    def ratio(self) -> float | None:
        """B over A."""
        return self.b / self.a if self.a else None


def compare(
    a: Annotated[Path, typer.Argument(help="The result to compare with.")],
    b: Annotated[Path, typer.Argument(help="The other one, of the same kind.")],
    fail_if_worse: Annotated[
        float | None,
        typer.Option(
            min=0, help="Exit with 1 when a figure is worse by more percent, and beyond the spread."
        ),
    ] = None,
    json_file: JsonFileOption = None,
    report: ReportOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare two results of `slotwise bench`, each figure with the spread of both."""
    for path in (json_file, report):
        check_files(path, None)
    output = Output(as_json)
    first, second = read_result(a), read_result(b)
    if first["kind"] != second["kind"]:
        kinds = f"{a} is of `bench {first['kind']}`, {b} of `bench {second['kind']}`"
        raise CliError(f"{kinds}: only results of one kind are compared", exit_code=2)
    differing, rows = differences(first, second), compare_figures(first, second)
    if not rows:
        raise CliError(f"{a} and {b} have no figure in common", exit_code=2)
    result = {
        "differing": differing,
        "figures": [{**asdict(one), "ratio": one.ratio} for one in rows],
    }
    if as_json:
        output.json(result)
    else:
        _show(differing, rows, output)
    write_json_file(json_file, result)
    if report is not None:
        keep(report, _html(f"{a.name} and {b.name}", differing, rows).encode(), result)
    if fail_if_worse is not None and any(_is_worse(one, fail_if_worse) for one in rows):
        raise typer.Exit(1)


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What the two were not measured alike in, as sentences."""
    found: list[str] = []
    for part in ("machine", "setup", "plan"):
        mine, its = a.get(part, {}), b.get(part, {})
        for name in dict.fromkeys((*mine, *its)):
            if mine.get(name) != its.get(name):
                found.append(f"{part}.{name}: {mine.get(name)} / {its.get(name)}")
    for which, of in (("A", a), ("B", b)):
        if not of["complete"]:
            found.append(f"{which} is incomplete: {of['incomplete_because']}")
    only = sorted(a["figures"].keys() ^ b["figures"].keys())
    if only:
        found.append(f"figures that one of them lacks: {', '.join(only)}")
    return found


def compare_figures(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Compared]:
    """Those that both have, in the order of the first."""
    names = [name for name in a["figures"] if name in b["figures"]]
    return [
        _compare(name, Figure.read(a["figures"][name]), Figure.read(b["figures"][name]))
        for name in names
    ]


def _compare(name: str, a: Figure, b: Figure) -> Compared:
    worse = None
    if a.median:
        sign = 1 if a.better == "lower" else -1
        worse = sign * (b.median - a.median) / abs(a.median) * 100
    spreads = [one.spread for one in (a, b)]
    verdict = _verdict(a, b)
    return Compared(name, a.unit, a.median, b.median, spreads[0], spreads[1], verdict, worse)


def _verdict(a: Figure, b: Figure) -> str:
    if min(len(a.rounds), len(b.rounds)) < 2:
        return "not known"
    (low, high), (its_low, its_high) = a.spread, b.spread
    if low <= its_high and its_low <= high:
        return "same"
    return "better" if (b.median > a.median) == (a.better == "higher") else "worse"


def _is_worse(one: Compared, percent: float) -> bool:
    # Nothing at first and something now is worse by any percent.
    worse = float("inf") if one.worse_percent is None else one.worse_percent
    return one.verdict == "worse" and worse > percent


def _cells(one: Compared) -> tuple[str, ...]:
    ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
    sides = ((one.a, one.a_spread), (one.b, one.b_spread))
    shown = [f"{at:.4g} ({low:.4g} to {high:.4g})" for at, (low, high) in sides]
    words = {"same": "same within spread", "not known": "one round: not known"}
    verdict = words.get(one.verdict, one.verdict)
    if one.verdict in ("better", "worse") and one.worse_percent is not None:
        verdict += f" by {abs(one.worse_percent):.1f} %"
    return one.name, one.unit, *shown, ratio, verdict


_HEADS = ("figure", "unit", "A", "B", "B/A", "B is")


def _show(differing: list[str], rows: list[Compared], output: Output) -> None:
    for line in differing:
        output.line(f"differs: {line}")
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in _HEADS:
        shown.add_column(head, justify="right", no_wrap=True)
    for one in rows:
        shown.add_row(*_cells(one))
    output.table(shown)


def _html(title: str, differing: list[str], rows: list[Compared]) -> str:
    told = table(("measured differently: A / B",), [(line,) for line in differing])
    return page(title, (told if differing else "") + table(_HEADS, [_cells(one) for one in rows]))
