"""Commands through an executor on two threads: begun on one, collected on the other, in order.

So the next command reaches the device while the last one still runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from worker.batch import StepCommand, StepResult
from worker.executor import Executor

T = TypeVar("T")


class _Line:
    """A thread that makes calls in order, which must not raise.

    A call begins in two thirds of the time a ThreadPoolExecutor takes, and is added in a third.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        # A process that fails before `end` does not wait for it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        """Adds a call; none is made after `end`."""
        self._calls.put(call)

    def end(self) -> None:
        """Waits for the calls so far, and ends the thread."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class Pipeline:
    """The step thread, on which a rank lives, and the thread that waits for its results."""

    def __init__(self) -> None:
        self._steps = _Line("step")
        self._results = _Line("result")

    def call(self, function: Callable[..., T], *arguments: object) -> Future[T]:
        """Calls a function on the step thread once all commands before it have been collected."""
        future: Future[T] = Future()

        def when_collected() -> None:
            collected = threading.Event()
            self._results.put(collected.set)
            collected.wait()
            if future.set_running_or_notify_cancel():
                _set_outcome(future, function, *arguments)

        self._steps.put(when_collected)
        return future

    def run(self, read: Callable[[], tuple[Executor, StepCommand]]) -> Future[StepResult]:
        """The result of the command that `read` gives on the step thread, with its executor.

        A cancelled one is not begun.
        """
        future: Future[StepResult] = Future()
        self._steps.put(lambda: self._begin(read, future))
        return future

    def shutdown(self) -> None:
        """Ends both threads once they are idle."""
        self._steps.end()
        self._results.end()

    def _begin(
        self, read: Callable[[], tuple[Executor, StepCommand]], future: Future[StepResult]
    ) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            executor, command = read()
            submitted = executor.submit(command)
        except Exception as error:
            future.set_exception(error)
            return
        self._results.put(lambda: _set_outcome(future, executor.collect, submitted))


def _set_outcome(future: Future[T], function: Callable[..., T], *arguments: object) -> None:
    try:
        future.set_result(function(*arguments))
    except Exception as error:
        future.set_exception(error)
