"""The thread that writes the journal: jobs come in by a queue, many join one transaction."""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .journal_file import (
    DamagedError,
    JournalFile,
    Piece,
    VersionError,
    call_bytes,
    damaged_suffix,
    end_piece,
    prompt_logprobs_piece,
    set_aside,
    tokens_piece,
)
from .logs import about
from .record import CallRecord
from .request import Event, FinishedEvent, PromptLogprobsEvent, TokenEvent, TokenLogprobs

_log = logging.getLogger(__name__)

# Between tries while the file cannot be written.
RETRY_S = 2.0
# Calls that ended too long ago are looked for this often, and so many dropped at a time.
_PURGE_S = 5.0
_NUM_PURGED = 256
# Of the room for all, kept for calls that run already.
_RESERVE = 8
# SQLite's words for a file that is not what it should be.
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


@dataclass(frozen=True, slots=True)
class Accept:
    """A new call; another one of its id is forgotten."""

    row_id: int
    record: CallRecord
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Told:
    """What an answer told next; with its end, counts of all that it told. Of an accepted call."""

    row_id: int
    choice_index: int
    events: Sequence[Event]
    num_tokens: int
    num_prompt_logprobs: int
    # With this all answers to the call have ended.
    ends_call: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drops a call."""

    call_id: str
    num_bytes: int


Job = Accept | Told | Forget


@dataclass(frozen=True, slots=True)
class Report:
    """What became of jobs; calls by row id. `error`: it cannot be written now, and why."""

    accepted: Sequence[int] = ()
    refused: Sequence[int] = ()
    # Running calls that are no longer in the journal.
    broken: Sequence[int] = ()
    error: str | None = None


@dataclass(slots=True)
class _Batch:
    """What one transaction did."""

    accepted: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


class JournalWriter:
    """Owns the file and its thread. `put` may be called from any one thread."""

    def __init__(
        self,
        path: Path,
        file: JournalFile | None,
        running: set[int],
        max_bytes: int,
        retention_ns: int,
        on_report: Callable[[Report], None],
    ) -> None:
        """file: None when it could not be opened yet. running: row ids of calls that go on.
        on_report is called in the thread, after each transaction or failure."""
        self._path = path
        self._file = file
        self._running = running
        self._max_bytes = max_bytes
        self._retention_ns = retention_ns
        self._on_report = on_report
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # Taken, and not yet written.
        self._backlog: deque[Job] = deque()
        # Bytes of jobs that are done with; only the thread counts.
        self.num_bytes_done = 0
        # Why it cannot be written now.
        self._error = "" if file is not None else "it could not be opened"
        self._is_damaged = False
        self._is_stopping = False
        self._is_refusing = False
        self._next_purge = 0.0
        # A clock that was set has no say in how long a call is kept.
        self._clock_offset_ns = time.time_ns() - time.monotonic_ns()
        # A disk that never answers must not keep the process.
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """The thread ends when all that was put before is written, or cannot be."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Blocks; whether the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_stopping:
            self._take()
            try:
                self._write()
            except (sqlite3.Error, OSError, DamagedError) as error:
                self._fail(error)
            except Exception as error:
                # A fault of ours. The thread must not end of it.
                _log.exception("journal: what was to be written is dropped")
                self._fail(error)
                self._give_up_all()
        if self._file is not None:
            self._file.close()

    def _take(self) -> None:
        """Waits for jobs, while failing for the time of the next try; takes all that there are."""
        until = time.monotonic() + (RETRY_S if self._error else _PURGE_S)
        while not self._is_stopping:
            left = until - time.monotonic()
            if self._backlog and not self._error:
                left = 0.0
            try:
                self._add(self._jobs.get(timeout=left) if left > 0 else self._jobs.get_nowait())
            except queue.Empty:
                return

    def _add(self, job: Job | None) -> None:
        if job is None:
            self._is_stopping = True
        elif isinstance(job, Accept) and self._error:
            self._done(job)
            self._on_report(Report(refused=(job.row_id,), error=self._error))
        else:
            self._backlog.append(job)

    def _done(self, job: Job) -> None:
        self.num_bytes_done += job.num_bytes

    def _write(self) -> None:
        if self._file is None:
            self._file = self._reopen()
        file = self._file
        if self._error:
            file.try_out()
        while self._backlog:
            jobs = self._next_jobs(file.max_transaction_bytes)
            batch = self._commit(file, jobs)
            for job in jobs:
                self._done(job)
                self._backlog.popleft()
            self._running.difference_update(batch.ended)
            self._on_report(Report(batch.accepted, batch.refused, batch.broken))
            file.tidy()
        self._purge(file)
        file.tidy()
        if self._error:
            self._error = ""
            self._on_report(Report())

    def _reopen(self) -> JournalFile:
        """Where the file is not sound or gone, a new one, without the calls of the old."""
        is_new = not self._path.exists()
        if self._is_damaged and not is_new:
            self._set_aside("it is damaged")
            is_new = True
        try:
            file = JournalFile(self._path, self._max_bytes)
        except (DamagedError, VersionError, sqlite3.Error) as error:
            if not is_damage(error):
                raise
            self._set_aside(str(error))
            is_new = True
            file = JournalFile(self._path, self._max_bytes)
        self._is_damaged = False
        if is_new:
            self._give_up_all()
        return file

    def _set_aside(self, reason: str) -> None:
        kept = set_aside(self._path, damaged_suffix())
        _log.error(
            "journal: %s is kept as %s, and a new one is begun: %s", self._path, kept, reason
        )

    def _give_up_all(self) -> None:
        """Running calls are no longer in the journal."""
        self._on_report(Report(broken=tuple(self._running), error=self._error or None))
        self._running.clear()
        for job in self._backlog:
            self._done(job)
        self._backlog.clear()

    def _next_jobs(self, max_bytes: int) -> list[Job]:
        """Of the backlog, what fits one transaction; one at least."""
        jobs: list[Job] = []
        num_bytes = 0
        for job in self._backlog:
            num_bytes += job.num_bytes
            if jobs and num_bytes > max_bytes:
                break
            jobs.append(job)
        return jobs

    def _commit(self, file: JournalFile, jobs: Sequence[Job]) -> _Batch:
        batch = _Batch()
        with file.transaction():
            room = self._make_room(file, sum(job.num_bytes for job in jobs))
            for job in jobs:
                if isinstance(job, Forget):
                    self._forget(file, job.call_id)
                elif isinstance(job, Accept):
                    room -= self._accept(file, job, room, batch)
                elif job.row_id in self._running:
                    room -= self._tell(file, job, room, batch)
            pieces = [piece for piece in batch.pieces if piece.row_id in self._running]
            file.add_pieces(pieces)
            file.end_calls(batch.ended, self._now_unix_ns())
        return batch

    def _accept(self, file: JournalFile, job: Accept, room: int, batch: _Batch) -> int:
        """What it takes of the room."""
        self._forget(file, job.record.call_id)
        num_bytes = call_bytes(job.record)
        if num_bytes > room - self._max_bytes // _RESERVE:
            self._refuse(job, batch, "the calls that run take all the room that it may have")
            return 0
        try:
            file.add_call(job.row_id, job.record)
        except (ValueError, OverflowError) as error:
            self._refuse(job, batch, str(error))
            return 0
        self._is_refusing = False
        self._running.add(job.row_id)
        batch.accepted.append(job.row_id)
        return num_bytes

    def _refuse(self, job: Accept, batch: _Batch, reason: str) -> None:
        batch.refused.append(job.row_id)
        if not self._is_refusing:
            call_id = job.record.call_id
            not_in = "journal: request %r is not in it: %s"
            _log.warning(not_in, call_id, reason, extra=about(call_id))
        self._is_refusing = True

    def _tell(self, file: JournalFile, job: Told, room: int, batch: _Batch) -> int:
        pieces = _pieces(job)
        num_bytes = sum(piece.num_bytes for piece in pieces)
        if num_bytes > room:
            file.delete((job.row_id,))
            self._running.discard(job.row_id)
            batch.broken.append(job.row_id)
            _log.warning("journal: a running request was dropped from it, as there is no room left")
            return 0
        batch.pieces += pieces
        if job.ends_call:
            batch.ended.append(job.row_id)
        return num_bytes

    def _forget(self, file: JournalFile, call_id: str) -> None:
        row_ids = file.row_ids(call_id)
        file.delete(row_ids)
        self._running.difference_update(row_ids)

    def _make_room(self, file: JournalFile, num_bytes: int) -> int:
        """Drops calls that ended, the oldest first, until so much fits beside the reserve."""
        wanted = 4 * num_bytes + self._max_bytes // _RESERVE
        room = file.room()
        while room < wanted and (oldest := file.oldest_ended(1 << 62, 16)):
            file.delete(oldest)
            room = file.room()
        return room

    def _purge(self, file: JournalFile) -> None:
        """Drops calls whose time is over, some at a time."""
        if time.monotonic() < self._next_purge:
            return
        before = self._now_unix_ns() - self._retention_ns
        expired = file.oldest_ended(before, _NUM_PURGED)
        if expired:
            with file.transaction():
                file.delete(expired)
        if len(expired) < _NUM_PURGED:
            self._next_purge = time.monotonic() + _PURGE_S

    def _now_unix_ns(self) -> int:
        return time.monotonic_ns() + self._clock_offset_ns

    def _fail(self, error: Exception) -> None:
        """What runs is kept to be written later. What was to be accepted is refused, and forgotten
        in case that it was written after all."""
        self._error = str(error)
        self._is_damaged |= is_damage(error)
        if self._file is not None:
            self._file.close()
            self._file = None
        backlog: deque[Job] = deque()
        refused: list[int] = []
        for job in self._backlog:
            if isinstance(job, Accept):
                refused.append(job.row_id)
                backlog.append(Forget(job.record.call_id, job.num_bytes))
            else:
                backlog.append(job)
        self._backlog = backlog
        self._running.difference_update(refused)
        self._on_report(Report(refused=refused, error=self._error))


def is_damage(error: Exception) -> bool:
    """Whether the file is to blame, and not the disk or the system around it."""
    if isinstance(error, DamagedError | VersionError):
        return True
    return error_code(error) in _DAMAGE


def error_code(error: Exception) -> int:
    """SQLite's, without its details; 0 for errors of other kinds."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _pieces(job: Told) -> list[Piece]:
    """The rows of what was told: tokens joined into one."""
    row_id, choice_index = job.row_id, job.choice_index
    pieces: list[Piece] = []
    token_ids = array("I")
    logprobs: list[TokenLogprobs] = []
    first_index: int | None = None
    for event in job.events:
        if isinstance(event, TokenEvent):
            if first_index is None:
                first_index = event.first_index
            token_ids.extend(event.token_ids)
            logprobs.extend(event.logprobs)
        elif isinstance(event, PromptLogprobsEvent):
            pieces.append(
                prompt_logprobs_piece(row_id, choice_index, event.first_index, event.logprobs)
            )
    if first_index is not None:
        pieces.append(tokens_piece(row_id, choice_index, first_index, token_ids, logprobs))
    for event in job.events:
        if isinstance(event, FinishedEvent):
            counts = job.num_tokens, job.num_prompt_logprobs
            pieces.append(end_piece(row_id, choice_index, event, *counts))
    return pieces
