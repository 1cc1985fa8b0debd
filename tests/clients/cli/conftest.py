from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from slotwise_cli.__main__ import main


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def slotwise(monkeypatch, capsys) -> Callable[..., Outcome]:
    """Runs the program in this process with the given words."""

    def run(*words: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["slotwise", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Outcome(ended.value.code or 0, captured.out, captured.err)

    return run
