"""The workers over all their lives: spawned (if we own them), configured, warmed up, torn down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .engine_types import EngineConfig, EngineInfo, LoadProgress
from .group_errors import GroupError, WorkerLostError
from .step import StepCommand, StepResult
from .supervisor import Supervisor, worker_command
from .warm_up import warm_up_commands
from .worker_pool import WorkerPool

_log = logging.getLogger(__name__)

# A stream breaks a moment before its process is known to have ended; the process says more.
_EXIT_REPORT_S = 1.0

T = TypeVar("T")


class WorkerGroup:
    """At most one configured group at a time; each `start` is a new epoch."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[LoadProgress], None],
        supervisor: Supervisor | None = None,
    ) -> None:
        """`supervisor` replaces the usual one, of `python -m worker` processes."""
        self._config = config
        self._on_progress = on_progress
        self._pool: WorkerPool | None = None
        self._supervisor = supervisor
        if supervisor is None and not config.worker_addresses:
            command = worker_command(config.model_dir, config.world_size, config.num_threads)
            self._supervisor = Supervisor(config.world_size, command)

    @property
    def spawns(self) -> bool:
        """Whether the workers are our own processes."""
        return self._supervisor is not None

    async def start(self, epoch: int) -> EngineInfo:
        """Ends what runs, and brings the group up as far as a real step on all ranks.

        GroupError when it fails; SetupError when another try would not mend it.
        """
        await self._close_pool()
        addresses = self._config.worker_addresses
        if self._supervisor is not None:
            addresses = await self._supervisor.spawn()
        self._pool = WorkerPool(self._config, addresses, epoch)
        return await self._unless_worker_exits(self._configure_and_warm_up(self._pool, epoch))

    def send(self, command: StepCommand) -> None:
        self._started_pool().send(command)

    async def receive(self) -> StepResult:
        """As WorkerPool.receive."""
        return await self._started_pool().receive()

    def fail(self, error: GroupError) -> None:
        """Makes `receive` raise this error."""
        self._started_pool().fail(error)

    async def close(self) -> None:
        """Ends the streams and the spawned processes."""
        await self._close_pool()
        if self._supervisor is not None:
            await self._supervisor.stop()

    async def _configure_and_warm_up(self, pool: WorkerPool, epoch: int) -> EngineInfo:
        info = await pool.connect(self._on_progress, self._config.connect_timeout_s)
        for command in warm_up_commands(epoch, info.geometry.max_seq_len):
            pool.send(command)
            try:
                async with asyncio.timeout(self._config.worker_timeout_s):
                    await pool.receive()
            except TimeoutError:
                raise WorkerLostError(
                    0, f"no result of the warm-up step for {self._config.worker_timeout_s:g} s"
                ) from None
        return info

    async def _unless_worker_exits(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result; WorkerExitError, with its words, when a process of ours ends."""
        if self._supervisor is None:
            return await work
        task = asyncio.create_task(work)
        exit_report = asyncio.create_task(self._supervisor.wait_exit())
        try:
            await asyncio.wait({task, exit_report}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and isinstance(task.exception(), WorkerLostError):
                await asyncio.wait({exit_report}, timeout=_EXIT_REPORT_S)
            if exit_report.done():
                raise exit_report.result()
            return task.result()
        finally:
            task.cancel()
            exit_report.cancel()
            await asyncio.gather(task, exit_report, return_exceptions=True)

    async def _close_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    def _started_pool(self) -> WorkerPool:
        assert self._pool is not None, "the group is not started"
        return self._pool
