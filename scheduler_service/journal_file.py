"""The journal's file: accepted calls and what their answers told, in SQLite.

One process has it open at a time, for one thread at a time. What is read from it is not trusted:
the schema must be ours to the letter, each row has a checksum, lengths are looked at before use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import struct
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .record import AnswerLog, CallRecord, Setup
from .request import (
    FinishedEvent,
    FinishReason,
    PromptLogprobsEvent,
    TokenEvent,
    TokenLogprobs,
    choice_id,
)

_log = logging.getLogger(__name__)

# "slwj"; of PRAGMA application_id and user_version.
_APPLICATION_ID = 0x736C776A
VERSION = 1

# ended_unix_ns: of the last of its answers. first_index is where a piece stands: tokens from 0,
# prompt logprobs from 1, the end behind the last token. Pieces of all calls lie in the order in
# which they came, so that a transaction writes few pages; a call's are from first_piece to
# last_piece.
_SCHEMA = (
    "CREATE TABLE setup (hash BLOB PRIMARY KEY, json TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE call (id INTEGER PRIMARY KEY, first_piece INTEGER NOT NULL, "
    "last_piece INTEGER, ended_unix_ns INTEGER, call_id TEXT NOT NULL, "
    "setup BLOB NOT NULL, client TEXT NOT NULL, request BLOB NOT NULL, "
    "prompt_token_ids BLOB NOT NULL, opens_reasoning INTEGER NOT NULL, "
    "seed INTEGER NOT NULL, num_answers INTEGER NOT NULL, "
    "accepted_unix_ns INTEGER NOT NULL, deadline_unix_ns INTEGER, checksum INTEGER NOT NULL)",
    "CREATE TABLE piece (id INTEGER PRIMARY KEY, call INTEGER NOT NULL, choice INTEGER NOT NULL, "
    "kind INTEGER NOT NULL, first_index INTEGER NOT NULL, data BLOB NOT NULL, logprobs BLOB, "
    "checksum INTEGER NOT NULL)",
    "CREATE INDEX call_by_call_id ON call (call_id)",
    "CREATE INDEX call_by_end ON call (ended_unix_ns) WHERE ended_unix_ns IS NOT NULL",
)
_PROMPT_LOGPROBS, _TOKENS, _END = range(3)

_PAGE_BYTES = 4096
# A row that is longer has pages of its own.
_SHORT_ROW_BYTES = 4000
_MAX_VALUE_BYTES = 256 << 20
_MAX_ANSWERS = 1 << 16
# Free pages below this are kept for what comes next; as many are given back at a time.
_NUM_SPARE_PAGES = 256
# A log of this size is copied into the file.
_MAX_LOG_BYTES = 8 << 20
_ROWS_PER_STATEMENT = 32
_MAX_SET_ASIDE = 4
_UINT64 = (1 << 64) - 1

# What rows that make no sense come to.
_NONSENSE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error)

_LOGPROB_HEAD = struct.Struct("<dII")


class DamagedError(Exception):
    """The file is no journal, or not a sound one."""


class VersionError(Exception):
    """The journal is of another version."""

    def __init__(self, version: int) -> None:
        super().__init__(f"it is of version {version}, this server writes {VERSION}")
        self.version = version


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call as it stands in the journal."""

    record: CallRecord
    # By index.
    answers: list[AnswerLog]
    # None: not all answers have ended, so it goes on.
    ended_unix_ns: int | None


class Stored(NamedTuple):
    row_id: int
    call: RecordedCall


class Piece(NamedTuple):
    """A row of the table of pieces without its id; `logprobs` are those of the tokens."""

    row_id: int
    choice_index: int
    kind: int
    first_index: int
    data: bytes
    logprobs: bytes | None
    checksum: int

    @property
    def num_bytes(self) -> int:
        return _row_bytes(len(self.data) + len(self.logprobs or b""))


def tokens_piece(
    row_id: int,
    choice_index: int,
    first_index: int,
    token_ids: array[int],
    logprobs: Sequence[TokenLogprobs],
) -> Piece:
    """New tokens of an answer. logprobs: one for each, or none."""
    packed = _pack_logprobs(logprobs) if logprobs else None
    return _piece(row_id, choice_index, _TOKENS, first_index, token_ids.tobytes(), packed)


def prompt_logprobs_piece(
    row_id: int, choice_index: int, first_index: int, logprobs: Sequence[TokenLogprobs]
) -> Piece:
    data = _pack_logprobs(logprobs)
    return _piece(row_id, choice_index, _PROMPT_LOGPROBS, first_index, data, None)


def end_piece(
    row_id: int, choice_index: int, event: FinishedEvent, num_tokens: int, num_prompt_logprobs: int
) -> Piece:
    """The end of an answer that told so many tokens."""
    values = asdict(event) | {"reason": event.reason.value}
    del values["request_id"]
    data = json.dumps({"event": values, "num_prompt_logprobs": num_prompt_logprobs}).encode()
    return _piece(row_id, choice_index, _END, num_tokens, data, None)


def call_bytes(record: CallRecord) -> int:
    """What the row of a call takes in the file, at most."""
    num_bytes = len(record.request) + 4 * len(record.prompt_token_ids)
    return _row_bytes(num_bytes + 2 * len(record.call_id) + len(record.client) + 100)


class JournalFile:
    """An open journal. All methods may raise sqlite3.Error or OSError; then it is to be closed."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Opens it, or makes it where there is none. DamagedError, VersionError, and OSError where
        the system refuses. max_bytes: of the file and its log."""
        self._path = path
        self._log_path = path.with_name(path.name + "-wal")
        self._max_log_bytes = min(_MAX_LOG_BYTES, max_bytes // 16)
        # The log may be twice as long, by one transaction, before it is copied.
        self._max_pages = (max_bytes - 4 * self._max_log_bytes) // _PAGE_BYTES
        self._setups: dict[Setup, bytes] = {}
        _make_private(path)
        self._inode = os.stat(path).st_ino
        self._is_prepared = False
        self._db = sqlite3.connect(path, 0.0, 0, None, check_same_thread=False)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise
        self._is_prepared = True

    @property
    def max_transaction_bytes(self) -> int:
        """A transaction of more makes the log longer than it should be."""
        return self._max_log_bytes

    def close(self) -> None:
        """Never raises for I/O: what was committed is in the file or in its log."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def check(self) -> None:
        """Reads all of it. DamagedError when its structure is not sound."""
        (answer,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
        if answer != "ok":
            raise DamagedError(str(answer).replace("\n", " ")[:200])

    def read(self, ended_since_unix_ns: int) -> tuple[list[Stored], list[int]]:
        """The calls that go on or ended since then, in order of acceptance; and the row ids of
        those that make no sense, each reported."""
        setups = dict(map(_setup_of, self._db.execute("SELECT hash, json FROM setup")))
        calls: dict[int, RecordedCall] = {}
        bad: list[int] = []

        def leave_out(row_id: int, error: Exception) -> None:
            call = calls.pop(row_id, None)
            name = f"request {call.record.call_id!r}" if call else f"the request of row {row_id}"
            _log.error("journal: %s is left out: %s", name, error)
            bad.append(row_id)

        for row in self._db.execute(
            "SELECT * FROM call WHERE ended_unix_ns IS NULL OR ended_unix_ns >= ? ORDER BY id",
            (ended_since_unix_ns,),
        ):
            try:
                record = _record_of(row, setups)
                answers = [AnswerLog() for _ in range(record.num_answers)]
                calls[row[0]] = RecordedCall(record, answers, row[3])
            except _NONSENSE as error:
                leave_out(row[0], error)
        for _, *columns in self._db.execute("SELECT * FROM piece ORDER BY id"):
            piece = Piece(*columns)
            if piece.row_id in calls:
                try:
                    _add_piece(calls[piece.row_id], piece)
                except _NONSENSE as error:
                    leave_out(piece.row_id, error)
        for row_id, call in list(calls.items()):
            if (call.ended_unix_ns is None) == all(answer.end for answer in call.answers):
                leave_out(row_id, ValueError("it has ended and has not"))
        return [Stored(row_id, call) for row_id, call in calls.items()], bad

    def clean(self, bad: Sequence[int], now_unix_ns: int) -> None:
        """Drops calls by row id, and whatever belongs to none. Ends that lie ahead, by a clock that
        was set back, are now."""
        with self.transaction():
            self.delete(bad)
            self._db.execute("DELETE FROM piece WHERE call NOT IN (SELECT id FROM call)")
            self._db.execute("DELETE FROM setup WHERE hash NOT IN (SELECT setup FROM call)")
            self._db.execute(
                "UPDATE call SET ended_unix_ns = ?1 WHERE ended_unix_ns > ?1", (now_unix_ns,)
            )

    def last_row_id(self) -> int:
        """Of calls; 0 where there is none."""
        return self._last("SELECT max(id) FROM call")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of its block or nothing. FileNotFoundError when somebody took the file away,
        DamagedError when it was cut or is another one."""
        found = os.stat(self._path)
        if found.st_ino != self._inode or (self._is_prepared and not found.st_size):
            raise DamagedError("it was cut, or replaced, while it was open")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def add_call(self, row_id: int, record: CallRecord) -> None:
        """ValueError or OverflowError when it cannot be written, whatever the disk does."""
        columns = _call_columns(record, self._setup_hash(record.setup))
        self._db.execute(
            "INSERT OR REPLACE INTO call "
            "VALUES (?, ?, NULL, NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (row_id, self._next_piece, *columns, _checksum(row_id, *columns)),
        )

    def add_pieces(self, pieces: Sequence[Piece]) -> None:
        """A piece may be written twice: after an error nobody knows whether it was."""
        # Many rows a statement: each one gives the interpreter's lock away and waits for it again.
        for at in range(0, len(pieces), _ROWS_PER_STATEMENT):
            some = pieces[at : at + _ROWS_PER_STATEMENT]
            places = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?)"] * len(some))
            values = [v for i, piece in enumerate(some, self._next_piece) for v in (i, *piece)]
            self._db.execute(f"INSERT INTO piece VALUES {places}", values)
            self._next_piece += len(some)

    def end_calls(self, row_ids: Sequence[int], now_unix_ns: int) -> None:
        """No more pieces come of these."""
        for row_id in row_ids:
            self._db.execute(
                "UPDATE call SET ended_unix_ns = ?, last_piece = ? WHERE id = ?",
                (now_unix_ns, self._next_piece, row_id),
            )

    def delete(self, row_ids: Sequence[int]) -> None:
        """Forgets calls."""
        for row_id in row_ids:
            self._db.execute(
                "DELETE FROM piece WHERE call = ?1 AND id >= "
                "(SELECT first_piece FROM call WHERE id = ?1) AND id <= "
                "(SELECT ifnull(last_piece, 1 << 62) FROM call WHERE id = ?1)",
                (row_id,),
            )
            self._db.execute("DELETE FROM call WHERE id = ?", (row_id,))

    def row_ids(self, call_id: str) -> list[int]:
        """Of the calls of that id; one at most."""
        return self._ids("SELECT id FROM call WHERE call_id = ?", call_id)

    def oldest_ended(self, before_unix_ns: int, limit: int) -> list[int]:
        """Row ids of calls that ended before, the oldest first."""
        return self._ids(
            "SELECT id FROM call WHERE ended_unix_ns < ? ORDER BY ended_unix_ns, id LIMIT ?",
            before_unix_ns,
            limit,
        )

    def room(self) -> int:
        """Bytes until the file is as large as it may be; negative when it is larger."""
        return _PAGE_BYTES * (self._max_pages - self._pragma("page_count") + self._num_free_pages())

    def tidy(self) -> None:
        """Copies a long log into the file, and gives some of its free pages back to the system."""
        if self._num_free_pages() >= 2 * _NUM_SPARE_PAGES:
            # `execute` would end after the first page.
            self._db.executescript(f"PRAGMA incremental_vacuum({_NUM_SPARE_PAGES})")
        if self._log_bytes() >= self._max_log_bytes:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def try_out(self) -> None:
        """Writes some pages: after an error, whether the disk takes them again."""
        with self.transaction():
            self._db.execute("INSERT OR REPLACE INTO setup VALUES (x'', hex(zeroblob(65536)))")
        with self.transaction():
            self._db.execute("DELETE FROM setup WHERE hash = x''")

    def _prepare(self) -> None:
        self._db.text_factory = _text
        self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        self._db.executescript(
            # The index of the log is in our memory: no third file, no memory shared with others.
            "PRAGMA locking_mode = EXCLUSIVE;"
            "PRAGMA trusted_schema = OFF;"
            "PRAGMA cell_size_check = ON;"
            "PRAGMA synchronous = NORMAL;"
            "PRAGMA wal_autocheckpoint = 0;"
            f"PRAGMA journal_size_limit = {self._max_log_bytes};"
        )
        self._next_piece = 1
        known = self._db.execute("SELECT sql FROM sqlite_schema WHERE sql NOT NULL").fetchall()
        if not known:
            self._create()
            return
        application_id, version = self._pragma("application_id"), self._pragma("user_version")
        if application_id != _APPLICATION_ID:
            raise DamagedError("it is a database, but no journal")
        if version != VERSION:
            raise VersionError(version)
        if sorted(sql for (sql,) in known) != sorted(_SCHEMA):
            raise DamagedError("its tables are not those of a journal")
        self._db.execute("PRAGMA journal_mode = WAL").fetchall()
        for column in ("max(id) FROM piece", "max(first_piece) FROM call"):
            self._next_piece = max(self._next_piece, 1 + self._last(f"SELECT {column}"))

    def _create(self) -> None:
        # The first takes effect with the second where a page was written already.
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._db.execute("VACUUM")
        self._db.execute("PRAGMA journal_mode = WAL").fetchall()
        with self.transaction():
            for statement in _SCHEMA:
                self._db.execute(statement)
            self._db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version = {VERSION}")
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _pragma(self, name: str) -> int:
        (value,) = self._db.execute(f"PRAGMA {name}").fetchone()
        return int(value)

    def _last(self, query: str) -> int:
        (value,) = self._db.execute(query).fetchone()
        return int(value or 0)

    def _num_free_pages(self) -> int:
        return self._pragma("freelist_count")

    def _log_bytes(self) -> int:
        with contextlib.suppress(FileNotFoundError):  # Until the first write.
            return os.stat(self._log_path).st_size
        return 0

    def _ids(self, query: str, *values: object) -> list[int]:
        return [row_id for (row_id,) in self._db.execute(query, values)]

    def _setup_hash(self, setup: Setup) -> bytes:
        if setup not in self._setups:
            text = json.dumps(asdict(setup))
            digest = hashlib.sha256(text.encode()).digest()
            self._db.execute("INSERT OR IGNORE INTO setup VALUES (?, ?)", (digest, text))
            self._setups[setup] = digest
        return self._setups[setup]


def set_aside(path: Path, suffix: str) -> Path:
    """Renames a journal and its log, so that a new one can be made; its new path. The oldest of too
    many are deleted."""
    others = sorted(
        (p for p in path.parent.glob(f"{path.name}.*") if not p.name.endswith("-wal")),
        key=lambda p: p.stat().st_mtime_ns,
    )
    for old in others[: max(0, len(others) - _MAX_SET_ASIDE + 1)]:
        _log.warning("journal: %s is deleted, as there are later ones like it", old)
        _unlink(old)
    kept = path.with_name(f"{path.name}.{suffix}")
    while kept.exists():
        kept = kept.with_name(f"{kept.name}x")
    log_path = path.with_name(path.name + "-wal")
    if log_path.exists():
        log_path.rename(kept.with_name(kept.name + "-wal"))
    path.rename(kept)
    os.utime(kept)
    return kept


def damaged_suffix() -> str:
    return time.strftime("damaged-%Y%m%dT%H%M%SZ", time.gmtime())


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_name(path.name + "-wal").unlink(missing_ok=True)


def _make_private(path: Path) -> None:
    """The log takes the file's mode. A link is refused."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def _text(data: bytes) -> str:
    # A flipped bit is found by the checksum, not by an error amid the rows.
    return data.decode(errors="backslashreplace")


def _row_bytes(num_bytes: int) -> int:
    # Half-full pages, or a last page that is hardly used.
    return 2 * (num_bytes + 60) if num_bytes < _SHORT_ROW_BYTES else num_bytes + 2 * _PAGE_BYTES


def _checksum(*columns: object) -> int:
    sizes = [len(value) if isinstance(value, bytes) else value for value in columns]
    checksum = zlib.crc32(repr(sizes).encode())
    for value in columns:
        if isinstance(value, bytes):
            checksum = zlib.crc32(value, checksum)
    return checksum


def _piece(
    row_id: int, choice_index: int, kind: int, first_index: int, data: bytes, logprobs: bytes | None
) -> Piece:
    columns = (row_id, choice_index, kind, first_index, data, logprobs)
    return Piece(*columns, _checksum(*columns))


def _call_columns(record: CallRecord, setup_hash: bytes) -> tuple[Any, ...]:
    """From call_id on, without the end."""
    return (
        record.call_id,
        setup_hash,
        record.client,
        record.request,
        record.prompt_token_ids.tobytes(),
        int(record.opens_reasoning),
        # SQLite's integers have a sign.
        record.seed - (1 << 64) if record.seed >> 63 else record.seed,
        record.num_answers,
        record.accepted_unix_ns,
        record.deadline_unix_ns,
    )


def _setup_of(row: Sequence[Any]) -> tuple[bytes, Setup | None]:
    """None where it makes no sense."""
    digest, text = row
    try:
        is_sound = hashlib.sha256(text.encode()).digest() == digest
        return digest, Setup(**json.loads(text)) if is_sound else None
    except _NONSENSE:
        return digest, None


def _record_of(row: Sequence[Any], setups: dict[bytes, Setup | None]) -> CallRecord:
    row_id, _, _, _, call_id, setup_hash, client, request, prompt, *numbers, checksum = row
    opens_reasoning, seed, num_answers, accepted_unix_ns, deadline_unix_ns = numbers
    if checksum != _checksum(row_id, call_id, setup_hash, client, request, prompt, *numbers):
        raise ValueError("it has a wrong checksum")
    if not 1 <= num_answers <= _MAX_ANSWERS:
        raise ValueError(f"it has {num_answers} answers")
    setup = setups.get(setup_hash)
    if setup is None:
        raise ValueError("its set-up is missing or damaged")
    return CallRecord(
        call_id=call_id,
        client=client,
        request=request,
        prompt_token_ids=_ids_of(prompt),
        opens_reasoning=bool(opens_reasoning),
        seed=seed & _UINT64,
        num_answers=num_answers,
        accepted_unix_ns=accepted_unix_ns,
        deadline_unix_ns=deadline_unix_ns,
        setup=setup,
    )


def _add_piece(call: RecordedCall, piece: Piece) -> None:
    """Pieces come as they were told: prompt logprobs, tokens, the end."""
    if piece.checksum != _checksum(*piece[:-1]):
        raise ValueError("a piece of it has a wrong checksum")
    if not 0 <= piece.choice_index < len(call.answers):
        raise ValueError(f"it has no answer {piece.choice_index}")
    record, answer = call.record, call.answers[piece.choice_index]
    request_id = choice_id(record.call_id, piece.choice_index)
    if piece.kind == _PROMPT_LOGPROBS:
        if not 1 <= piece.first_index <= len(answer.prompt_logprobs) + 1:
            raise ValueError("prompt logprobs are missing")
        logprobs = _unpack_logprobs(piece.data)
        answer.add(PromptLogprobsEvent(request_id, piece.first_index, logprobs))
        if len(answer.prompt_logprobs) >= max(1, len(record.prompt_token_ids)):
            raise ValueError("it has more prompt logprobs than a prompt")
    elif piece.kind == _TOKENS:
        if not 0 <= piece.first_index <= len(answer.token_ids):
            raise ValueError("tokens are missing")
        token_ids = tuple(_ids_of(piece.data))
        logprobs = _unpack_logprobs(piece.logprobs or b"")
        answer.add(TokenEvent(request_id, piece.first_index, token_ids, logprobs))
        if len(answer.logprobs) not in (0, len(answer.token_ids)):
            raise ValueError("it has not as many logprobs as tokens")
    elif piece.kind == _END:
        values = json.loads(piece.data)
        known = len(answer.token_ids), len(answer.prompt_logprobs)
        if known != (piece.first_index, values["num_prompt_logprobs"]):
            raise ValueError("tokens are missing at its end")
        event = values["event"]
        reason = FinishReason(event.pop("reason"))
        answer.add(FinishedEvent(request_id=request_id, reason=reason, **event))
    else:
        raise ValueError(f"a piece of it is of kind {piece.kind}")


def _ids_of(data: bytes) -> array[int]:
    token_ids = array("I")
    token_ids.frombytes(data)
    return token_ids


def _pack_logprobs(logprobs: Sequence[TokenLogprobs]) -> bytes:
    return b"".join(
        struct.pack(f"<dII{len(ids)}I{len(ids)}d", logprob, rank, len(ids), *ids, *best)
        for logprob, rank, ids, best in logprobs
    )


def _unpack_logprobs(data: bytes) -> tuple[TokenLogprobs, ...]:
    logprobs: list[TokenLogprobs] = []
    at = 0
    while at < len(data):
        logprob, rank, num_best = _LOGPROB_HEAD.unpack_from(data, at)
        at += _LOGPROB_HEAD.size
        if 12 * num_best > len(data) - at:
            raise ValueError("logprobs are cut off")
        values = struct.unpack_from(f"<{num_best}I{num_best}d", data, at)
        at += 12 * num_best
        logprobs.append(TokenLogprobs(logprob, rank, values[:num_best], values[num_best:]))
    return tuple(logprobs)
