"""Trials in a process: none of their faults reaches ours, and no process stays behind."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import fake_trial
import psutil
import pytest
from tokenizer_files import write_byte_level

from scheduler_service import grammar, grammar_trial
from scheduler_service.errors import InvalidArgumentError, UnavailableError
from scheduler_service.generate_call import ConstraintSpec
from scheduler_service.grammar import GrammarCompiler
from scheduler_service.grammar_trial import MEMORY_BYTES, STACK_BYTES, GrammarTrial, OutOfTimeError

TEXTS = [bytes([byte]) for byte in range(256)]
# Of a processor. A harmless trial takes some milliseconds.
PLENTY, LITTLE = 60.0, 0.05


def command(memory_bytes=MEMORY_BYTES, *more):
    return (sys.executable, str(Path(fake_trial.__file__)), str(memory_bytes), *map(str, more))


def regex(text):
    return ConstraintSpec("regex", text)


@pytest.fixture(scope="module", autouse=True)
def patience():
    """Bounds are of a processor's time; how long that takes is the machine's affair."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_trial, "_ANSWER_SECONDS", 300.0)
        yield


@pytest.fixture
def trial():
    made = GrammarTrial(TEXTS, command())
    yield made
    made.close()


def processes(trial):
    """The process that holds the vocabulary, and the child that waits or works."""
    parent = psutil.Process(trial._process.pid)
    wait_until(parent.children, "no child")
    return [parent, *parent.children()]


def wait_until(condition, otherwise):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(otherwise)


def wait_until_gone(processes):
    """A process without a parent may stay a zombie, where nobody asks for it."""
    wait_until(lambda: all(map(is_gone, processes)), f"left behind: {processes}")


def is_gone(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("word", "error", "words"),
    [
        ("abort", InvalidArgumentError, r"regex: too complex: .*256 MiB .*\(SIGABRT\); make it"),
        ("grow", InvalidArgumentError, r"too complex: .*256 MiB"),
        ("panic", InvalidArgumentError, "regex: does not compile: Panic: at the disco"),
        ("refuse", InvalidArgumentError, "regex: is refused"),
        ("spin", OutOfTimeError, None),
        # By the system, when it is out of memory: no fault of the constraint's.
        ("killed", UnavailableError, "no constraint can be tried now: .*; try again later"),
        # By whoever ends all processes of the server.
        ("term", UnavailableError, "no constraint can be tried now: .*; try again later"),
    ],
)
def test_a_fault_is_the_constraints_alone(trial, word, error, words):
    trial.run(regex("a"), [""], PLENTY)
    with pytest.raises(error, match=words):
        trial.run(regex(word), [""], LITTLE if word == "spin" else PLENTY)
    trial.run(regex("b"), [""], PLENTY)


def test_after_a_crash_no_process_has_to_start(trial):
    trial.run(regex("a"), [""], PLENTY)
    pid = trial._process.pid
    with pytest.raises(InvalidArgumentError, match="SIGABRT"):
        trial.run(regex("abort"), [""], PLENTY)
    trial.run(regex("a"), [""], PLENTY)
    assert trial._process.pid == pid


def test_who_was_ended_between_two_trials_is_replaced(trial):
    trial.run(regex("a"), [""], PLENTY)
    there = processes(trial)
    trial._process.kill()
    trial._process.wait()
    for text in "abc":
        trial.run(regex(text), [""], PLENTY)
    wait_until_gone(there)


def test_memory_is_bounded():
    many = ConstraintSpec("json_schema", json.dumps({"enum": [f"v{i}" for i in range(20_000)]}))
    for size, is_enough in ((MEMORY_BYTES, True), (STACK_BYTES + (4 << 20), False)):
        trial = GrammarTrial(TEXTS, command(size))
        if is_enough:
            trial.run(many, [""], PLENTY)
        else:
            with pytest.raises(InvalidArgumentError, match=r"too complex: .* of memory"):
                trial.run(many, [""], PLENTY)
        trial.close()


def test_the_memory_of_a_compiled_one_is_told(trial):
    many = ConstraintSpec("json_schema", json.dumps({"enum": [f"v{i}" for i in range(20_000)]}))
    few = trial.run(regex("a"), [""], PLENTY)
    assert few + (1 << 20) < trial.run(many, [""], PLENTY) < MEMORY_BYTES


def test_a_machine_without_memory_ends_the_trial_first(tmp_path):
    sleeps = tmp_path / "sleeps"
    trial = GrammarTrial(TEXTS, command(MEMORY_BYTES, sleeps))
    thread = threading.Thread(
        target=pytest.raises, args=(UnavailableError, trial.run, regex("sleep"), [""], PLENTY)
    )
    thread.start()
    wait_until(sleeps.exists, "nothing is tried")
    _, child = processes(trial)
    assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "1000\n"
    trial.close()
    thread.join()


def test_every_grammar_of_a_constraint_is_tried(trial):
    trial.run(regex("a"), ["", " "], PLENTY)
    with pytest.raises(InvalidArgumentError, match="SIGABRT"):
        trial.run(regex("a"), ["", "abort"], PLENTY)


@pytest.mark.parametrize(
    "command",
    [("/no/such",), (sys.executable, "-c", "pass"), (sys.executable, "-c", "import nothing")],
)
def test_without_a_process_constraints_are_unavailable(command):
    trial = GrammarTrial(TEXTS, command)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="no constraint can be tried now") as caught:
            trial.run(regex("a"), [""], PLENTY)
        assert "/no/such" not in str(caught.value)
    trial.close()


@pytest.mark.parametrize("is_working", [False, True])
def test_closing_leaves_no_process(tmp_path, is_working):
    sleeps = tmp_path / "sleeps"
    trial = GrammarTrial(TEXTS, command(MEMORY_BYTES, sleeps))
    trial.run(regex("a"), [""], PLENTY)
    errors = []

    def work():
        try:
            trial.run(regex("sleep"), [""], PLENTY)
        except UnavailableError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    if is_working:
        thread.start()
        wait_until(sleeps.exists, "nothing is tried")
    there = processes(trial)
    trial.close()
    wait_until_gone(there)
    if is_working:
        thread.join()
        assert errors
    with pytest.raises(UnavailableError, match="the server ends"):
        trial.run(regex("a"), [""], PLENTY)


def test_it_ends_with_its_owner(trial):
    """As when the server is killed: the socket is closed, and nobody ends the processes."""
    trial.run(regex("a"), [""], PLENTY)
    there = processes(trial)
    trial._socket.close()
    assert trial._process.wait() == 0
    wait_until_gone(there)


@pytest.mark.parametrize("word", ["spin", "a"])
def test_it_ends_without_a_word_in_the_midst_of_a_trial(trial, capfd, word):
    trial.run(regex("a"), [""], PLENTY)
    request = json.dumps(("regex", word, (), [""], LITTLE)).encode()
    trial._socket.sendall(len(request).to_bytes(8, "big") + request)
    trial._socket.close()
    assert trial._process.wait() == 0
    assert capfd.readouterr().err == ""


def test_stopped_nobody_waits_for_it(tmp_path):
    sleeps = tmp_path / "sleeps"
    trial = GrammarTrial(TEXTS, command(MEMORY_BYTES, sleeps))
    errors = []

    def work():
        with pytest.raises(UnavailableError) as caught:
            trial.run(regex("sleep"), [""], PLENTY)
        errors.append(str(caught.value))

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(sleeps.exists, "nothing is tried")
    trial.stop()
    thread.join()
    assert errors == ["no constraint can be tried now: the server ends; try again later"]
    assert trial._process is None


@pytest.fixture
def compiler(tmp_path):
    made = GrammarCompiler(write_byte_level(tmp_path), 517, command())
    yield made
    made.close()


def without_processes(compiler, monkeypatch):
    def run(*_):
        raise AssertionError("it is tried again")

    monkeypatch.setattr(compiler._quick, "run", run)
    monkeypatch.setattr(compiler._slow, "run", run)


@pytest.mark.parametrize("word", ["abort", "refuse", "spin"])
def test_a_refusal_is_remembered(compiler, monkeypatch, word):
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", LITTLE)
    with pytest.raises(InvalidArgumentError) as first:
        compiler.compile(regex(word))
    without_processes(compiler, monkeypatch)
    for again in (compiler.find, compiler.compile):
        with pytest.raises(InvalidArgumentError) as later:
            again(regex(word))
        assert (str(later.value), later.value.field) == (str(first.value), "regex")


def test_refusals_are_bounded(compiler, monkeypatch):
    monkeypatch.setattr(grammar, "CACHE_BYTES", 4000)
    compiler.compile(regex("a"))
    for i in range(5):
        with pytest.raises(InvalidArgumentError):
            compiler.compile(regex(f"refuse{i}"))
    assert len(compiler._refused) == 3
    assert compiler.find(regex("refuse0")) is None
    assert compiler.find(regex("a"))


def sized(compiler, monkeypatch, num_bytes):
    monkeypatch.setattr(compiler._slow, "run", lambda *_: num_bytes)


def test_what_is_kept_is_bounded_in_memory(compiler, monkeypatch):
    monkeypatch.setattr(grammar, "KEPT_BYTES", 100)
    sized(compiler, monkeypatch, 40)
    for text in "abc":
        compiler.compile(regex(text))
    assert [compiler.find(regex(text)) is None for text in "abc"] == [True, False, False]
    sized(compiler, monkeypatch, 1000)
    assert compiler.compile(regex("d"))
    assert len(compiler._compiled) == 1


def test_what_requests_follow_is_bounded_in_memory(compiler, monkeypatch):
    monkeypatch.setattr(grammar, "KEPT_BYTES", 0)
    monkeypatch.setattr(grammar, "IN_USE_BYTES", 100 << 20)
    sized(compiler, monkeypatch, 40 << 20)
    followed = [compiler.compile(regex(text)).constraint(frozenset(), 0) for text in "ab"]
    with pytest.raises(
        UnavailableError, match="takes 40 MiB of memory, those of other requests 80; 100 are taken"
    ):
        compiler.compile(regex("c"))
    assert not len(compiler._refused)
    sized(compiler, monkeypatch, grammar.SMALL_BYTES)
    followed += [compiler.compile(regex(f"small{i}")).constraint(frozenset(), 0) for i in range(9)]
    sized(compiler, monkeypatch, 40 << 20)
    del followed[1:]
    assert compiler.compile(regex("c"))


def test_what_compiles_is_found_without_a_trial(compiler, monkeypatch):
    assert compiler.find(regex("a")) is None
    compiler.compile(regex("a"))
    without_processes(compiler, monkeypatch)
    assert compiler.find(regex("a")) is compiler.compile(regex("a"))


def test_what_is_no_fault_of_the_constraint_is_not_remembered(compiler, monkeypatch):
    monkeypatch.setattr(grammar, "QUICK_SECONDS", LITTLE)
    with pytest.raises(UnavailableError):
        compiler.compile(regex("killed"))
    with pytest.raises(OutOfTimeError):
        compiler.compile(regex("spin"), is_slow=False)
    assert not len(compiler._refused)
    assert compiler.find(regex("spin")) is None


def test_too_much_time_is_said(compiler, monkeypatch):
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", LITTLE)
    with pytest.raises(
        InvalidArgumentError, match=r"regex: too complex: not compiled after 0.05 s"
    ):
        compiler.compile(regex("spin"))


def test_no_process_starts_before_a_constraint_comes(compiler, monkeypatch):
    assert compiler._quick._process is None
    monkeypatch.setattr(grammar, "QUICK_SECONDS", PLENTY)
    compiler.compile(regex("a"), is_slow=False)
    assert compiler._quick._process is not None
    assert compiler._slow._process is None
