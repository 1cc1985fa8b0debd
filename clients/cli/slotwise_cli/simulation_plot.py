"""The picture of a simulation; matplotlib is loaded when one is drawn."""

from pathlib import Path
from typing import Any

# Told apart by those who see no red or green too (Okabe and Ito), and by their marks.
_STYLES = {"hash": ("#0072B2", "o-"), "least": ("#D55E00", "s--"), "random": ("#009E73", "^:")}
_NAMES = {"hash": "consistent hash, bounded load", "least": "least loaded", "random": "random"}


def plot_simulation(result: dict[str, Any], path: Path) -> None:
    """Good requests, the first token's p99 and the hit rate against the rate, by routing."""
    # Figure, unlike pyplot, needs no display and keeps no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 8), layout="constrained")
    good, first, hits = figure.subplots(3, 1, sharex=True)
    fleet = result["fleet"]
    good.set_title(
        f"{fleet['num_replicas']} replicas of {result['service_times']['name']} (simulated)",
        fontsize=10,
    )
    for routing in dict.fromkeys(point["routing"] for point in result["points"]):
        points = [point for point in result["points"] if point["routing"] == routing]
        rates = [point["rate"] for point in points]
        color, style = _STYLES[routing]
        for axis, name, scale in (
            (good, "goodput", 100),
            (first, "ttft_p99_s", 1000),
            (hits, "hit_rate", 100),
        ):
            values = [_scaled(point[name], scale) for point in points]
            axis.plot(rates, values, style, color=color, label=_NAMES[routing])
    good.set_ylabel("requests within the objective, %")
    first.set_ylabel("time to first token, p99, ms")
    first.set_yscale("log")
    limit = result["objective"]["time_to_first_token_s"]
    if limit is not None:
        first.axhline(limit * 1000, color="#999999", label="objective")
    hits.set_ylabel("prompt tokens found in a cache, %")
    hits.set_xlabel("requests a second, all replicas together")
    for axis in (good, hits):
        axis.set_ylim(0, 105)
    for axis in (good, first, hits):
        axis.grid(alpha=0.3)
    first.legend(frameon=False)
    figure.savefig(path, format="png", dpi=150)


def _scaled(value: float | None, scale: float) -> float:
    """What there is none of leaves a gap."""
    return float("nan") if value is None else value * scale
