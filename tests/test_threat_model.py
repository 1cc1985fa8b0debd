"""Each test that docs/threat-model.md names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/threat-model.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", TEXT)))


def test_every_line_of_the_tables_names_one():
    rows = re.findall(r"^\|.*\|$", TEXT.partition("## A client")[2], re.M)
    lines = [row for row in rows if not re.match(r"\| danger |\|---", row)]
    assert len(lines) > 30
    assert [line for line in lines if ".py" not in line] == []


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_it_is_there(path, name):
    file = ROOT / path if path.startswith("tests/") else ROOT / "tests" / path
    assert re.search(rf"def {name}\(" if name else "def test_", file.read_text())
