"""docs/tracing.md names every attribute that the code sets, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("scheduler_service/tracing.py", "clients/openai_gateway/slotwise_gateway/tracing.py")
PREFIX = re.compile(r"(gen_ai|slotwise\.step|slotwise|http)\.[a-z_.]+")
# Names of spans and of the service, not of attributes.
SPANS = {"slotwise.generate", "slotwise.attach"}


def set_by_the_code() -> set[str]:
    found = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse((ROOT / source).read_text())):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and PREFIX.fullmatch(value):
                found.add(value)
    return found - SPANS


def told_by_the_page() -> set[str]:
    """`a.b.c`, `.d` in one cell: a.b.c and a.b.d."""
    text = (ROOT / "docs/tracing.md").read_text()
    found = set()
    for line in text.splitlines():
        cell = line.removeprefix("|").partition("|")[0]
        stem = ""
        for name in re.findall(r"`([a-z_.]+)`", cell) if line.startswith("|") else []:
            if PREFIX.fullmatch(name):
                stem = name.rpartition(".")[0]
                found.add(name)
            elif stem and name.startswith("."):
                found.add(stem + name)
    return found - SPANS


def test_the_page_has_all_attributes_of_the_code():
    assert told_by_the_page() == set_by_the_code()
    assert len(set_by_the_code()) > 20
