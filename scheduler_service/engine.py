"""The async shell around the scheduler: workers, requests and time.

One task brings the group up, then receives results for ever; `submit` and timers plan in between.
Everything runs on one event loop, and nothing that a client does can make it wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from .engine_types import (
    EngineConfig,
    EngineFailedError,
    EngineInfo,
    EngineState,
    Load,
    LoadProgress,
    RankLoad,
)
from .errors import GroupError, UnavailableError, UnknownRequestError
from .limits import Counters
from .logs import about
from .request import FinishReason, Request, call_id_of, failed_event
from .request_stream import RequestStream, RequestStreams
from .scheduler import Scheduler
from .serve_loop import EngineBugError, ServeLoop
from .slots import SlotView
from .trace import StepWatch
from .worker_group import NUM_WARM_UP_STEPS, GroupStarter, WorkerGroup

_log = logging.getLogger(__name__)

_REFUSALS = {
    EngineState.STARTING: "the server is starting; retry when it is ready",
    EngineState.DOWN: "the workers are lost and have not come back; retry later or elsewhere",
    EngineState.DRAINING: "the server is shutting down; go elsewhere",
    EngineState.STOPPED: "the server has stopped; go elsewhere",
}


class Engine:
    """Owns the scheduler, the workers' streams and, when it spawns them, the worker processes.

    All methods run on the event loop that called `start`. The plain ones return at once.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_state: Callable[[EngineState], None],
        on_progress: Callable[[LoadProgress], None],
        group: WorkerGroup | None = None,
        steps: StepWatch | None = None,
    ) -> None:
        """on_state is called on the loop at each change, on_progress while workers load; neither
        may block or raise. The first state, STARTING, is not reported. `group` is for tests.
        `steps`: None where none are traced."""
        self._config = config
        self._on_state = on_state
        self._steps = steps
        self._group = group or WorkerGroup(config, on_progress)
        self._starter = GroupStarter(self._group)
        self._state = EngineState.STARTING
        self._loop: ServeLoop | None = None
        self._streams = RequestStreams()
        self._ready = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._num_recoveries = 0
        # From the loss of the group until it serves again.
        self._lost_ranks: frozenset[int] = frozenset()

    @property
    def state(self) -> EngineState:
        return self._state

    @staticmethod
    def now_ns() -> int:
        """The clock of Request.arrival_ns and deadline_ns (monotonic)."""
        return time.monotonic_ns()

    async def start(self) -> None:
        """Spawns (if so configured), configures and warms up the workers; returns when READY.

        Keeps trying while workers cannot be reached. EngineFailedError: a fault that stays, with
        the worker's own words. Cancelling it (or calling `stop`) gives up cleanly.
        """
        self._main = asyncio.create_task(self._run(), name="engine")
        self._main.add_done_callback(self._on_main_end)
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({self._main, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.is_set():
                await self._main
        except BaseException:
            stopped = self._state is EngineState.STOPPED
            await self.stop()
            if stopped:
                raise EngineFailedError("stopped before it was ready") from None
            raise
        finally:
            ready.cancel()

    def info(self) -> EngineInfo:
        """UnavailableError before the first group is configured."""
        if self._starter.info is None:
            raise UnavailableError(_REFUSALS[EngineState.STARTING])
        return self._starter.info

    def submit(self, requests: Sequence[Request]) -> RequestStream:
        """Queues the answers to a validated call (prompt + max_new_tokens fits
        geometry.max_seq_len), all or none; the stream brings the events of all.

        DuplicateRequestError, QueueFullError, or UnavailableError (starting, draining, down);
        InvalidArgumentError when so many answers, or such a constraint, can never be.
        """
        refusal = _REFUSALS.get(self._state)
        if refusal is not None:
            raise UnavailableError(refusal)
        loop = self._started_loop()
        queue_position = loop.scheduler.submit(requests)
        loop.pump_soon()
        return self._streams.open(requests, queue_position)

    def resume(self, requests: Sequence[Request], stream: RequestStream) -> None:
        """Goes on with requests of a former life, from the tokens that they have; events go to
        the stream. Errors as of `submit`, but for the bounds of the queue, which were kept then."""
        refusal = _REFUSALS.get(self._state)
        if refusal is not None:
            raise UnavailableError(refusal)
        loop = self._started_loop()
        ended = loop.scheduler.resume(requests, self.now_ns())
        self._streams.add(requests, stream)
        self._streams.tell(ended)
        loop.pump_soon()

    def redirect(self, stream: RequestStream) -> None:
        """Events of the stream's call go to it from now on, in its former stream's place."""
        self._streams.redirect(stream)

    def cancel(self, call_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ends all answers to a call, in whatever phase; its stream gets their FinishedEvents at
        once.

        UnknownRequestError when none of that id waits or runs (all have ended already).
        """
        requests = [one for one in self._streams.requests() if one.call_id == call_id]
        if not requests:
            raise UnknownRequestError(f"no request of id {call_id!r} waits or runs")
        loop, now_ns = self._started_loop(), self.now_ns()
        for request in requests:
            self._streams.tell([loop.scheduler.cancel(request.request_id, reason, now_ns)])
        loop.pump_soon()

    def stop_request(self, request: Request, num_tokens: int) -> bool:
        """A stop string was found: ends one answer with STOP and num_tokens generated tokens.

        False when it had ended by itself (its id may be another's by now): its FinishedEvent is in
        the stream. Else the stream's next FinishedEvent is this one; TokenEvents still in the
        stream before it are to be dropped.
        """
        if request not in self._streams:
            return False
        loop = self._started_loop()
        self._streams.tell([loop.scheduler.stop(request.request_id, num_tokens, self.now_ns())])
        loop.pump_soon()
        return True

    def flush(self) -> int:
        """Forgets every cached prefix; returns the tokens of free slots that were forgotten.

        UnavailableError before the first group is configured.
        """
        self.info()
        return self._started_loop().scheduler.flush()

    def load(self) -> Load:
        """UnavailableError before the first group is configured."""
        info = self.info()
        geometry = info.geometry
        loop = self._started_loop()
        scheduler = loop.scheduler
        oldest_ns = scheduler.oldest_arrival_ns
        return Load(
            state=self._state,
            epoch=info.epoch,
            ranks=tuple(RankLoad(one, one.rank not in self._lost_ranks) for one in info.workers),
            num_running=len(scheduler.seats),
            num_waiting=len(scheduler.queue),
            num_slots=geometry.num_slots,
            max_running=geometry.max_running,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_used_tokens=scheduler.num_used_tokens,
            max_total_tokens=geometry.num_slots * geometry.max_seq_len,
            num_pending_prefill_tokens=scheduler.num_pending_prefill_tokens,
            counters=scheduler.counters,
            num_recoveries=self._num_recoveries,
            engine_silence_ns=loop.silence_ns,
            oldest_waiting_ns=0 if oldest_ns is None else self.now_ns() - oldest_ns,
        )

    def slots(self) -> list[SlotView]:
        """All slots in order of index; empty before the first group is configured."""
        return [] if self._loop is None else self._loop.scheduler.slot_views()

    async def drain(self, grace_s: float) -> None:
        """State DRAINING: refuses new requests, waits until the accepted ones have ended, at most
        grace_s; ends the rest with ERROR / UNAVAILABLE."""
        self._set_state(EngineState.DRAINING)
        try:
            async with asyncio.timeout(grace_s):
                await self._streams.wait_all_ended()
        except TimeoutError:
            _log.warning("%d requests outlived the grace of %g s", len(self._streams), grace_s)
        self._end(self._streams.requests(), "the server shut down before the request had finished")

    async def stop(self) -> None:
        """Ends every request with ERROR / UNAVAILABLE, closes the streams, ends spawned workers.

        State STOPPED. May be called in any state, also during `start` and `drain`, and twice.
        """
        self._set_state(EngineState.STOPPED)
        self._end(self._streams.requests(), "the server has stopped")
        if self._main is not None:
            self._main.cancel()
            await asyncio.wait({self._main})
        if self._loop is not None:
            self._loop.close()
        if self._preparing is not None:
            # What it has begun to start is ended below.
            await asyncio.wait({self._preparing})
        await self._group.close()

    async def _run(self) -> None:
        info = await self._starter.first_start()
        self._loop = self._new_loop(info, None)
        while True:
            self._loop.scheduler.rebuild(self._starter.epoch, NUM_WARM_UP_STEPS + 1)
            self._set_state(EngineState.READY)
            self._ready.set()
            device = self.info().workers[0].device
            self._preparing = asyncio.create_task(self._group.prepare(device))
            await self._recover(await self._serve(self._loop))

    def _on_main_end(self, main: asyncio.Task[None]) -> None:
        """The main task ends only by `stop`, by a failed start, or by a bug."""
        if main.cancelled() or not self._ready.is_set():
            return
        _log.critical("the engine's task failed, nothing is served", exc_info=main.exception())
        self._set_state(EngineState.DOWN)
        self._abandon(self._started_loop())

    async def _serve(self, loop: ServeLoop) -> GroupError:
        """Serves until the group is lost; returns why."""
        try:
            cause = await loop.serve()
        except EngineBugError as error:
            cause = error
        if isinstance(cause, EngineBugError):
            _log.error("the engine failed, all requests end INTERNAL", exc_info=cause)
            self._abandon(loop)
            self._loop = self._new_loop(self.info(), loop.scheduler.counters)
        return cause

    async def _recover(self, cause: GroupError) -> None:
        """Brings the group up under a new epoch; requests wait, up to a bound."""
        self._set_state(EngineState.RECOVERING)
        self._lost_ranks = self._group.lost_ranks(cause)
        _log.error("the worker group is lost: %s", cause)
        for end in self._started_loop().scheduler.lose_group(self.now_ns()):
            call_id = call_id_of(end.request_id)
            message = "request %r is given up, the workers died of it twice"
            _log.error(message, end.request_id, extra=about(call_id))
            self._streams.tell([end])
        clock = asyncio.get_running_loop()
        give_up = clock.call_later(self._config.recovery_timeout_s, self._give_up)
        try:
            await self._starter.restart()
        finally:
            give_up.cancel()
        self._num_recoveries += 1
        self._lost_ranks = frozenset()
        _log.info("the worker group is back, epoch %d", self._starter.epoch)

    def _give_up(self) -> None:
        self._set_state(EngineState.DOWN)
        bound_s = self._config.recovery_timeout_s
        message = f"the workers have not come back within {bound_s:g} s"
        self._end(self._streams.requests(), message)

    def _new_loop(self, info: EngineInfo, counters: Counters | None) -> ServeLoop:
        limits = self._config.limits(info.geometry)
        scheduler = Scheduler(limits, counters)
        timeout_s = self._config.worker_timeout_s
        return ServeLoop(scheduler, self._group, self._streams.tell, timeout_s, self._steps)

    def _abandon(self, broken: ServeLoop) -> None:
        """Ends all requests INTERNAL without asking a scheduler that is not to be trusted."""
        broken.close()
        message = "the engine failed; see the server's log"
        for request in self._streams.requests():
            broken.scheduler.counters.count_end(FinishReason.ERROR)
            self._streams.tell([failed_event(request, self.now_ns(), message)])

    def _end(self, requests: list[Request], message: str) -> None:
        """Ends requests UNAVAILABLE."""
        for request in requests:
            scheduler, error = self._started_loop().scheduler, FinishReason.ERROR
            now_ns = self.now_ns()
            event = scheduler.cancel(request.request_id, error, now_ns, message, "UNAVAILABLE")
            self._streams.tell([event])

    def _set_state(self, state: EngineState) -> None:
        """Draining and stopping are for good, whatever becomes of the workers meanwhile."""
        if self._state is EngineState.STOPPED or state is self._state:
            return
        if self._state is EngineState.DRAINING and state is not EngineState.STOPPED:
            return
        self._state = state
        self._on_state(state)

    def _started_loop(self) -> ServeLoop:
        assert self._loop is not None, "the engine is not started"
        return self._loop
