"""Damaged folders in child processes, which may die of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO

from fuzz.report import Report

TESTS = Path(__file__).parent.parent


def run_in_child(seed: int, numbers: range) -> Report:
    """Blocks until all folders of these numbers were opened. A death is a fault of the folder at
    which it happened; a new child goes on behind it."""
    report, started = Report("damaged model folders", seed), time.monotonic()
    begin = numbers.start
    while begin < numbers.stop:
        with tempfile.TemporaryFile("w+") as words:
            begin = _run(range(begin, numbers.stop), words, report) + 1
    report.count, report.seconds = len(numbers), time.monotonic() - started
    return report


def _run(numbers: range, words: IO[str], report: Report) -> int:
    """One child; the number that it came to."""
    command = [sys.executable, "-m", "fuzz.folder_child", str(report.seed)]
    child = subprocess.Popen(
        [*command, str(numbers.start), str(numbers.stop)],
        stdout=subprocess.PIPE,
        stderr=words,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
    )
    assert child.stdout is not None
    last = numbers.start
    for line in child.stdout:
        if line.startswith("{"):
            found = json.loads(line)
            found["outcomes"] = Counter(found["outcomes"])
            report.add(Report(report.name, report.seed, **found))
            last = numbers.stop - 1
        else:
            last = int(line)
    if code := child.wait():
        words.seek(0)
        said = words.read()[-1000:]
        report.faults.append(f"folder {last}: the process ended with {code}: {said}")
    return last
