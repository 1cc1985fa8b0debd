"""Whose constraint is compiled when: the slow hold up nobody but each other."""

from __future__ import annotations

import asyncio
import threading

import pytest

from scheduler_service.constraints import Constraints
from scheduler_service.errors import InvalidArgumentError, UnavailableError
from scheduler_service.generate_call import ConstraintSpec
from scheduler_service.grammar_trial import OutOfTimeError
from scheduler_service.request import Mask, Request, Sampling


class FakeCompiler:
    """Compiles at once, but "slow" ones when `go_on` is set."""

    def __init__(self):
        self.go_on = threading.Event()
        self.begun = threading.Event()
        self.compiled = []
        self.known = set()
        self.is_stopped = self.is_closed = False

    def find(self, spec, *, at_text_start):
        if spec.source.startswith("refused"):
            raise InvalidArgumentError(spec.kind, "was refused before")
        return self if spec.source in self.known else None

    def compile(self, spec, *, at_text_start, is_slow=True):
        if "slow" in spec.source:
            if not is_slow:
                raise OutOfTimeError
            self.begun.set()
            assert self.go_on.wait(60)
        self.compiled.append(spec.source)
        return self

    def constraint(self, end_token_ids, min_new_tokens):
        return self

    def advance(self, token_ids):
        return Mask(b"\x01", False)

    def stop(self):
        self.is_stopped = True

    def close(self):
        self.is_closed = True
        self.go_on.set()


@pytest.fixture
def compiler():
    return FakeCompiler()


@pytest.fixture
def constraints(compiler):
    made = Constraints(compiler)
    yield made
    made.close()


def request():
    return Request("r", (1,), Sampling(0.0, 1.0, 0, 0.0, 0), 4, frozenset(), 0)


def asked(constraints, source):
    spec = ConstraintSpec("regex", source)
    return asyncio.ensure_future(constraints.constrain(spec, [request()], at_text_start=False))


async def begun(compiler):
    assert await asyncio.to_thread(compiler.begun.wait, 60)


async def test_the_quick_overtake_the_slow(constraints, compiler):
    slow = [asked(constraints, f"slow {i}") for i in range(4)]
    await begun(compiler)
    await asked(constraints, "quick")
    assert compiler.compiled == ["quick"]
    compiler.go_on.set()
    await asyncio.gather(*slow)
    assert compiler.compiled == ["quick", *(f"slow {i}" for i in range(4))]


async def test_what_is_known_waits_for_nobody(constraints, compiler):
    compiler.known.add("known")
    slow = asked(constraints, "slow")
    await begun(compiler)
    # Whoever would take a turn waits for the one who has the quick ones' thread.
    constraints._quick.submit(compiler.go_on.wait, 60)
    await asked(constraints, "known")
    with pytest.raises(InvalidArgumentError, match="was refused before"):
        await asked(constraints, "refused")
    assert compiler.compiled == []
    compiler.go_on.set()
    await slow


async def test_who_went_away_is_not_compiled(constraints, compiler):
    first = asked(constraints, "slow 0")
    await begun(compiler)
    gone = asked(constraints, "slow 1")
    last = asked(constraints, "slow 2")
    # Both have been in the quick ones' thread.
    await asked(constraints, "quick")
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    compiler.go_on.set()
    await asyncio.gather(first, last)
    assert compiler.compiled == ["quick", "slow 0", "slow 2"]


@pytest.mark.parametrize("is_known", [False, True])
async def test_without_a_thread_constraints_are_unavailable(
    constraints, compiler, monkeypatch, is_known
):
    def start(_):
        raise RuntimeError("can't start new thread")

    compiler.known.update(["a"] * is_known)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(UnavailableError, match="now: can't start new thread; try again later"):
            await asked(constraints, "a")


async def test_stopping_stops_the_compiler(constraints, compiler):
    constraints.stop()
    assert compiler.is_stopped
    assert not compiler.is_closed
    Constraints(None, "none").stop()


async def test_closing_closes_the_compiler(constraints, compiler):
    constraints.close()
    assert compiler.is_closed
    Constraints(None, "none").close()
