"""The numbers of docs/tolerances.md, by name."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

TABLE = Path(__file__).parent.parent / "docs" / "tolerances.md"


@dataclass(frozen=True, slots=True)
class Tolerance:
    absolute: float
    relative: float


@cache
def tolerance(name: str) -> Tolerance:
    """The row of the table called `name`; KeyError where there is none."""
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and cells[1] == name:
            absolute, relative = (0.0 if cell == "-" else float(cell) for cell in cells[2:4])
            return Tolerance(absolute, relative)
    raise KeyError(f"{TABLE.name} has no row {name!r}")


def assert_close(got: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    """Every element within the tolerance called `name`, compared in float64."""
    allowed = tolerance(name)
    torch.testing.assert_close(
        got.double(), wanted.double(), atol=allowed.absolute, rtol=allowed.relative
    )
