"""A result as one HTML file: tables, pictures, what was measured and how to do it again."""

import base64
import html
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .bench_plots import plot_arrivals, plot_figures, plot_interleave
from .latency import DEFINITIONS
from .plots import plot_ladder

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #1b1f24; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #d5d9de; text-align: right; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; } code { background: #f1f3f5; padding: .1rem .3rem; }
.mark { background: #fff3cd; padding: .5rem 1rem; border-left: 4px solid #b8860b; }
.wide { overflow-x: auto; }
"""


def result_picture(result: Mapping[str, Any]) -> bytes | None:
    """The PNG of a result; None when nothing was measured."""
    if not result["figures"]:
        return None
    kinds = {"arrivals": plot_arrivals, "interleave": plot_interleave, "ladder": plot_ladder}
    return kinds.get(result["kind"], plot_figures)(result)


def report_html(*results: Mapping[str, Any]) -> str:
    """Everything is in it: it asks no other file and no network. Several results follow each
    other under headings of their own."""
    kinds = ", ".join(result["kind"] for result in results)
    parts = []
    for result in results:
        if len(results) > 1:
            parts.append(f"<h2>{_escape(result['kind'])}</h2>")
        parts += _section(result)
    parts += ["<h2>Definitions</h2>", _pairs(DEFINITIONS)]
    return page(f"slotwise bench: {kinds}", "\n".join(parts))


def _section(result: Mapping[str, Any]) -> list[str]:
    parts = [f"<p>{_escape(result['date'])}; {_escape(_machine_line(result))}</p>"]
    if not result["complete"]:
        why = _escape(result["incomplete_because"])
        parts.append(f'<p class="mark">Incomplete: {why}. Figures are of what ended before.</p>')
    if any(point.get("sender_was_bottleneck") for point in result.get("rates", ())):
        parts.append(
            '<p class="mark">The sender was late itself at some rates: these figures are of the '
            "machine that measured as well.</p>"
        )
    if (picture := result_picture(result)) is not None:
        data = base64.b64encode(picture).decode()
        parts.append(f'<img alt="{result["kind"]}" src="data:image/png;base64,{data}">')
    parts += ["<h3>Figures</h3>", figure_table(result["figures"])]
    parts += ["<h3>What was measured</h3>", _pairs(_flat(result["setup"]))]
    if "plan" in result:
        parts += ["<h3>Plan</h3>", _pairs(_flat(result["plan"]))]
    command = _escape(shlex.join(result["command"]))
    return [*parts, "<h3>Again</h3>", f"<p><code>{command}</code></p>"]


def page(title: str, body: str) -> str:
    """A page with its style in it."""
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        # Browsers ask for an icon otherwise.
        '<link rel="icon" href="data:,">\n'
        f"<title>{_escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body><h1>{_escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def figure_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Medians with their spread."""
    rows = [
        (name, _number(one["median"]), one["unit"], _range(one["min"], one["max"]), _spread(one))
        for name, one in figures.items()
    ]
    return table(("figure", "median", "unit", "least to greatest", "spread"), rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are taken literally."""
    head = "".join(f"<th>{_escape(cell)}</th>" for cell in heads)
    lines = ["".join(f"<td>{_escape(cell)}</td>" for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def _spread(figure: Mapping[str, Any]) -> str:
    if len(figure["rounds"]) == 1:
        return "one round: not known"
    return _range(figure["spread"]["low"], figure["spread"]["high"])


def _range(low: float, high: float) -> str:
    return f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _machine_line(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    gpus = ", ".join(machine.get("gpus", ()))
    return f"{machine['cpu']}, {machine['num_cores']} cores" + (f"; {gpus}" if gpus else "")


def _pairs(values: Mapping[str, Any]) -> str:
    return table(("", ""), [(name, str(value)) for name, value in values.items()])


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[before + name] = value
    return flat


def _escape(text: str) -> str:
    return html.escape(str(text))
