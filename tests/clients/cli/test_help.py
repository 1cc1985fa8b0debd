"""What `--help` prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from slotwise_cli.__main__ import build_app

IN_BRACKETS = re.compile(r"\[[^\]\[]+\]")


def commands(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield names, command
        return
    for name, child in command.commands.items():
        yield from commands(child, *names, name)


COMMANDS = dict(commands(typer.main.get_command(build_app())))


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_defaults_in_brackets_are_printed(slotwise, monkeypatch, names: tuple[str, ...]) -> None:
    """They look like markup, which would be left out."""
    monkeypatch.setenv("COLUMNS", "500")
    printed = slotwise(*names, "--help").out
    for parameter in COMMANDS[names].params:
        for words in IN_BRACKETS.findall(getattr(parameter, "help", None) or ""):
            assert words in printed, parameter.name
