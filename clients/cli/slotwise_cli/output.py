"""What the commands print: results on stdout, everything else on stderr, errors as one line."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

# (stage, done, total); total is 0 while it is not known. Units are the caller's, mostly bytes.
Report = Callable[[str, int, int], None]

# Columns; more than any table of ours needs.
_WIDE = 240


class CliError(Exception):
    """Something the user can act on; `exit_code` becomes the exit status of the process."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class Color(StrEnum):
    """Styles by meaning."""

    GOOD = "green"
    BAD = "bold red"
    FAINT = "dim"


def report_nothing(stage: str, done: int, total: int) -> None:
    """A Report that shows nothing."""


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command writes. With `as_json`, stdout holds JSON only and stderr no decoration."""

    as_json: bool
    stdout: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    stderr: Console = field(
        default_factory=lambda: Console(stderr=True, highlight=False, soft_wrap=True)
    )

    def json(self, value: Any) -> None:
        """One JSON value on one line of stdout, at once."""
        print(json.dumps(value, ensure_ascii=False), flush=True)

    def line(self, text: str) -> None:
        """A line of the result, taken literally."""
        self.stdout.print(text, markup=False)

    def table(self, table: Table) -> None:
        """A table of the result in its full width: a terminal may wrap it, nothing is cut off."""
        Console(file=self.stdout.file, width=_WIDE, soft_wrap=True).print(table)

    def text(self, text: str) -> None:
        """A piece of generated text, taken literally and shown at once."""
        self.stdout.file.write(text)
        self.stdout.file.flush()

    def aside(self, text: str) -> None:
        """A piece of text that is not the answer, on stderr at once; nothing with `as_json`."""
        if not self.as_json:
            self.stderr.print(text, markup=False, style=Color.FAINT, end="")

    def note(self, text: str) -> None:
        """A remark for people, on stderr; nothing with `as_json`."""
        if not self.as_json:
            self.stderr.print(text, markup=False, style=Color.FAINT)

    def error(self, message: str) -> None:
        """One line on stderr that says what was wrong."""
        self.stderr.print(f"error: {' '.join(message.split())}", markup=False)

    @contextmanager
    def progress(self) -> Iterator[Report]:
        """A bar on stderr for the stages of one long operation; gone when it is done.

        Where stderr is no terminal each stage is one line.
        """
        if self.as_json:
            yield report_nothing
        elif not self.stderr.is_terminal:
            yield _StageLines(self).report
        else:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
                TimeElapsedColumn(),
            )
            with Progress(*columns, console=self.stderr, transient=True) as bar:
                yield _Bar(bar).report


class _StageLines:
    def __init__(self, output: Output) -> None:
        self._output = output
        self._stage = ""

    def report(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            self._output.note(f"{stage} ...")


class _Bar:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._stage = ""
        self._task: TaskID | None = None

    def report(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage or self._task is None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._stage = stage
            self._task = self._progress.add_task(stage, total=None, amount="")
        amount = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if total >= 1_000_000 else ""
        self._progress.update(self._task, completed=done, total=total or None, amount=amount)
