"""Two threads: commands are begun while earlier ones run, calls wait for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from worker.batch import StepCommand, StepResult
from worker.errors import StepError
from worker.pipeline import Pipeline

TIMEOUT_S = 60.0


class SlowExecutor:
    """Commands are collected once `done` is set; notes what happened, in order."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.begun = threading.Semaphore(0)
        self.log: list[str] = []

    def submit(self, command: StepCommand) -> StepCommand:
        self.log.append(f"begun {command.step_id}")
        self.begun.release()
        if command.num_steps == 0:
            raise StepError("no steps")
        return command

    def collect(self, command: StepCommand) -> StepResult:
        assert self.done.wait(TIMEOUT_S)
        self.log.append(f"collected {command.step_id}")
        if command.num_steps > 1:
            raise StepError("too many steps")
        return StepResult(1, command.step_id, 0, (), 1)


@pytest.fixture
def executor() -> Any:
    return SlowExecutor()


@pytest.fixture
def pipeline(executor: SlowExecutor) -> Iterator[Pipeline]:
    pipeline = Pipeline()
    yield pipeline
    executor.done.set()
    pipeline.shutdown()


def step(step_id: int, num_steps: int = 1) -> StepCommand:
    return StepCommand(1, step_id, num_steps, ())


def read(executor: Any, step_id: int) -> Callable[[], Any]:
    return lambda: (executor, step(step_id))


def test_a_call_waits_until_all_commands_before_it_are_collected(
    executor: Any, pipeline: Pipeline
) -> None:
    results = [pipeline.run(read(executor, number)) for number in (1, 2)]
    called = pipeline.call(executor.log.append, "called")
    for _ in results:
        assert executor.begun.acquire(timeout=TIMEOUT_S)
    assert executor.log == ["begun 1", "begun 2"]
    assert not called.done()
    executor.done.set()
    called.result(TIMEOUT_S)
    assert executor.log[2:] == ["collected 1", "collected 2", "called"]
    assert [result.result(TIMEOUT_S).step_id for result in results] == [1, 2]


def test_errors_are_those_of_their_own_call(executor: Any, pipeline: Pipeline) -> None:
    executor.done.set()
    with pytest.raises(StepError, match="no steps"):
        pipeline.run(lambda: (executor, step(1, 0))).result(TIMEOUT_S)
    with pytest.raises(StepError, match="too many steps"):
        pipeline.run(lambda: (executor, step(2, 2))).result(TIMEOUT_S)
    with pytest.raises(ZeroDivisionError):
        pipeline.run(lambda: (executor, step(3 // 0))).result(TIMEOUT_S)
    with pytest.raises(ValueError, match="invalid literal"):
        pipeline.call(int, "x").result(TIMEOUT_S)
    assert pipeline.run(lambda: (executor, step(3))).result(TIMEOUT_S).step_id == 3


def test_what_is_cancelled_in_time_is_not_begun(executor: Any, pipeline: Pipeline) -> None:
    began, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        assert go_on.wait(TIMEOUT_S)

    executor.done.set()
    held = pipeline.call(hold)
    assert began.wait(TIMEOUT_S)
    late = [pipeline.run(lambda: (executor, step(1))), pipeline.call(executor.log.append, "called")]
    assert [future.cancel() for future in late] == [True, True]
    go_on.set()
    held.result(TIMEOUT_S)
    assert pipeline.run(lambda: (executor, step(2))).result(TIMEOUT_S).step_id == 2
    assert executor.log == ["begun 2", "collected 2"]


def test_shutdown_waits_for_what_is_under_way(executor: Any) -> None:
    pipeline = Pipeline()
    result = pipeline.run(lambda: (executor, step(1)))
    threading.Timer(0.05, executor.done.set).start()
    pipeline.shutdown()
    assert result.done()
