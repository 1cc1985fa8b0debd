"""A process for trials in place of the library's: it does what a word in the grammar says.

`python fake_trial.py BYTES [FILE]`: the memory that a trial may take, and a file that is there when
one sleeps. Anything else than a fault compiles.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import llguidance

from scheduler_service import grammar_trial
from scheduler_service.errors import InvalidArgumentError
from scheduler_service.vocabulary import Vocabulary


def spin() -> None:
    while True:
        pass


def sleep() -> None:
    Path(sys.argv[2]).touch()
    time.sleep(3600)


def refuse() -> None:
    raise InvalidArgumentError("regex", "is refused")


class Panic(BaseException):
    """As the library raises it."""


def panic() -> None:
    raise Panic("at the disco")


FAULTS = {
    "abort": os.abort,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sleep": sleep,
    "spin": spin,
    "grow": lambda: bytearray(1 << 40),
    "refuse": refuse,
    "panic": panic,
}


class FaultyVocabulary(Vocabulary):
    def matcher(self, kind: str, grammar: str) -> llguidance.LLMatcher:
        for word, fault in FAULTS.items():
            if word in grammar:
                fault()
        return super().matcher(kind, grammar)


if __name__ == "__main__":
    grammar_trial.MEMORY_BYTES = int(sys.argv[1])
    sys.exit(grammar_trial.serve(FaultyVocabulary))
