"""The journal: accepted calls, their tokens and ends, kept so that they survive the process.

The event loop's side. No method waits for the disk: a thread writes, and what it cannot write is
told by `state`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from .journal_file import JournalFile, RecordedCall, VersionError, damaged_suffix, set_aside
from .journal_writer import Accept, Forget, JournalWriter, Report, Told, error_code
from .logs import about
from .record import CallRecord, JournalState
from .request import Event, FinishedEvent, PromptLogprobsEvent, TokenEvent, TokenLogprobs

__all__ = ["Journal", "JournalError", "RecordedCall"]

_log = logging.getLogger(__name__)

# What answers tell is joined for so long. What is lost with the process is computed again at once,
# by one prefill, however much it is.
_FLUSH_S = 0.1
# A call that is not committed by then goes on without the journal.
ACCEPT_TIMEOUT_S = 0.25
# To write what is left at the end.
_CLOSE_S = 10.0
# Of what waits to be written. A disk that stalls takes no more memory than this.
_MAX_QUEUED_BYTES = 64 << 20
MIN_BYTES = 1 << 20
# Of Python's objects, roughly.
_BYTES_PER_JOB = 300
_BYTES_PER_EVENT = 150

# SQLite's words for a disk or memory that is full, and for what the system does not let us do.
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM)
_REFUSED = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
)


class JournalError(Exception):
    """The folder cannot be used: another server has it, or the system refuses."""


@dataclass(slots=True)
class _Answer:
    """What the journal was told of a running answer."""

    num_tokens: int = 0
    num_prompt_logprobs: int = 0
    is_ended: bool = False
    # Not yet handed to the thread.
    events: list[Event] = field(default_factory=list)

    def take(self, event: Event) -> Event | None:
        """What is not known of it, which may be nothing; None when it leaves a gap."""
        if isinstance(event, FinishedEvent):
            self.is_ended = True
            return event
        is_tokens = isinstance(event, TokenEvent)
        first_index = self.num_tokens if is_tokens else self.num_prompt_logprobs + 1
        num_known = first_index - event.first_index
        if num_known < 0:
            return None
        logprobs = event.logprobs[num_known:]
        if isinstance(event, PromptLogprobsEvent):
            self.num_prompt_logprobs += len(logprobs)
            return replace(event, first_index=first_index, logprobs=logprobs)
        token_ids = event.token_ids[num_known:]
        self.num_tokens += len(token_ids)
        return replace(event, first_index=first_index, token_ids=token_ids, logprobs=logprobs)


@dataclass(slots=True)
class _Call:
    """A call that runs. Its row id is its own also where its call_id was used before."""

    row_id: int
    call_id: str
    answers: list[_Answer]

    @property
    def is_ended(self) -> bool:
        return all(answer.is_ended for answer in self.answers)


@dataclass(slots=True)
class _Waiting:
    """An acceptance that is not committed."""

    call_id: str
    future: asyncio.Future[bool]
    timer: asyncio.TimerHandle


class Journal:
    """Made by `open`. All other methods are for one event loop, which is the first to call one;
    none but `close` waits, and none raises for what the disk does."""

    def __init__(
        self,
        folder: _Folder,
        opened: _Opened,
        max_bytes: int,
        retention_s: float,
        accept_timeout_s: float,
        max_queued_bytes: int,
    ) -> None:
        """For `open`."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._accept_timeout_s = accept_timeout_s
        self._max_queued_bytes = max_queued_bytes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = JournalState.ON
        self._last_row_id = opened.last_row_id
        # By call_id; what is not here is not taken.
        self._running = opened.running
        # By row id.
        self._waiting: dict[int, _Waiting] = {}
        # By row id: calls with events that were not handed on, and when they will be.
        self._dirty: dict[int, _Call] = {}
        self._flush_timer: asyncio.Handle | None = None
        self._num_bytes_put = 0
        # From the thread.
        self._reports: deque[Report] = deque()
        if opened.error:
            self._set_state(JournalState.FAILING, opened.error)
        self._writer = JournalWriter(
            folder.path,
            opened.file,
            {call.row_id for call in opened.running.values()},
            max_bytes,
            round(retention_s * 1e9),
            self._report_soon,
        )
        self._writer.start()

    @staticmethod
    def open(
        folder: Path,
        *,
        max_bytes: int,
        retention_s: float,
        accept_timeout_s: float = ACCEPT_TIMEOUT_S,
        max_queued_bytes: int = _MAX_QUEUED_BYTES,
    ) -> tuple[Journal, list[RecordedCall]]:
        """Blocks. The journal of a folder, which is made, and its calls in order of acceptance:
        those that go on, whose next events are to be added, and those that ended within
        retention_s. A damaged journal, or one of another version, is kept aside and reported.

        max_bytes: of the file and its log, at least MIN_BYTES; calls that ended are forgotten for
        it, the oldest first. JournalError when the folder cannot be used.
        """
        if max_bytes < MIN_BYTES:
            raise ValueError(f"a journal of {max_bytes} bytes is too small; {MIN_BYTES} at least")
        held = _Folder(folder)
        try:
            opened = _open(held.path, max_bytes, retention_s)
        except (OSError, sqlite3.Error) as error:
            held.release()
            raise JournalError(f"the journal {held.path} cannot be opened: {error}") from error
        except BaseException:
            held.release()
            raise
        journal = Journal(held, opened, max_bytes, retention_s, accept_timeout_s, max_queued_bytes)
        return journal, opened.calls

    @property
    def state(self) -> JournalState:
        """FAILING: calls are refused now; OFF: it was closed."""
        self._take_reports()
        return self._state

    def accept(self, record: CallRecord) -> asyncio.Future[bool]:
        """True once the call is committed, False when it cannot be. Events may be added at once.

        Another call of its id is forgotten, in any case. Cancelling the future changes nothing.
        """
        loop = self._bound_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._drop(record.call_id)
        if not self._may_accept(record):
            self.forget(record.call_id)
            future.set_result(False)
            return future
        self._last_row_id = row_id = self._last_row_id + 1
        answers = [_Answer() for _ in range(record.num_answers)]
        self._running[record.call_id] = _Call(row_id, record.call_id, answers)
        timer = loop.call_later(self._accept_timeout_s, self._on_timeout, row_id)
        self._waiting[row_id] = _Waiting(record.call_id, future, timer)
        self._put(Accept(row_id, record, _accept_bytes(record)))
        return future

    def add(self, call_id: str, choice_index: int, event: Event) -> None:
        """What an answer told next; what is known already is dropped. Written within a moment.

        Ignored where the call is not in the journal.
        """
        call = self._running.get(call_id)
        if call is None:
            return
        answer = call.answers[choice_index]
        if answer.is_ended:
            return
        if isinstance(event, TokenEvent) and event.first_index == answer.num_tokens:
            # Nearly always, so as short as can be.
            answer.num_tokens += len(event.token_ids)
        else:
            news = answer.take(event)
            if news is None:
                gap = "journal: request %r leaves it: a gap in its events"
                _log.error(gap, call_id, extra=about(call_id))
                self.forget(call_id)
                return
            event = news
        answer.events.append(event)
        self._dirty[call.row_id] = call
        if answer.is_ended:
            # When this round of the loop is over: others may end in it too.
            self._flush_soon()
        elif self._flush_timer is None:
            self._flush_timer = self._bound_loop().call_later(_FLUSH_S, self._flush)

    def forget(self, call_id: str) -> None:
        """Drops a call, whether it runs or has ended; one that is not there is no error."""
        self._drop(call_id)
        if self._has_room_for(_BYTES_PER_JOB):
            self._put(Forget(call_id, _BYTES_PER_JOB))

    def close(self) -> None:
        """Blocks. Writes what is left, and gives up after some seconds. Calls that run stay in
        the journal."""
        if self._state is JournalState.OFF:
            return
        self._flush()
        self._writer.stop()
        if self._writer.join(_CLOSE_S):
            self._folder.release()
        else:
            _log.warning("journal: the disk does not answer; the last moments are not written")
        self._take_reports()
        for row_id in list(self._waiting):
            self._resolve(row_id, False)
        self._running.clear()
        self._state = JournalState.OFF

    def _may_accept(self, record: CallRecord) -> bool:
        if self.state is not JournalState.ON:
            return False
        num_bytes = _accept_bytes(record)
        if num_bytes <= self._max_bytes // 8:
            return self._has_room_for(num_bytes)
        _log.warning(
            "journal: request %r of %d bytes is too long for one of %d",
            record.call_id,
            num_bytes,
            self._max_bytes,
            extra=about(record.call_id),
        )
        return False

    def _bound_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _flush_soon(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._flush_timer = self._bound_loop().call_soon(self._flush)

    def _drop(self, call_id: str) -> None:
        """Nothing more is taken of the running call of that id."""
        call = self._running.pop(call_id, None)
        if call is not None:
            self._dirty.pop(call.row_id, None)
            self._resolve(call.row_id, False)

    def _has_room_for(self, num_bytes: int) -> bool:
        num_queued = self._num_bytes_put - self._writer.num_bytes_done
        # Whatever is large may go alone.
        return not num_queued or num_queued + num_bytes <= self._max_queued_bytes

    def _put(self, job: Accept | Told | Forget) -> None:
        self._num_bytes_put += job.num_bytes
        self._writer.put(job)

    def _flush(self) -> None:
        """Hands what was told to the thread."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        dirty, self._dirty = self._dirty, {}
        for call in dirty.values():
            jobs = _told(call)
            if not self._has_room_for(sum(job.num_bytes for job in jobs)):
                self._fail_for(call)
                continue
            for job in jobs:
                self._put(job)
            if call.is_ended:
                del self._running[call.call_id]

    def _fail_for(self, call: _Call) -> None:
        """Its events do not fit the memory: it goes on without the journal."""
        self._drop(call.call_id)
        self._put(Forget(call.call_id, _BYTES_PER_JOB))
        self._set_state(
            JournalState.FAILING,
            f"more than {self._max_queued_bytes >> 20} MiB wait for the disk; "
            "running requests are dropped from it",
        )

    def _on_timeout(self, row_id: int) -> None:
        waiting = self._waiting[row_id]
        self._set_state(
            JournalState.FAILING, f"the disk has not answered for {self._accept_timeout_s:g} s"
        )
        self._drop(waiting.call_id)
        self._resolve(row_id, False)
        self._put(Forget(waiting.call_id, _BYTES_PER_JOB))

    def _resolve(self, row_id: int, is_committed: bool) -> None:
        waiting = self._waiting.pop(row_id, None)
        if waiting is None:
            return
        waiting.timer.cancel()
        if not waiting.future.done():
            waiting.future.set_result(is_committed)

    def _report_soon(self, report: Report) -> None:
        """In the thread."""
        self._reports.append(report)
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop is closed: nobody wants to know.
                self._loop.call_soon_threadsafe(self._take_reports)

    def _take_reports(self) -> None:
        while self._reports:
            self._on_report(self._reports.popleft())

    def _on_report(self, report: Report) -> None:
        for row_id in report.accepted:
            self._resolve(row_id, True)
        gone = {*report.refused, *report.broken}
        if gone:
            for call in [call for call in self._running.values() if call.row_id in gone]:
                self._drop(call.call_id)
        for row_id in report.refused:
            self._resolve(row_id, False)
        if report.error is not None:
            self._set_state(JournalState.FAILING, report.error)
        else:
            self._set_state(JournalState.ON, "")

    def _set_state(self, state: JournalState, why: str) -> None:
        if state is self._state or self._state is JournalState.OFF:
            return
        self._state = state
        if state is JournalState.FAILING:
            _log.error("journal: %s; requests are served without it until it works again", why)
        else:
            _log.info("journal: it works again")


def _accept_bytes(record: CallRecord) -> int:
    return _BYTES_PER_JOB + record.num_bytes


def _told(call: _Call) -> list[Told]:
    """What was added to its answers and not handed on."""
    changed = [(index, answer) for index, answer in enumerate(call.answers) if answer.events]
    jobs: list[Told] = []
    for index, answer in changed:
        events, answer.events = answer.events, []
        ends_call = call.is_ended and index == changed[-1][0]
        num_bytes = _BYTES_PER_JOB + sum(_event_bytes(event) for event in events)
        counts = answer.num_tokens, answer.num_prompt_logprobs
        jobs.append(Told(call.row_id, index, events, *counts, ends_call, num_bytes))
    return jobs


def _event_bytes(event: Event) -> int:
    if isinstance(event, FinishedEvent):
        return _BYTES_PER_EVENT + len(event.message)
    num_bytes = _BYTES_PER_EVENT
    if isinstance(event, TokenEvent):
        num_bytes += 8 * len(event.token_ids)
    return num_bytes + _logprobs_bytes(event.logprobs)


def _logprobs_bytes(logprobs: tuple[TokenLogprobs, ...]) -> int:
    # As many alternatives come with each.
    return len(logprobs) * (150 + 40 * len(logprobs[0].best_token_ids)) if logprobs else 0


class _Folder:
    """A folder of a journal, held against other servers."""

    def __init__(self, folder: Path) -> None:
        """Blocks. JournalError."""
        self.path = folder / "journal.db"
        if folder.exists() and not folder.is_dir():
            raise JournalError(f"the journal's folder {folder} cannot be used: it is a file")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(folder / "journal.lock", flags, 0o600)
        except OSError as error:
            raise JournalError(
                f"the journal's folder {folder} cannot be used: {error.strerror}; give one that "
                f"user {os.geteuid()} may make and write to"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            raise JournalError(
                f"the journal's folder {folder} is in use by another server; give each its own"
            ) from error
        if folder.stat().st_mode & 0o022:
            _log.warning("journal: other users may write to its folder %s; chmod 700 it", folder)

    def release(self) -> None:
        os.close(self._lock)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What was found. `file` is None when none could be made, because of `error`."""

    file: JournalFile | None = None
    calls: list[RecordedCall] = field(default_factory=list)
    running: dict[str, _Call] = field(default_factory=dict)
    last_row_id: int = 0
    error: str = ""


def _open(path: Path, max_bytes: int, retention_s: float) -> _Opened:
    """Blocks. OSError or sqlite3.Error when the system refuses."""
    try:
        return _read(path, max_bytes, retention_s)
    except Exception as error:
        if error_code(error) in _FULL:
            return _Opened(error=str(error))
        if isinstance(error, OSError) or error_code(error) in _REFUSED:
            raise
        if isinstance(error, VersionError):
            kept = set_aside(path, f"version-{error.version}")
        else:
            kept = set_aside(path, damaged_suffix())
        _log.error("journal: %s is kept as %s, and a new one is begun: %s", path, kept, error)
    try:
        return _read(path, max_bytes, retention_s)
    except sqlite3.Error as error:
        return _Opened(error=str(error))


def _read(path: Path, max_bytes: int, retention_s: float) -> _Opened:
    file = JournalFile(path, max_bytes)
    try:
        file.check()
        now_unix_ns = time.time_ns()
        stored, bad = file.read(now_unix_ns - round(retention_s * 1e9))
        last_row_id = file.last_row_id()
        running = {
            one.call.record.call_id: _running_call(one.row_id, one.call)
            for one in stored
            if one.call.ended_unix_ns is None
        }
        with suppress(sqlite3.OperationalError):  # A full disk: the writer will find out.
            file.clean(bad, now_unix_ns)
    except BaseException:
        file.close()
        raise
    return _Opened(file, [one.call for one in stored], running, last_row_id)


def _running_call(row_id: int, call: RecordedCall) -> _Call:
    answers = [
        _Answer(len(log.token_ids), len(log.prompt_logprobs), log.end is not None)
        for log in call.answers
    ]
    return _Call(row_id, call.record.call_id, answers)
