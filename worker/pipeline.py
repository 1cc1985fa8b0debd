"""Commands through an executor on two threads: begun on one, collected on the other, in order.

So the next command reaches the device while the last one still runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from worker.batch import StepCommand, StepResult
from worker.executor import Executor, Submitted

T = TypeVar("T")


class Pipeline:
    """The step thread, on which a rank lives, and the thread that waits for its results."""

    def __init__(self) -> None:
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._results = ThreadPoolExecutor(1, thread_name_prefix="result")

    def call(self, function: Callable[..., T], *arguments: object) -> Future[T]:
        """Calls a function on the step thread once all commands before it have been collected."""

        def when_collected() -> T:
            self._results.submit(lambda: None).result()
            return function(*arguments)

        return self._steps.submit(when_collected)

    def run(self, read: Callable[[], tuple[Executor, StepCommand]]) -> Future[StepResult]:
        """The result of the command that `read` gives on the step thread, with its executor.

        A cancelled one is not begun.
        """
        future: Future[StepResult] = Future()
        self._steps.submit(self._begin, read, future)
        return future

    def shutdown(self) -> None:
        """Ends both threads once they are idle."""
        self._steps.shutdown()
        self._results.shutdown()

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
        self._results.submit(_collect, executor, submitted, future)


def _collect(executor: Executor, submitted: Submitted, future: Future[StepResult]) -> None:
    try:
        future.set_result(executor.collect(submitted))
    except Exception as error:
        future.set_exception(error)
