"""Rounds of a server in two ways, by turns, and what the one costs beside the other."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .measure import Spread


def cost(without: Sequence[float], with_it: Sequence[float]) -> Spread:
    """Percent of tokens/s that it costs, over rounds that were neighbours."""
    pairs = zip(without, with_it, strict=True)
    return Spread.of([100 * (1 - mine / other) for other, mine in pairs])


def speed_table(rows: dict[str, dict[str, Any]]) -> Table:
    """`rows`: by name, `measure.summary` of its rounds."""
    table = Table(box=SIMPLE_HEAD)
    for title in ("", "tok/s", "spread", "TTFT ms", "TTFT p90 ms"):
        table.add_column(title, justify="right" if title else "left")
    for name, row in rows.items():
        speed = Spread(**row["tokens_per_s"])
        table.add_row(
            name,
            f"{speed.median:.1f}",
            f"{speed.min:.1f} to {speed.max:.1f}",
            f"{row['ttft_ms_p50']:.2f}",
            f"{row['ttft_ms_p90']:.2f}",
        )
    return table
