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

        def after_results() -> T:
            self._results.submit(lambda: None).result()
            return function(*arguments)

        return self._steps.submit(after_results)

    def run(self, executor: Callable[[], Executor], command: StepCommand) -> Future[StepResult]:
        """The result of a command; a cancelled one is not begun."""
        future: Future[StepResult] = Future()
        self._steps.submit(self._begin, executor, command, future)
        return future

    def shutdown(self) -> None:
        """Ends both threads once they are idle."""
        self._steps.shutdown()
        self._results.shutdown()

    def _begin(
        self,
        executor: Callable[[], Executor],
        command: StepCommand,
        future: Future[StepResult],
    ) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            present = executor()
            submitted = present.submit(command)
        except Exception as error:
            future.set_exception(error)
            return
        self._results.submit(_collect, present, submitted, future)


def _collect(executor: Executor, submitted: Submitted, future: Future[StepResult]) -> None:
    try:
        future.set_result(executor.collect(submitted))
    except Exception as error:
        future.set_exception(error)
