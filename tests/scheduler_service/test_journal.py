from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import resource
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service import journal_file, journal_writer
from scheduler_service.journal import Journal, JournalError
from scheduler_service.record import AnswerLog, CallRecord, JournalState, Setup
from scheduler_service.request import (
    FinishedEvent,
    FinishReason,
    PromptLogprobsEvent,
    TokenEvent,
    TokenLogprobs,
    choice_id,
)

SETUP = Setup("weights", "front", "1.0", "build", "bf16", "bf16", "a CPU", 2)
MIB = 1 << 20


def record(call_id="a", *, num_answers=1, prompt=(5, 6, 7, 8), request=b"asked", **others):
    fields = {
        "call_id": call_id,
        "client": "",
        "request": request,
        "prompt_token_ids": array("I", prompt),
        "opens_reasoning": False,
        "seed": 7,
        "num_answers": num_answers,
        "accepted_unix_ns": 1,
        "deadline_unix_ns": None,
        "setup": SETUP,
    }
    return CallRecord(**(fields | others))


def end(call_id="a", choice_index=0, num_tokens=0, **others):
    fields = {
        "request_id": choice_id(call_id, choice_index),
        "reason": FinishReason.LENGTH,
        "num_prompt_tokens": 4,
        "num_generated_tokens": num_tokens,
        "queue_ns": 1,
        "prefill_ns": 2,
        "decode_ns": 3,
        "time_to_first_token_ns": 4,
    }
    return FinishedEvent(**(fields | others))


def tokens(first_index, *token_ids, call_id="a"):
    return TokenEvent(call_id, first_index, token_ids)


def open_journal(
    folder, *, max_bytes=64 * MIB, retention_s=3600.0, accept_timeout_s=60.0, **others
):
    return Journal.open(
        folder,
        max_bytes=max_bytes,
        retention_s=retention_s,
        accept_timeout_s=accept_timeout_s,
        **others,
    )


@contextlib.contextmanager
def journal_of(folder, **options):
    journal, _ = open_journal(folder, **options)
    try:
        yield journal
    finally:
        journal.close()


def recorded(folder, **options):
    """What a restarted server finds, by call_id."""
    journal, calls = open_journal(folder, **options)
    journal.close()
    assert len({call.record.call_id for call in calls}) == len(calls)
    return {call.record.call_id: call for call in calls}


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (in a thread)
            await asyncio.sleep(0.002)


async def is_state(journal, state):
    await until(lambda: journal.state is state)


async def has_failed(caplog):
    """It may work again before anybody looks at its state."""
    await until(lambda: "served without it" in caplog.text)


async def is_written(journal):
    await until(lambda: journal._writer.num_bytes_done == journal._num_bytes_put)


async def test_a_call_comes_back_as_it_was(tmp_path):
    asked = record(
        num_answers=2,
        client="me",
        opens_reasoning=True,
        seed=2**64 - 1,
        deadline_unix_ns=2**63 - 1,
        prompt=(0, 2**32 - 1),
        request=bytes(range(256)),
    )
    one = TokenLogprobs(-math.inf, 3, (4, 5), (-0.1, -math.inf))
    with journal_of(tmp_path) as journal:
        assert await journal.accept(asked)
        journal.add("a", 0, PromptLogprobsEvent("a", 1, (one,)))
        journal.add("a", 0, TokenEvent("a", 0, (9,), (one,)))
        journal.add("a", 0, TokenEvent("a", 1, (2**32 - 1, 0), (one, one)))
        last = end(num_tokens=3, matched_token_id=0, message="Grüße \x00\n", status="INTERNAL")
        journal.add("a", 0, last)
    found = recorded(tmp_path)["a"]
    assert found.record == asked
    assert found.answers[0] == AnswerLog(array("I", [9, 2**32 - 1, 0]), [one] * 3, [one], last)
    assert found.answers[1] == AnswerLog()
    assert found.ended_unix_ns is None


async def test_it_is_ended_when_all_of_its_answers_are(tmp_path):
    before = time.time_ns()
    with journal_of(tmp_path) as journal:
        await journal.accept(record(num_answers=2))
        for index in (1, 0):
            journal.add("a", index, end("a", index))
    after = time.time_ns()
    found = recorded(tmp_path)["a"]
    assert found.answers[1].end == end("a", 1)
    # Another clock than this one goes on with it; they may differ a little.
    assert before - 30e9 < found.ended_unix_ns < after + 30e9


numbers = st.floats(allow_nan=False, width=32)
ids = st.integers(0, 2**32 - 1)
logprob = st.integers(0, 3).flatmap(
    lambda n: st.builds(
        TokenLogprobs,
        numbers,
        ids,
        st.tuples(*[ids] * n),
        st.tuples(*[numbers] * n),
    )
)


@st.composite
def answers(draw):
    """(events of an answer, cut anyhow, some told twice; what they come to)."""
    log = AnswerLog()
    events = []
    with_logprobs = draw(st.booleans())
    at = 1
    for part in draw(st.lists(st.lists(logprob, max_size=2), max_size=2)):
        events.append(PromptLogprobsEvent("", at, tuple(part)))
        at += len(part)
    at = 0
    for part in draw(st.lists(st.lists(ids, max_size=3), max_size=5)):
        again = draw(st.integers(0, min(2, at)))
        told = tuple(log.token_ids[at - again : at]) + tuple(part)
        told_logprobs = ()
        if with_logprobs:
            told_logprobs = (
                *log.logprobs[at - again : at],
                *draw(st.tuples(*[logprob] * len(part))),
            )
        events.append(TokenEvent("", at - again, told, told_logprobs))
        log.add(TokenEvent("", at, tuple(part), told_logprobs[again:]))
        at += len(part)
    for event in events:
        if isinstance(event, PromptLogprobsEvent):
            log.add(event)
    if draw(st.booleans()):
        events.append(end("", 0, at, message=draw(st.text(max_size=5))))
        log.add(events[-1])
    return events, log


@settings(max_examples=25)
@given(told=st.lists(answers(), min_size=1, max_size=3), pieces=st.randoms(use_true_random=False))
def test_whatever_is_told_comes_back(told, pieces):
    """In any mix, with flushes and restarts anywhere."""

    async def tell(folder):
        journal, _ = open_journal(folder)
        asked = record(num_answers=len(told), prompt=range(9))
        assert await journal.accept(asked)
        left = [list(events) for events, _ in told]
        while any(left):
            index = pieces.choice([i for i, events in enumerate(left) if events])
            journal.add("a", index, left[index].pop(0))
            if pieces.random() < 0.2:
                journal._flush()
            if pieces.random() < 0.1:
                journal.close()
                journal, _ = open_journal(folder)
        journal.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(tell(Path(folder)))
        found = recorded(Path(folder))["a"]
    for index, (log, (_, wanted)) in enumerate(zip(found.answers, told, strict=True)):
        if wanted.end is not None:
            wanted.end = replace(wanted.end, request_id=choice_id("a", index))
        assert log == wanted
    assert (found.ended_unix_ns is None) == any(log.end is None for log in found.answers)


async def test_a_restarted_call_goes_on_where_it_was(tmp_path):
    with journal_of(tmp_path) as journal:
        await journal.accept(record())
        journal.add("a", 0, tokens(0, 1, 2))
    with journal_of(tmp_path) as journal:
        # Told once more, with more behind.
        journal.add("a", 0, tokens(0, 1, 2, 3))
        journal.add("a", 0, tokens(1, 2))
        journal.add("a", 0, end(num_tokens=3))
        journal.add("a", 0, tokens(3, 4))
    found = recorded(tmp_path)["a"].answers[0]
    assert list(found.token_ids) == [1, 2, 3]
    assert found.end == end(num_tokens=3)


async def test_a_gap_takes_the_call_out(tmp_path, caplog):
    with journal_of(tmp_path) as journal:
        await journal.accept(record())
        journal.add("a", 0, tokens(1, 2))
        journal.add("a", 0, tokens(0, 1))
    assert not recorded(tmp_path)
    assert "'a' leaves it: a gap" in caplog.text


async def test_what_was_not_accepted_is_ignored(tmp_path):
    with journal_of(tmp_path) as journal:
        journal.add("a", 0, tokens(0, 1))
        journal.forget("a")
        assert await journal.accept(record("b"))
    assert set(recorded(tmp_path)) == {"b"}


async def test_calls_come_in_order_of_acceptance(tmp_path):
    names = [f"{7 * i % 50}" for i in range(50)]
    for some in (names[:20], names[20:]):
        with journal_of(tmp_path) as journal:
            assert all(await asyncio.gather(*[journal.accept(record(name)) for name in some]))
    assert list(recorded(tmp_path)) == names


async def test_a_reused_id_is_another_call(tmp_path):
    with journal_of(tmp_path) as journal:
        await journal.accept(record())
        journal.add("a", 0, tokens(0, 1, 2))
        journal.add("a", 0, end(num_tokens=2))
        accepted = journal.accept(record(client="new"))
        journal.add("a", 0, tokens(0, 9))
        assert await accepted
    found = recorded(tmp_path)["a"]
    assert found.record.client == "new"
    assert list(found.answers[0].token_ids) == [9]
    assert found.answers[0].end is None


async def test_a_reused_id_of_a_call_that_runs(tmp_path):
    with journal_of(tmp_path) as journal:
        first = journal.accept(record())
        journal.add("a", 0, tokens(0, 1, 2))
        assert await journal.accept(record(client="new"))
        assert not await first
    found = recorded(tmp_path)["a"]
    assert found.record.client == "new"
    assert not found.answers[0].token_ids


async def test_forgotten_calls_are_gone(tmp_path):
    with journal_of(tmp_path) as journal:
        for name in ("runs", "ended", "stays"):
            await journal.accept(record(name))
        journal.add("ended", 0, end("ended"))
        journal.add("runs", 0, tokens(0, 1))
        journal.forget("ended")
        journal.forget("runs")
        journal.add("runs", 0, tokens(1, 2))
    assert set(recorded(tmp_path)) == {"stays"}


async def test_what_a_forgotten_call_told_last_is_gone(tmp_path, stall):
    with journal_of(tmp_path) as journal:
        for name in ("a", "b"):
            assert await journal.accept(record(name))
        stalled, answers_again = stall()
        journal.forget("b")
        stalled.wait()
        # Both in one transaction.
        journal.add("a", 0, tokens(0, 1))
        journal._flush()
        journal.forget("a")
        answers_again.set()
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as database:
        assert database.execute("SELECT count(*) FROM piece").fetchone() == (0,)


async def test_a_reader_of_its_answer_may_leave(tmp_path):
    with journal_of(tmp_path) as journal:
        journal.accept(record()).cancel()
        journal.add("a", 0, tokens(0, 1))
    assert list(recorded(tmp_path)["a"].answers[0].token_ids) == [1]


async def test_retention(tmp_path):
    with journal_of(tmp_path) as journal:
        for name in ("runs", "ended"):
            await journal.accept(record(name))
        journal.add("ended", 0, end("ended"))
    assert set(recorded(tmp_path)) == {"runs", "ended"}
    assert set(recorded(tmp_path, retention_s=0.0)) == {"runs"}
    # That one was dropped for good by the thread that had it last.
    assert set(recorded(tmp_path)) == {"runs"}


async def test_an_end_in_the_future_is_now(tmp_path, monkeypatch):
    """The clock was set back between two lives."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 10**15)
    with journal_of(tmp_path) as journal:
        await journal.accept(record())
        journal.add("a", 0, end())
    monkeypatch.undo()
    assert recorded(tmp_path)["a"].ended_unix_ns > real() + 10**14
    assert recorded(tmp_path)["a"].ended_unix_ns <= real()


async def test_a_clock_that_jumps_ends_no_retention(tmp_path, monkeypatch):
    with journal_of(tmp_path) as journal:
        await journal.accept(record())
        real = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real() + 10**15)
        journal.add("a", 0, end())
        await journal.accept(record("b"))
        journal._writer._next_purge = 0.0
        await journal.accept(record("c"))
        monkeypatch.undo()
    assert set(recorded(tmp_path)) == {"a", "b", "c"}


async def test_many_calls_join_one_commit(tmp_path, monkeypatch):
    commits = []
    may_go = threading.Event()
    real = journal_file.JournalFile.transaction

    def counted(self):
        commits.append(1)
        may_go.wait()
        return real(self)

    with journal_of(tmp_path) as journal:
        monkeypatch.setattr(journal_file.JournalFile, "transaction", counted)
        first = journal.accept(record("first"))
        await until(lambda: commits)
        others = [journal.accept(record(f"{i}")) for i in range(40)]
        may_go.set()
        assert await first
        assert all(await asyncio.gather(*others))
        assert len(commits) == 2


async def test_a_record_that_no_file_takes_is_refused_alone(tmp_path, caplog):
    with journal_of(tmp_path) as journal:
        odd = journal.accept(record("odd", deadline_unix_ns=2**63))
        journal.add("odd", 0, tokens(0, 1))
        assert await journal.accept(record("b"))
        assert not await odd
        assert journal.state is JournalState.ON
    assert set(recorded(tmp_path)) == {"b"}
    assert "'odd' is not in it" in caplog.text


async def test_a_fault_of_ours_does_not_end_the_thread(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.01)
    with journal_of(tmp_path) as journal:
        assert await journal.accept(record("a"))
        with monkeypatch.context() as patched:
            patched.setattr(journal_writer, "_pieces", lambda job: 1 / 0)
            journal.add("a", 0, tokens(0, 1))
            await has_failed(caplog)
        await is_state(journal, JournalState.ON)
        assert await journal.accept(record("b"))
    assert "ZeroDivisionError" in caplog.text
    assert set(recorded(tmp_path)) == {"a", "b"}


async def test_a_reused_id_that_is_refused_is_not_the_old_call(tmp_path):
    with journal_of(tmp_path, max_bytes=MIB) as journal:
        assert await journal.accept(record())
        journal.add("a", 0, end())
        assert not await journal.accept(record(request=bytes(MIB // 4)))
    assert not recorded(tmp_path)


async def test_nothing_is_kept_in_memory_of_what_has_ended(tmp_path):
    with journal_of(tmp_path) as journal:
        assert await journal.accept(record())
        journal.add("a", 0, end())
        await until(lambda: not journal._running)
        assert not journal._waiting
        await until(lambda: not journal._writer._running)


async def test_a_restarted_calls_pieces_are_found_when_it_is_forgotten(tmp_path):
    """All pieces before its first one are gone."""
    with journal_of(tmp_path) as journal:
        assert await journal.accept(record("before"))
        journal.add("before", 0, tokens(0, 1))
        journal._flush()
        await is_written(journal)
        assert await journal.accept(record())
        journal.forget("before")
    with journal_of(tmp_path) as journal:
        journal.add("a", 0, tokens(0, 1))
        journal._flush()
        await is_written(journal)
        journal.forget("a")
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as database:
        assert database.execute("SELECT count(*) FROM piece").fetchone() == (0,)


# Who may have it.


async def test_a_second_server_is_refused(tmp_path):
    with (
        journal_of(tmp_path),
        pytest.raises(JournalError, match=f"{tmp_path} is in use by another server"),
    ):
        open_journal(tmp_path)
    recorded(tmp_path)


async def test_only_its_owner_reads_it(tmp_path):
    folder = tmp_path / "deep" / "journal"
    mask = os.umask(0)
    try:
        with journal_of(folder) as journal:
            await journal.accept(record())
            names = {path.name for path in folder.iterdir()}
            assert names == {"journal.db", "journal.db-wal", "journal.lock"}
            assert folder.stat().st_mode & 0o777 == 0o700
            assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    finally:
        os.umask(mask)


async def test_a_file_that_others_could_read_no_longer_can_be(tmp_path):
    recorded(tmp_path)
    (tmp_path / "journal.db").chmod(0o644)
    recorded(tmp_path)
    assert (tmp_path / "journal.db").stat().st_mode & 0o777 == 0o600


async def test_a_folder_that_others_may_write_is_told(tmp_path, caplog):
    tmp_path.chmod(0o777)
    recorded(tmp_path)
    assert "chmod 700" in caplog.text


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_cannot_be_a_journal(tmp_path, kind):
    folder = tmp_path / "journal"
    if kind == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        path = folder / "journal.db"
        path.symlink_to(tmp_path / "other") if kind == "link" else path.mkdir()
    with pytest.raises(JournalError, match="cannot be"):
        open_journal(folder)
    assert not (tmp_path / "other").exists()


def test_too_small_a_bound(tmp_path):
    with pytest.raises(ValueError, match="too small"):
        open_journal(tmp_path, max_bytes=1000)


# Damage.


async def write_some(folder, num_calls=30):
    """Calls of known contents, some running; the journal is closed."""
    with journal_of(folder) as journal:
        for i in range(num_calls):
            name = f"call-{i}"
            await journal.accept(record(name, num_answers=1 + i % 2, request=bytes(50 * i)))
            journal.add(name, 0, tokens(0, *range(i)))
            journal._flush()
            journal.add(name, 0, tokens(i, *range(i, 3 * i)))
            if i % 3 == 0:
                for index in range(1 + i % 2):
                    journal.add(name, index, end(name, index, 3 * i * (index == 0)))


def check_calls(calls):
    """Whatever is given out is what was written, or the beginning of what ran."""
    for name, call in calls.items():
        i = int(name.partition("-")[2])
        assert call.record == record(name, num_answers=1 + i % 2, request=bytes(50 * i))
        told = list(call.answers[0].token_ids)
        assert told == list(range(len(told)))
        if i % 3 == 0:
            assert call.ended_unix_ns is not None
        if call.ended_unix_ns is not None:
            assert len(told) == 3 * i


async def check_works(folder):
    """It can be opened and written after whatever happened; what it found."""
    calls = recorded(folder)
    with journal_of(folder) as journal:
        assert journal.state is JournalState.ON
        assert await journal.accept(record("new"))
        journal.add("new", 0, tokens(0, 1))
    assert list(recorded(folder)["new"].answers[0].token_ids) == [1]
    return calls


def kept_aside(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.count(".") > 1)


def flip(path, chance, amount):
    data = bytearray(path.read_bytes())
    for _ in range(amount):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    asyncio.run(write_some(folder))
    return folder


@pytest.mark.parametrize("seed", range(60))
async def test_flipped_bits_change_nothing_that_is_given_out(tmp_path, written, seed):
    chance = random.Random(seed)
    shutil.copy(written / "journal.db", tmp_path)
    flip(tmp_path / "journal.db", chance, 1 + seed % 5)
    check_calls(await check_works(tmp_path))


@pytest.mark.parametrize("part", [0.001, 0.1, 0.3, 0.5, 0.9, 0.999])
async def test_a_file_that_was_cut_off(tmp_path, written, part, caplog):
    data = (written / "journal.db").read_bytes()
    (tmp_path / "journal.db").write_bytes(data[: int(part * len(data))])
    check_calls(await check_works(tmp_path))
    assert "kept as" in caplog.text or "left out" in caplog.text


@pytest.mark.parametrize("seed", range(30))
async def test_a_log_that_was_cut_off_or_changed(tmp_path, seed):
    """As a process that was killed leaves it: all is in the log."""
    source = tmp_path / "source"
    journal, _ = open_journal(source)
    for i in range(1, 20):
        name = f"call-{i}"
        assert await journal.accept(record(name, num_answers=1 + i % 2, request=bytes(50 * i)))
    target = tmp_path / "target"
    shutil.copytree(source, target)
    journal.close()
    log = target / "journal.db-wal"
    chance = random.Random(seed)
    if seed % 2:
        flip(log, chance, 2)
    else:
        log.write_bytes(log.read_bytes()[: chance.randrange(log.stat().st_size)])
    calls = await check_works(target)
    assert list(calls) == [f"call-{i}" for i in range(1, len(calls) + 1)]


@pytest.mark.parametrize("content", [b"x" * 10_000, b"", b"SQLite format 3\0" + bytes(5000)])
async def test_other_contents(tmp_path, content):
    (tmp_path / "journal.db").write_bytes(content)
    (tmp_path / "journal.db-wal").write_bytes(content)
    assert not await check_works(tmp_path)
    assert bool(kept_aside(tmp_path)) == bool(content)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("PRAGMA application_id = 1", "no journal"),
        ("CREATE TABLE more (a)", "tables"),
        ("CREATE TRIGGER t AFTER INSERT ON call BEGIN DELETE FROM piece; END", "tables"),
        ("DROP TABLE piece", "tables"),
    ],
)
async def test_another_database(tmp_path, written, change, reason, caplog):
    shutil.copy(written / "journal.db", tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as database:
        database.execute(change)
        database.commit()
    assert not await check_works(tmp_path)
    assert reason in caplog.text
    assert "damaged-" in kept_aside(tmp_path)[0]


async def test_another_version_is_kept(tmp_path, written, caplog):
    shutil.copy(written / "journal.db", tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as database:
        database.execute("PRAGMA user_version = 9")
    assert not await check_works(tmp_path)
    assert kept_aside(tmp_path) == ["journal.db.version-9"]
    assert "it is of version 9, this server writes 1" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM piece WHERE call = 11 AND kind = 1 AND first_index = 0",
        "DELETE FROM piece WHERE call = 13 AND kind = 1 AND first_index > 0",
        "DELETE FROM piece WHERE call = 13 AND kind = 2",
        "UPDATE piece SET data = x'0102' WHERE call = 11 AND kind = 1 AND first_index = 0",
        "UPDATE piece SET choice = 7 WHERE call = 11 AND kind = 1 AND first_index = 0",
        "UPDATE call SET ended_unix_ns = 1 << 61 WHERE id = 11",
        "UPDATE call SET ended_unix_ns = NULL WHERE id = 13",
        "UPDATE call SET prompt_token_ids = 'text' WHERE id = 11",
        "UPDATE call SET seed = x'00' WHERE id = 11",
        "UPDATE call SET setup = x'00', checksum = 5 WHERE id = 11",
        "DELETE FROM setup",
        "UPDATE setup SET json = '{}'",
        "UPDATE setup SET json = x'ff'",
    ],
)
async def test_a_call_that_makes_no_sense_is_left_out(tmp_path, written, change, caplog):
    shutil.copy(written / "journal.db", tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as database:
        database.execute(change)
        database.commit()
    calls = await check_works(tmp_path)
    check_calls(calls)
    assert len(calls) == (29 if "call" in change else 0)
    assert "is left out" in caplog.text
    assert not kept_aside(tmp_path)
    # It was dropped: nothing to report any more.
    caplog.clear()
    recorded(tmp_path)
    assert "left out" not in caplog.text


def rewritten(folder, change):
    """A journal with its second call's first piece, as change makes it, with a right checksum."""
    with contextlib.closing(sqlite3.connect(folder / "journal.db")) as database:
        row_id, *row = database.execute("SELECT * FROM piece WHERE call = 2 LIMIT 1").fetchone()
        piece = journal_file.Piece(*row)
        other = change(piece)
        other = other._replace(checksum=journal_file._checksum(*other[:-1]))
        places = ", ".join("?" * 8)
        database.execute(f"INSERT OR REPLACE INTO piece VALUES ({places})", (row_id, *other))
        database.commit()


@pytest.mark.parametrize(
    "change",
    [
        lambda piece: piece._replace(data=b"123"),
        lambda piece: piece._replace(data="1234"),
        lambda piece: piece._replace(kind=9),
        lambda piece: piece._replace(first_index=-1),
        lambda piece: piece._replace(first_index="x"),
        lambda piece: piece._replace(logprobs=b"1"),
        lambda piece: piece._replace(logprobs=struct.pack("<dII", 0.0, 1, 2**32 - 1)),
        lambda piece: piece._replace(logprobs=struct.pack("<dII", 0.0, 1, 0) * 2),
        lambda piece: piece._replace(kind=0, first_index=1, data=struct.pack("<dII", 0, 1, 0) * 4),
        lambda piece: piece._replace(kind=0, first_index=3, data=struct.pack("<dII", 0, 1, 0)),
        lambda piece: piece._replace(kind=2, data=b"{"),
        lambda piece: piece._replace(kind=2, data=b"[" * 100_000),
        lambda piece: piece._replace(kind=2, data=b"[]"),
        lambda piece: piece._replace(kind=2, data=b'{"num_prompt_logprobs": 0, "event": {}}'),
        lambda piece: piece._replace(kind=2, data=b'{"num_prompt_logprobs": 0, "event": 7}'),
    ],
)
async def test_a_piece_that_is_forged(tmp_path, written, change, caplog):
    shutil.copy(written / "journal.db", tmp_path)
    rewritten(tmp_path, change)
    calls = await check_works(tmp_path)
    assert len(calls) == 29
    assert "call-1" not in calls
    assert "'call-1' is left out" in caplog.text


@pytest.mark.parametrize("name", ["call_by_call_id", "call_by_end"])
async def test_a_damaged_index(tmp_path, written, name):
    """No row is wrong, but rows would not be found."""
    path = tmp_path / "journal.db"
    shutil.copy(written / "journal.db", path)
    with contextlib.closing(sqlite3.connect(path)) as database:
        query = "SELECT rootpage FROM sqlite_schema WHERE name = ?"
        (page,) = database.execute(query, (name,)).fetchone()
        database.execute("PRAGMA journal_mode = DELETE")
    data = bytearray(path.read_bytes())
    # The last of its cells is another's.
    data[4096 * page - 3] ^= 1
    path.write_bytes(data)
    assert not await check_works(tmp_path)
    assert len(kept_aside(tmp_path)) == 1


async def test_few_damaged_files_are_kept(tmp_path):
    for i in range(8):
        (tmp_path / "journal.db").write_bytes(b"%d" % i * 1000)
        recorded(tmp_path)
    assert len(kept_aside(tmp_path)) == 4


async def test_a_file_that_is_taken_away(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.01)
    with journal_of(tmp_path) as journal:
        assert await journal.accept(record("old"))
        (tmp_path / "journal.db").unlink()
        assert not await journal.accept(record("b"))
        await is_state(journal, JournalState.ON)
        assert await journal.accept(record("c"))
        journal.add("old", 0, tokens(0, 1))
        journal.add("c", 0, tokens(0, 1))
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as database:
        assert database.execute("SELECT count(*) FROM piece").fetchone() == (1,)
    assert set(recorded(tmp_path)) == {"c"}


@pytest.mark.parametrize("how", ["cut", "replaced"])
async def test_a_file_that_is_cut_or_replaced_while_it_is_open(tmp_path, monkeypatch, how):
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.01)
    path = tmp_path / "journal.db"
    with journal_of(tmp_path) as journal:
        assert await journal.accept(record("old"))
        if how == "cut":
            os.truncate(path, 0)
        else:
            other = tmp_path / "other"
            other.write_bytes(path.read_bytes())
            other.replace(path)
        assert not await journal.accept(record("b"))
        await is_state(journal, JournalState.ON)
        assert await journal.accept(record("c"))
    assert set(recorded(tmp_path)) == {"c"}


async def test_a_file_that_is_damaged_while_it_is_open(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.01)
    with journal_of(tmp_path) as journal:
        assert await journal.accept(record("old"))

        def corrupt(self, *_):
            error = sqlite3.DatabaseError("database disk image is malformed")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(journal_file.JournalFile, "add_pieces", corrupt)
            journal.add("old", 0, tokens(0, 1))
            await has_failed(caplog)
        await is_state(journal, JournalState.ON)
        assert await journal.accept(record("new"))
    assert len(kept_aside(tmp_path)) == 1
    assert set(recorded(tmp_path)) == {"new"}


# Disks that are full or slow.


@contextlib.contextmanager
def file_size_limit(num_bytes):
    """No file of this process can grow beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def full_disk(folder):
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


@pytest.fixture(params=["limit", "tmpfs"])
def small_disk(request, tmp_path):
    """(folder, context in which nothing can be written to it)"""
    if request.param == "limit":
        yield tmp_path, file_size_limit(200_000)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "journal-test", str(tmp_path)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("no file system can be mounted")
    try:
        yield tmp_path, full_disk(tmp_path)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


async def test_a_disk_that_is_full_for_a_while(small_disk, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.02)
    folder, full = small_disk
    with journal_of(folder) as journal:
        assert await journal.accept(record("runs"))
        journal.add("runs", 0, tokens(0, 1, call_id="runs"))
        with full:
            num_accepted = 0
            while await journal.accept(record(f"{num_accepted}", request=bytes(20_000))):
                num_accepted += 1
            assert journal.state is JournalState.FAILING
            journal.add("runs", 0, tokens(1, 2, 3, call_id="runs"))
            assert not await journal.accept(record("refused"))
            journal.add("refused", 0, tokens(0, 1))
            journal._flush()
            # Tried again with that, in vain.
            tries = []
            real = journal._writer._fail
            monkeypatch.setattr(
                journal._writer, "_fail", lambda error: (tries.append(1), real(error))
            )
            await until(lambda: len(tries) > 1)
        await is_state(journal, JournalState.ON)
        assert await journal.accept(record("later"))
    calls = recorded(folder)
    assert set(calls) == {"runs", "later"} | {f"{i}" for i in range(num_accepted)}
    assert list(calls["runs"].answers[0].token_ids) == [1, 2, 3]
    assert caplog.text.count("served without it") == 1
    assert "works again" in caplog.text


async def test_it_is_read_from_a_full_disk(small_disk):
    folder, full = small_disk
    await write_some(folder)
    with full:
        journal, calls = open_journal(folder)
        assert len(calls) == 30
        journal.close()
    assert len(recorded(folder)) == 30


async def test_a_new_one_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.02)
    with file_size_limit(2000):
        journal, calls = open_journal(tmp_path)
        assert not calls
        assert journal.state is JournalState.FAILING
        assert not await journal.accept(record("a"))
    await is_state(journal, JournalState.ON)
    assert await journal.accept(record("b"))
    journal.close()
    assert set(recorded(tmp_path)) == {"b"}


async def test_a_commit_that_seemed_to_fail(tmp_path, monkeypatch):
    """It is tried again: what was told is there twice, and read once."""
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.01)
    real = journal_file.JournalFile.transaction

    @contextlib.contextmanager
    def transaction(self):
        with real(self):
            yield
        raise sqlite3.OperationalError("disk I/O error")

    with journal_of(tmp_path) as journal:
        assert await journal.accept(record())
        with monkeypatch.context() as patched:
            patched.setattr(journal_file.JournalFile, "transaction", transaction)
            journal.add("a", 0, PromptLogprobsEvent("a", 1, (TokenLogprobs(-1.0, 1, (), ()),)))
            journal.add("a", 0, tokens(0, 1, 2))
            journal.add("a", 0, end(num_tokens=2))
            journal._flush()
            assert not await journal.accept(record("b"))
            await is_state(journal, JournalState.FAILING)
        await is_state(journal, JournalState.ON)
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as database:
        (num_pieces,) = database.execute("SELECT count(*) FROM piece").fetchone()
    assert num_pieces == 6
    calls = recorded(tmp_path)
    assert set(calls) == {"a"}
    assert list(calls["a"].answers[0].token_ids) == [1, 2]
    assert len(calls["a"].answers[0].prompt_logprobs) == 1


@pytest.fixture
def stall(monkeypatch):
    """Call it: from then on the disk does not answer until the event is set."""
    answers_again = threading.Event()
    stalled = threading.Event()
    real = journal_file.JournalFile.transaction

    def transaction(self):
        stalled.set()
        answers_again.wait()
        return real(self)

    def begin():
        monkeypatch.setattr(journal_file.JournalFile, "transaction", transaction)
        return stalled, answers_again

    yield begin
    answers_again.set()


async def test_a_disk_that_stalls_holds_up_nobody(tmp_path, stall):
    with journal_of(tmp_path, accept_timeout_s=0.02) as journal:
        await until_accepted(journal, "runs")
        _, answers_again = stall()
        assert not await journal.accept(record("refused"))
        assert journal.state is JournalState.FAILING
        # At once, from now on.
        assert journal.accept(record("too")).done()
        journal.add("runs", 0, tokens(0, 1, call_id="runs"))
        answers_again.set()
        await is_state(journal, JournalState.ON)
    calls = recorded(tmp_path)
    assert set(calls) == {"runs"}
    assert list(calls["runs"].answers[0].token_ids) == [1]


async def until_accepted(journal, name):
    """Also where the machine is slower than the bound."""
    while not await journal.accept(record(name)):
        await is_state(journal, JournalState.ON)


async def test_a_disk_that_stalls_takes_no_memory(tmp_path, stall, caplog):
    with journal_of(tmp_path, max_queued_bytes=10_000) as journal:
        for name in ("a", "b"):
            assert await journal.accept(record(name))
        stalled, answers_again = stall()
        at = 0
        while journal.state is JournalState.ON:
            journal.add("a", 0, tokens(at, at))
            journal._flush()
            at += 1
        assert at < 100
        for i in range(at, at + 1000):
            journal.add("a", 0, tokens(i, i))
            journal._flush()
        assert journal._num_bytes_put - journal._writer.num_bytes_done < 11_000
        stalled.wait()
        answers_again.set()
        await is_state(journal, JournalState.ON)
        journal.add("b", 0, tokens(0, 7))
        assert await journal.accept(record("c"))
    calls = recorded(tmp_path)
    assert set(calls) == {"b", "c"}
    assert list(calls["b"].answers[0].token_ids) == [7]
    assert "wait for the disk" in caplog.text


async def test_the_end_waits_for_the_disk_not_for_ever(tmp_path, stall, monkeypatch, caplog):
    monkeypatch.setattr("scheduler_service.journal._CLOSE_S", 0.02)
    journal, _ = open_journal(tmp_path)
    assert await journal.accept(record("a"))
    stalled, answers_again = stall()
    later = journal.accept(record("b"))
    stalled.wait()
    journal.close()
    assert not await later
    assert "last moments" in caplog.text
    # Nobody else may have it while the thread lives.
    with pytest.raises(JournalError, match="in use"):
        open_journal(tmp_path)
    answers_again.set()
    assert journal._writer.join(30)
    journal._folder.release()


# Bounds.


def num_bytes(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


async def test_it_does_not_outgrow_its_bound(tmp_path):
    largest = 0
    with journal_of(tmp_path, max_bytes=MIB) as journal:
        for i in range(2000):
            name = f"{i}"
            accepted = journal.accept(record(name, request=bytes(i % 3000)))
            journal.add(name, 0, tokens(0, *range(i % 100)))
            journal.add(name, 0, end(name, 0, i % 100))
            if not i % 8:
                assert await accepted
                largest = max(largest, num_bytes(tmp_path))
    assert largest <= MIB
    left = [int(name) for name in recorded(tmp_path, max_bytes=MIB)]
    assert len(left) > 50
    # The latest ones; the oldest went first.
    assert left == list(range(2000 - len(left), 2000))


async def test_calls_that_run_fill_it(tmp_path, caplog):
    with journal_of(tmp_path, max_bytes=MIB) as journal:
        names = [f"{i}" for i in range(300)]
        kept = [name for name in names if await journal.accept(record(name, request=bytes(9000)))]
        assert 20 < len(kept) < 100
        assert kept == names[: len(kept)]
        assert journal.state is JournalState.ON
        # These still have room.
        for name in kept:
            journal.add(name, 0, tokens(0, *range(20)))
        journal.add(kept[0], 0, end(kept[0], 0, 20))
        journal._flush()
        await is_written(journal)
        # The one that has ended gives way to a new one.
        assert await journal.accept(record("new"))
    calls = recorded(tmp_path, max_bytes=MIB)
    assert set(calls) - {"new"} == set(kept[1:])
    assert all(len(calls[name].answers[0].token_ids) == 20 for name in kept[1:])
    assert caplog.text.count("is not in it") == 1


async def test_a_call_that_outgrows_it_leaves_it(tmp_path, caplog):
    with journal_of(tmp_path, max_bytes=MIB) as journal:
        for name in ("small", "large"):
            assert await journal.accept(record(name))
        journal.add("small", 0, tokens(0, 1))
        for i in range(40):
            journal.add("large", 0, tokens(10_000 * i, *range(10_000)))
            journal._flush()
        await until(lambda: "large" not in journal._running)
        journal.add("small", 0, tokens(1, 2))
        assert await journal.accept(record("new"))
        assert num_bytes(tmp_path) <= MIB
    assert set(recorded(tmp_path, max_bytes=MIB)) == {"small", "new"}
    assert "no room" in caplog.text


async def test_a_request_that_is_too_long(tmp_path, caplog):
    with journal_of(tmp_path, max_bytes=MIB) as journal:
        assert not await journal.accept(record(request=bytes(MIB // 4)))
        assert journal.state is JournalState.ON
    assert "too long" in caplog.text


async def test_room_is_given_back(tmp_path):
    with journal_of(tmp_path) as journal:
        names = [f"{i}" for i in range(400)]
        for name in names:
            await journal.accept(record(name, request=bytes(30_000)))
        for name in names:
            journal.forget(name)
        for i in range(60):
            await journal.accept(record(f"small-{i}"))
    assert num_bytes(tmp_path) < 6 * MIB


# Death. The child tells what was acknowledged, and is killed.

_PROCESS = """
import asyncio, os, sys
from array import array
from pathlib import Path
from scheduler_service.journal import Journal
from scheduler_service.record import CallRecord, Setup
from scheduler_service.request import FinishedEvent, FinishReason, TokenEvent

setup = Setup("", "", "", "", "", "", "", 1)

def say(text):
    os.write(1, f"{text}\\n".encode())

async def call(journal, name):
    record = CallRecord(name, "", b"asked", array("I", [1]), False, 7, 1, 1, None, setup)
    assert await journal.accept(record)
    say(name)
    for i in range(0, 40, 2):
        journal.add(name, 0, TokenEvent(name, i, (1000 * len(name) + i, i + 1)))
        await asyncio.sleep(0.001)
    journal.add(name, 0, FinishedEvent(name, FinishReason.LENGTH, 1, 40, 0, 0, 0, 0))

async def live(life):
    journal, _ = Journal.open(
        Path(sys.argv[1]), max_bytes=8 << 20, retention_s=3600, accept_timeout_s=60
    )
    at = 0
    while True:
        await asyncio.gather(*[call(journal, f"{life}-{at}-{i}") for i in range(8)])
        at += 1

for life in sys.stdin:
    child = os.fork()
    if not child:
        asyncio.run(live(life.strip()))
    say(child)
    os.waitpid(child, 0)
    say("dead")
"""


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path):
    chance = random.Random(4)
    acknowledged: set[str] = set()
    command = [sys.executable, "-c", _PROCESS, tmp_path]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        for life in range(30):
            process.stdin.write(f"{life}\n")
            child = 0
            num_lines = chance.randrange(2, 40)
            while not child or num_lines:
                line = process.stdout.readline().strip()
                if "-" in line:
                    acknowledged.add(line)
                    num_lines = max(0, num_lines - 1)
                else:
                    child = int(line)
            time.sleep(chance.random() / 50)  # Anywhere in what comes next.
            os.kill(child, signal.SIGKILL)
            while (line := process.stdout.readline().strip()) != "dead":
                acknowledged.add(line)
    calls = recorded(tmp_path, max_bytes=8 << 20)
    assert acknowledged <= set(calls)
    assert not kept_aside(tmp_path)
    num_told = 0
    for name, call in calls.items():
        told = list(call.answers[0].token_ids)
        num_told += len(told)
        assert told == [i if i % 2 else 1000 * len(name) + i for i in range(len(told))]
        assert (call.answers[0].end is not None) == (call.ended_unix_ns is not None)
        if call.answers[0].end is not None:
            assert len(told) == 40
    assert num_told
