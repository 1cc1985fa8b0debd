"""What a run of a fuzzer found."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# Of the faults; the first ones say enough.
MAX_SHOWN = 20


@dataclass
class Report:
    """Of a part of a run, or of all parts. Memory: growth of the process that was fuzzed."""

    name: str
    seed: int
    count: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    growth_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """A part that ran at the same time."""
        self.count += other.count
        self.seconds = max(self.seconds, other.seconds)
        self.outcomes.update(other.outcomes)
        self.faults += other.faults
        self.growth_bytes = max(self.growth_bytes, other.growth_bytes)
        self.notes += other.notes

    def __str__(self) -> str:
        rate = self.count / self.seconds if self.seconds else 0
        lines = [
            f"{self.name}: {self.count:,} in {self.seconds:,.0f} s ({rate:,.0f}/s), seed "
            f"{self.seed}, memory grew by {self.growth_bytes / (1 << 20):.1f} MiB, "
            f"{len(self.faults)} faults",
            f"  {json.dumps(dict(self.outcomes.most_common()))}",
            *(f"  {note}" for note in self.notes),
            *(f"  FAULT {fault}" for fault in self.faults[:MAX_SHOWN]),
        ]
        return "\n".join(lines)


def resident_bytes(pid: int | str = "self") -> int:
    """Of a process, without what it shares as a file."""
    fields = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in fields if line.startswith("RssAnon"))
