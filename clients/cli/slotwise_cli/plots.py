"""Pictures of the measurements; matplotlib is loaded when one is drawn."""

import io
from collections.abc import Mapping
from typing import Any

# Told apart by those who see no red or green too (Okabe and Ito).
_OWN, _OTHER, _LIMIT = "#0072B2", "#D55E00", "#999999"


def plot_ladder(result: Mapping[str, Any]) -> bytes:
    """A PNG: tokens/s against concurrency, with the limit if known; below, the ratio to one."""
    levels = result["levels"]
    counts = [level["concurrency"] for level in levels]
    figure, (speed, ratio) = _figure(2, f"{_title(result)}, {result['prompt_tokens']} prompt")
    _curve(speed, counts, [level["decode_tokens_per_s"] for level in levels], "decode")
    _curve(speed, counts, [level["tokens_per_s"] for level in levels], "with prefill", _OTHER, True)
    if "limit_tokens_per_s" in levels[0]:
        limits = [level["limit_tokens_per_s"] for level in levels]
        speed.plot(counts, limits, color=_LIMIT, label="limit by memory bandwidth")
    speed.set_ylabel("tokens/s")
    speed.legend(frameon=False)
    if levels[0]["decode_ratio_to_one"] is not None:
        ratios = [level["decode_ratio_to_one"] for level in levels]
        ratio.plot(counts, ratios, "o-", color=_OWN, label="decode")
        ratio.plot(counts, counts, color=_LIMIT, label="as many as requests")
        ratio.legend(frameon=False)
    ratio.set_ylabel("x one request")
    for axis in (speed, ratio):
        _axis(axis, counts, "requests at once")
    return _png(figure)


def plot_steps(result: Mapping[str, Any]) -> bytes:
    """A PNG: time of a decode step against context, a line per concurrency, each with its limit."""
    figure, (steps,) = _figure(1, _title(result))
    contexts = sorted({point["context"] for point in result["points"]})
    for number, count in enumerate(sorted({p["concurrency"] for p in result["points"]})):
        points = [point for point in result["points"] if point["concurrency"] == count]
        at = [point["context"] for point in points]
        name = "1 request" if count == 1 else f"{count} requests"
        _curve(steps, at, [p["step_ms"] for p in points], name, color=f"C{number}")
        if "limit_step_ms" in points[0]:
            limits = [point["limit_step_ms"] for point in points]
            steps.plot(at, limits, ":", color=f"C{number}", label=f"{name}: limit by memory")
    steps.set_ylabel("ms per decode step")
    steps.legend(frameon=False)
    steps.set_xscale("log", base=2)
    _axis(steps, contexts, "tokens of context per request")
    return _png(figure)


def _figure(rows: int, title: str) -> tuple[Any, Any]:
    # Figure, unlike pyplot, needs no display and keeps no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.5 + 3 * rows), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    axes[0].set_title(title, fontsize=10)
    return figure, axes


def _title(result: Mapping[str, Any]) -> str:
    return f"{result['model']}, {result['device']}, {result['weight_dtype']}, TP {result['tp']}"


def _curve(
    axis: Any,
    at: list[int],
    spreads: list[dict[str, float]],
    label: str,
    color: str = _OWN,
    dashed: bool = False,
) -> None:
    """Medians, with bars from the least to the greatest."""
    middle = [spread["median"] for spread in spreads]
    below = [spread["median"] - spread["min"] for spread in spreads]
    above = [spread["max"] - spread["median"] for spread in spreads]
    style = "s--" if dashed else "o-"
    axis.errorbar(at, middle, [below, above], fmt=style, color=color, capsize=3, label=label)


def _axis(axis: Any, ticks: list[int], label: str) -> None:
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_xlabel(label)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()
