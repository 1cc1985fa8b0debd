"""Pictures of results in the common form, as PNG; matplotlib is loaded when one is drawn."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

# Told apart by those who see no red or green too (Okabe and Ito), and by their marks.
_STYLES: Final = (("#0072B2", "o-"), ("#D55E00", "s--"), ("#009E73", "^:"), ("#CC79A7", "D-."))
_GRAY: Final = "#666666"


def plot_arrivals(result: Mapping[str, Any]) -> bytes:
    """TTFT, TPOT and goodput against the rate, with the objective."""
    figure, (ttft, tpot, good) = _figure(3, _title(result))
    points = result["rates"]
    objective = result["plan"]["objective"]
    for axis, name in ((ttft, "TTFT"), (tpot, "TPOT")):
        for style, which in zip(_STYLES, ("p50", "p95", "p99"), strict=False):
            _curve(axis, points, f"{name} {which}", which, style)
        limit = objective[f"{name.lower()}_ms"]
        if limit is not None:
            axis.axhline(limit, color=_GRAY, linestyle="--", label="objective")
        axis.set_ylabel(f"{name}, ms")
        _log(axis)
    _curve(good, points, "goodput", "good requests", _STYLES[0])
    rates = [point["rate"] for point in points]
    good.plot(rates, rates, color=_GRAY, linestyle=":", label="as many as come")
    good.set_ylabel("good requests/s")
    good.set_ylim(bottom=0)
    for axis in (ttft, tpot, good):
        axis.set_xlabel("requests/s that come")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            _legend(axis)
    return _png(figure)


def plot_interleave(result: Mapping[str, Any]) -> bytes:
    """The gaps of the short streams over time; the long prompt is read in the shaded part."""
    figure, (axis,) = _figure(1, _title(result))
    timeline = result["timeline"]
    axis.plot(timeline["at_s"], timeline["itl_ms"], ".", color=_STYLES[0][0], label="short streams")
    begin, end = timeline["long_s"]
    axis.axvspan(begin, end, color=_STYLES[1][0], alpha=0.2, label="a long prompt is read")
    axis.set_xlabel("s since the first token of all streams")
    axis.set_ylabel("gap between tokens, ms")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    _legend(axis)
    return _png(figure)


def plot_figures(result: Mapping[str, Any]) -> bytes:
    """The first figures of another kind, from the least to the greatest round."""
    names = list(result["figures"])[:8]
    figure, (axis,) = _figure(1, _title(result))
    figures = [result["figures"][name] for name in names]
    middle = [one["median"] for one in figures]
    low = [one["median"] - one["min"] for one in figures]
    high = [one["max"] - one["median"] for one in figures]
    axis.barh(names, middle, xerr=[low, high], color=_STYLES[0][0], ecolor="black", capsize=3)
    axis.invert_yaxis()
    axis.set_xlabel(", ".join(dict.fromkeys(one["unit"] for one in figures)))
    axis.grid(axis="x", alpha=0.3)
    return _png(figure)


def _legend(axis: Any) -> None:
    """Beside the points, never over them."""
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _log(axis: Any) -> None:
    """Ticks at 1, 2 and 5 of each decade, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def _figure(rows: int, title: str) -> tuple[Any, Any]:
    # Figure, unlike pyplot, needs no display and keeps no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.5 + 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    axes[0].set_title(title, fontsize=10)
    return figure, axes


def _title(result: Mapping[str, Any]) -> str:
    setup = result["setup"]
    words = f"{setup['model']}, {setup['device']}, {setup['weight_dtype']}, TP {setup['tp']}"
    return words if result["complete"] else f"{words} (incomplete)"


def _curve(
    axis: Any, points: Sequence[Mapping[str, Any]], name: str, label: str, style: tuple[str, str]
) -> None:
    """Medians over the rates that have the figure, with bars from the least to the greatest."""
    having = [
        (point["rate"], point["figures"][name]) for point in points if name in point["figures"]
    ]
    if not having:
        return
    middle = [one["median"] for _, one in having]
    below = [one["median"] - one["min"] for _, one in having]
    above = [one["max"] - one["median"] for _, one in having]
    rates = [rate for rate, _ in having]
    color, form = style
    axis.errorbar(rates, middle, [below, above], fmt=form, color=color, capsize=3, label=label)


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()
