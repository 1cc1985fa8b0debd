"""Every log call that names a request has its id as a field of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("scheduler_service", "clients/openai_gateway/slotwise_gateway", "worker")
LEVELS = {"debug", "info", "warning", "error", "critical", "exception", "log"}
# Of what is logged: these are ids.
NAMES = {"request_id", "call_id"}


def log_calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            is_log = isinstance(owner, ast.Name) and owner.id.lower().endswith("log")
            if is_log and node.func.attr in LEVELS:
                yield node


def names_request(call: ast.Call, function: ast.AST) -> bool:
    """By an argument that is an id, or by words such as "request %r", here or in a variable."""
    for given in call.args:
        for node in ast.walk(given):
            if isinstance(node, ast.Attribute) and node.attr in NAMES:
                return True
            if isinstance(node, ast.Name) and node.id in NAMES:
                return True
    texts = [node.value for node in ast.walk(function) if isinstance(node, ast.Constant)]
    own = [node.value for given in call.args for node in ast.walk(given) if _is_text(node)]
    if any(isinstance(given, ast.Name) and given.id == "message" for given in call.args):
        own += [text for text in texts if isinstance(text, str)]
    return any("request %" in str(text) for text in own)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def missing(source: str) -> list[int]:
    """Lines of log calls that name a request and have no `extra`."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for call in log_calls(function):
                has_fields = any(word.arg == "extra" for word in call.keywords)
                if names_request(call, function) and not has_fields:
                    found.add(call.lineno)
    return sorted(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_who_names_a_request_gives_its_id_as_a_field(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert len(paths) > 10
    found = {path.name: lines for path in paths if (lines := missing(path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "log.info('request %r ends', name)",
        "_log.error('lost: %s', end.request_id)",
        "message = 'request %s'; log.log(9, message, name)",
    ],
)
def test_a_call_without_it_is_found(line: str) -> None:
    assert missing(f"def f():\n    {line}") == [2]
    assert not missing(f"def f():\n    {line[:-1]}, extra=about(name))")
