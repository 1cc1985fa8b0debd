"""Figures of a long run: as JSON, and as Markdown to read."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos.chaos import Strike


@dataclass
class Report:
    """`facts` are told in order; `strikes` by kind, with their times."""

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    strikes: list[Strike] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Two files, called by the title."""
        folder.mkdir(parents=True, exist_ok=True)
        whole = {
            "title": self.title,
            "machine": f"{platform.machine()}, Python {platform.python_version()}",
            **self.facts,
            "times": self.times(),
            "strikes": [asdict(strike) for strike in self.strikes],
        }
        name = self.title.replace(" ", "-")
        (folder / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
        (folder / f"{name}.md").write_text(str(self))

    def times(self) -> dict[str, dict[str, dict[str, float]]]:
        """By fault and "all": of each time its median, p90 and most, in seconds."""
        names = sorted({strike.name for strike in self.strikes})
        groups = {name: [one for one in self.strikes if one.name == name] for name in names}
        groups["all"] = self.strikes
        return {
            name: {
                kind: spread(times)
                for kind in ("not_serving_s", "ready_s", "first_token_s")
                if (times := [time for one in group if (time := getattr(one, kind)) is not None])
            }
            | {"count": {"count": len(group)}}
            for name, group in groups.items()
        }

    def __str__(self) -> str:
        lines = [f"# {self.title}", ""]
        lines += [f"- {name}: {value}" for name, value in self.facts.items()]
        lines += ["", "Seconds after the fault, as median / p90 / most:", "", *self.table()]
        return "\n".join(lines) + "\n"

    def table(self) -> list[str]:
        """Lines of Markdown: each kind of fault, and all."""
        lines = [
            "| fault | times | NOT_SERVING | ready | first new token |",
            "|---|---|---|---|---|",
        ]
        for name, group in self.times().items():
            cells = [
                " / ".join(f"{one:.2f}" for one in group[kind].values()) if kind in group else "-"
                for kind in ("not_serving_s", "ready_s", "first_token_s")
            ]
            lines.append(f"| {name} | {group['count']['count']} | {' | '.join(cells)} |")
        return lines


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile and the most."""
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 3),
        "p90": round(ordered[math.ceil(0.9 * len(ordered)) - 1], 3),
        "max": round(ordered[-1], 3),
    }
