"""Writes the table of fields in docs/gateway.md from the one in the code: run it as a program."""

from __future__ import annotations

from pathlib import Path

from slotwise_gateway.fields import FIELDS, Field, Route, Use

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gateway.md"
BEGIN, END = "<!-- fields -->\n", "<!-- end -->\n"
WORDS = {Use.HONOURED: "honoured", Use.NEUTRAL: "neutral value", Use.REFUSED: "refused"}


def table() -> str:
    """Of all rows, in their order."""
    lines = ["| field | route | | what is taken, or why not |", "|---|---|---|---|"]
    lines += [_line(row) for row in FIELDS]
    return "\n".join([*lines, ""])


def written(page: str) -> str:
    """The page with the table of today."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def _line(row: Field) -> str:
    routes = "both" if len(row.routes) == len(Route) else next(iter(row.routes)).value
    more = ", extension" if row.is_extension else ", required" if row.is_required else ""
    note = row.note.replace("|", "\\|")
    return f"| `{row.path}` | {routes} | {WORDS[row.use]}{more} | {note} |"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
