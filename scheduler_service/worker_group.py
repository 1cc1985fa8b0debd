"""The workers over all their lives: spawned or found, configured, warmed up, torn down."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from .engine_types import EngineConfig, EngineFailedError, EngineInfo, LoadProgress
from .errors import GroupError, SetupError, WorkerLostError
from .slots import WARM_UP_GENERATION
from .step import DecodeRow, PrefillChunk, SlotSetup, StepCommand, StepResult
from .supervisor import Supervisor, standby_command, worker_command
from .tls import worker_credentials
from .told_workers import Places, ToldWorkers
from .worker_link import answers
from .worker_pool import WorkerPool, warn_of_plain_links

NUM_WARM_UP_STEPS = 2

_log = logging.getLogger(__name__)

# A stream breaks a moment before its process is known to have ended; the process says more.
_EXIT_REPORT_S = 1.0
# For a process to say that it lives; its event loop has nothing else to do.
_ANSWER_S = 2.0
# Between tries to bring the group up.
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_MAX_FIRST_TRIES = 3
# Tries with the processes that are left; the next ones have new ones.
_NUM_TRIES_WITH_SURVIVORS = 2

T = TypeVar("T")


def warm_up_commands(epoch: int, max_seq_len: int) -> tuple[StepCommand, StepCommand]:
    """Prefills one token in slot 0 and decodes another.

    A slot's tenants have higher generations, so the slot need not be cleaned.
    """
    setup = SlotSetup(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=0,
        end_token_ids=(),
        max_len=min(3, max_seq_len),
    )
    chunk = PrefillChunk(0, WARM_UP_GENERATION, 0, (0,), sample=True, setup=setup)
    decode = DecodeRow(0, WARM_UP_GENERATION)
    return (StepCommand(epoch, 1, 1, (chunk,)), StepCommand(epoch, 2, 1, (decode,)))


class WorkerGroup:
    """At most one configured group at a time; each `start` is a new epoch."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[LoadProgress], None],
        supervisor: Supervisor | None = None,
        told: ToldWorkers | None = None,
    ) -> None:
        """`supervisor` replaces the usual one, of `python -m worker` processes, and `told` the one
        that reads standard input. ConfigError when the files of workers_tls are not good."""
        self._config = config
        self._on_progress = on_progress
        self._credentials = worker_credentials(config.workers_tls) if config.workers_tls else None
        self._pool: WorkerPool | None = None
        self._told = told
        self._telling: asyncio.Task[None] | None = None
        # Where told workers were last.
        self._dialled: tuple[str, ...] = ()
        self._following: asyncio.Task[None] | None = None
        if told is None and config.workers_are_told:
            self._told = ToldWorkers(config.world_size)
            self._telling = asyncio.create_task(self._told.read(sys.stdin), name="told workers")
        self._supervisor = supervisor
        if supervisor is None and config.spawns:
            command = worker_command(
                config.model_dir, config.world_size, config.num_threads, config.device
            )
            self._supervisor = Supervisor(config.world_size, command, standby_command())

    @property
    def spawns(self) -> bool:
        """Whether the workers are our own processes."""
        return self._supervisor is not None

    async def start(self, epoch: int, afresh: bool = False) -> EngineInfo:
        """Ends what runs, and brings the group up as far as a real step on all ranks.

        Processes of ours that can go on do, with their weights; not if `afresh`. GroupError when it
        fails; SetupError when another try would not mend it.
        """
        lost = {} if self._pool is None else self._pool.ranks_at_fault()
        await self._close_pool()
        if self._supervisor is not None:
            if afresh:
                lost = dict.fromkeys(range(self._config.world_size), "earlier tries failed")
            return await self._start_spawned(self._supervisor, lost, epoch)
        if self._told is not None:
            return await self._start_told(self._told, epoch)
        self._pool = WorkerPool(
            self._config, self._config.worker_addresses, epoch, self._credentials
        )
        return await self._configure_and_warm_up(self._pool, epoch)

    async def prepare(self, device: str) -> None:
        """For the next loss, while requests run. `device`: of the first rank."""
        num_standby = self._config.num_standby_workers
        if num_standby is None:
            # There the start of a rank is mostly that of its libraries, and memory is plenty.
            num_standby = int(device.startswith("cuda"))
        if self._supervisor is not None and num_standby:
            await self._supervisor.prepare(num_standby)

    def send(self, command: StepCommand) -> None:
        self._started_pool().send(command)

    async def receive(self) -> StepResult:
        """As WorkerPool.receive."""
        return await self._started_pool().receive()

    def fail(self, error: GroupError) -> None:
        """Makes `receive` raise this error."""
        self._started_pool().fail(error)

    def lost_ranks(self, cause: GroupError) -> frozenset[int]:
        """Those that the group was lost by, as far as is known; all where it is not."""
        at_fault = {} if self._pool is None else self._pool.ranks_at_fault()
        if not at_fault and isinstance(cause, WorkerLostError):
            return frozenset({cause.rank})
        return frozenset(at_fault or range(self._config.world_size))

    async def close(self) -> None:
        """Ends the streams and the spawned processes."""
        await self._close_pool()
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        if self._supervisor is not None:
            await self._supervisor.stop()

    async def _start_spawned(
        self, supervisor: Supervisor, lost: dict[int, str], epoch: int
    ) -> EngineInfo:
        lost |= await self._silent_ranks(supervisor, lost)
        addresses = await supervisor.spawn(lost)
        self._pool = WorkerPool(self._config, addresses, epoch, self._credentials)
        work = self._configure_and_warm_up(self._pool, epoch)
        return await _unless(supervisor.wait_exit(), work)

    async def _start_told(self, told: ToldWorkers, epoch: int) -> EngineInfo:
        places = await told.all_known()
        if self._config.workers_tls is None:
            warn_of_plain_links([one for one in places.known() if one not in self._dialled])
        self._dialled = places.known()
        config = self._config
        if places.rendezvous_address:
            config = replace(config, rendezvous_address=places.rendezvous_address)
        self._pool = WorkerPool(config, places.known(), epoch, self._credentials)
        info = await _unless(told.moved(places), self._configure_and_warm_up(self._pool, epoch))
        self._following = asyncio.create_task(_fail_once_moved(self._pool, told, places))
        return info

    async def _configure_and_warm_up(self, pool: WorkerPool, epoch: int) -> EngineInfo:
        info = await pool.connect(self._on_progress, self._config.connect_timeout_s)
        for command in warm_up_commands(epoch, info.geometry.max_seq_len):
            pool.send(command)
            try:
                async with asyncio.timeout(self._config.worker_timeout_s):
                    await pool.receive()
            except TimeoutError:
                error = WorkerLostError(
                    0, f"no result of the warm-up step for {self._config.worker_timeout_s:g} s"
                )
                pool.fail(error)
                raise error from None
        return info

    async def _silent_ranks(self, supervisor: Supervisor, lost: dict[int, str]) -> dict[int, str]:
        """Processes that listen and do not answer: stopped or wedged ones, and why they must go."""
        asked = {
            rank: address for rank, address in supervisor.listening().items() if rank not in lost
        }
        found = await asyncio.gather(*(answers(address, _ANSWER_S) for address in asked.values()))
        why = f"it does not answer within {_ANSWER_S:g} s"
        return {rank: why for rank, is_heard in zip(asked, found, strict=True) if not is_heard}

    async def _close_pool(self) -> None:
        if self._following is not None:
            self._following.cancel()
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    def _started_pool(self) -> WorkerPool:
        assert self._pool is not None, "the group is not started"
        return self._pool


async def _unless(loss: Coroutine[Any, Any, GroupError], work: Coroutine[Any, Any, T]) -> T:
    """The work's result; the loss, as an error with its words, when a worker ends or moves."""
    task = asyncio.create_task(work)
    report = asyncio.create_task(loss)
    try:
        await asyncio.wait({task, report}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and isinstance(task.exception(), WorkerLostError):
            await asyncio.wait({report}, timeout=_EXIT_REPORT_S)
        if report.done():
            raise report.result()
        return task.result()
    finally:
        task.cancel()
        report.cancel()
        await asyncio.gather(task, report, return_exceptions=True)


async def _fail_once_moved(pool: WorkerPool, told: ToldWorkers, places: Places) -> None:
    """A machine that vanished closes nothing; who told of it knows sooner than the stream."""
    pool.fail(await told.moved(places))


class GroupStarter:
    """Knows the epoch in use and what the group reported. Each try is a new epoch."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        # Workers that outlive us have seen epochs of our former lives; the clock is above them.
        self.epoch = 0 if group.spawns else int(time.time())
        self.info: EngineInfo | None = None

    async def first_start(self) -> EngineInfo:
        """Tries until the group is up; EngineFailedError for a fault that stays.

        Workers that are not ours may come later than we do, so those are tried for ever.
        """
        num_tries = 0
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                return await self._try(num_tries)
            except SetupError as error:
                raise EngineFailedError(str(error)) from error
            except GroupError as error:
                num_tries += 1
                if self._group.spawns and num_tries == _MAX_FIRST_TRIES:
                    raise EngineFailedError(f"{error} (try {num_tries})") from error
                _log.warning("the workers are not up yet: %s", error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    async def restart(self) -> EngineInfo:
        """Tries until the group is up again, with the same geometry and weights."""
        num_tries = 0
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                return await self._try(num_tries)
            except GroupError as error:
                num_tries += 1
                _log.warning("the workers are not back yet: %s", error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    async def _try(self, num_earlier: int) -> EngineInfo:
        self.epoch += 1
        afresh = num_earlier >= _NUM_TRIES_WITH_SURVIVORS
        info = await self._group.start(self.epoch, afresh)
        if self.info is not None and info.geometry != self.info.geometry:
            raise SetupError(
                f"the workers came back as {info.geometry}, they were {self.info.geometry}; "
                "restart the server to serve another model"
            )
        self.info = info
        return info
