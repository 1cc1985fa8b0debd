"""Drives the scheduler with a worker group: commands out, results in, deadlines on time.

Event-driven: a result, a new request, a cancel or a deadline plans the next commands at once. There
is no polling, and no step waits for a round trip while the scheduler may run ahead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from .errors import ConstraintError, GroupError, UnavailableError, WorkerLostError
from .mask_runner import MaskRunner
from .request import Event, FinishedEvent, FinishReason, Mask, Request, TokenEvent
from .scheduler import Scheduler
from .step import ResultError, StepCommand
from .trace import StepWatch
from .worker_group import WorkerGroup

_log = logging.getLogger(__name__)

# A timer that fires so much later says that the event loop did not run.
_LATE_NS = 500_000_000
# Shortest timer; an event loop may fire a little early, and then looks again.
_MIN_TIMER_S = 0.001


class SilenceWatch:
    """Calls on_silence(seconds) once nothing was heard for timeout_s while something was due."""

    def __init__(self, timeout_s: float, on_silence: Callable[[float], None]) -> None:
        self._timeout_s = timeout_s
        self._on_silence = on_silence
        # When the last result came, or the first became due; None: nothing is due.
        self._since_ns: int | None = None
        self._due_ns = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def silence_ns(self) -> int:
        """0 when nothing is due."""
        return 0 if self._since_ns is None else time.monotonic_ns() - self._since_ns

    def expect(self) -> None:
        """Something is due from now on, if it was not before."""
        if self._since_ns is None:
            self._since_ns = time.monotonic_ns()
        if self._timer is None:
            self._arm(self._timeout_s)

    def heard(self, more_is_due: bool) -> None:
        """Something came. The timer is left to run: it looks again when it fires."""
        self._since_ns = time.monotonic_ns() if more_is_due else None

    def stop(self) -> None:
        """Nothing is due any more."""
        self._since_ns = None
        self.suspend()

    def suspend(self) -> None:
        """Calls on_silence no more, until the next `expect`; the silence goes on counting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        if self._since_ns is None:
            return
        if time.monotonic_ns() - self._due_ns > _LATE_NS:
            # We stood still, not the workers: whatever they sent is read first.
            self._since_ns = time.monotonic_ns()
        silence_s = self.silence_ns / 1e9
        if silence_s >= self._timeout_s:
            self._on_silence(silence_s)
            return
        self._arm(max(_MIN_TIMER_S, self._timeout_s - silence_s))

    def _arm(self, delay_s: float) -> None:
        self._due_ns = time.monotonic_ns() + round(delay_s * 1e9)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._check)


class EngineBugError(GroupError):
    """Our own code failed; the scheduler's state is not to be trusted."""


class ServeLoop:
    """One scheduler, and the group that runs its commands while `serve` is awaited."""

    def __init__(
        self,
        scheduler: Scheduler,
        group: WorkerGroup,
        tell: Callable[[Iterable[Event]], None],
        worker_timeout_s: float,
        steps: StepWatch | None = None,
    ) -> None:
        """`tell` is given the events of requests, in order. `steps`: None where none are traced."""
        self.scheduler = scheduler
        self._group = group
        self._tell = tell
        self._steps = steps
        self._silence = SilenceWatch(worker_timeout_s, self._on_silence)
        self._masks = MaskRunner(self._on_mask)
        self._is_serving = False
        self._is_closed = False
        self._pump_is_due = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def silence_ns(self) -> int:
        """Time since the last result while one is due, a recovery included; 0 when idle."""
        return self._silence.silence_ns

    async def serve(self) -> GroupError:
        """Serves until the group is lost; returns why. EngineBugError: the scheduler is broken."""
        self._silence.stop()
        self._is_serving = True
        try:
            self._pump()
            while True:
                result = await self._group.receive()
                now_ns = time.monotonic_ns()
                if self._steps is not None:
                    self._steps.done(result, now_ns)
                events = self.scheduler.apply_result(result, now_ns)
                self._silence.heard(more_is_due=bool(self.scheduler.outstanding))
                self._advance_constraints()
                self._pump(events)
        except GroupError as error:
            return error
        except ResultError as error:
            return GroupError(f"worker 0 broke the protocol: {error}")
        except Exception as error:
            raise EngineBugError(repr(error)) from error
        finally:
            self._is_serving = False
            self._silence.suspend()

    def pump_soon(self) -> None:
        """Plans in this turn of the event loop, once for all that call."""
        if not self._pump_is_due:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump_now)

    def close(self) -> None:
        """No more timers, and nothing is planned any more."""
        self._is_closed = True
        self._masks.close()
        self._silence.stop()
        self._cancel_timer()

    def _advance_constraints(self) -> None:
        """Finds out what may follow the tokens of constrained requests that go on."""
        for request, token_ids in self.scheduler.take_sampled():
            self._masks.advance(request, token_ids)

    def _on_mask(self, request: Request, num_generated: int, mask: Mask | BaseException) -> None:
        """Its next command goes out at once, or as soon as one less is under way."""
        if self.scheduler.requests.get(request.request_id) is not request:
            return
        now_ns = time.monotonic_ns()
        if isinstance(mask, Mask):
            self._tell(self.scheduler.set_mask(request.request_id, num_generated, mask, now_ns))
        else:
            self._tell([self._failed_constraint(request, mask, now_ns)])
        self.pump_soon()

    def _failed_constraint(
        self, request: Request, cause: BaseException, now_ns: int
    ) -> FinishedEvent:
        status, message = "INTERNAL", f"the output's constraint could not be followed: {cause}"
        if isinstance(cause, ConstraintError | UnavailableError):
            # The caller's grammar or the machine, not our code.
            status, message = cause.status, str(cause)
        else:
            _log.error("a constraint failed", exc_info=cause)
        return self.scheduler.cancel(
            request.request_id, FinishReason.ERROR, now_ns, message, status
        )

    def _pump_now(self) -> None:
        self._pump_is_due = False
        if self._is_closed:
            return
        try:
            self._pump()
        except Exception as error:
            # Raised again where `serve` waits, which is the one place that handles it.
            self._group.fail(EngineBugError(repr(error)))

    def _pump(self, events: Sequence[Event] = ()) -> None:
        """Ends what is due, plans and sends a command if there is one, and tells `events`.

        Workers first: what the clients' tasks do with an event would hold up a command behind it.
        But a first token goes out before a command that the workers need not wait for.
        """
        now_ns = time.monotonic_ns()
        expired = self.scheduler.expire(now_ns)
        clients_first = self.scheduler.outstanding and any(map(_is_first_token, events))
        if self._is_serving and not clients_first:
            self._send_command(now_ns)
        self._arm_timer(now_ns)
        self._tell(events)
        self._tell(expired)
        if clients_first:
            self.pump_soon()

    def _send_command(self, now_ns: int) -> None:
        """One in a turn of the event loop: it is on its way before the next one is planned."""
        command = self.scheduler.plan_step(now_ns)
        if command is not None:
            if self._steps is not None and self._steps.is_wanted:
                self._steps.sent(command, self._request_ids(command), time.monotonic_ns())
            self._group.send(command)
            self._silence.expect()
            if self.scheduler.may_run_ahead:
                self.pump_soon()
        if self.scheduler.is_empty and not self.scheduler.outstanding:
            self.scheduler.check_integrity()

    def _request_ids(self, command: StepCommand) -> list[str]:
        return [self.scheduler.seats[row.slot].request.request_id for row in command.rows]

    def _arm_timer(self, now_ns: int) -> None:
        self._cancel_timer()
        # Without workers nothing is planned, and the scheduler may wait for masks for ever.
        held_until_ns = self.scheduler.held_until_ns if self._is_serving else None
        times = (self.scheduler.next_deadline_ns, held_until_ns)
        due_ns = min((time_ns for time_ns in times if time_ns is not None), default=None)
        if due_ns is not None:
            delay_s = max(_MIN_TIMER_S, (due_ns - now_ns) / 1e9)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self.pump_soon)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_silence(self, silence_s: float) -> None:
        self._group.fail(
            WorkerLostError(0, f"no result for {silence_s:.1f} s while a step is due on all ranks")
        )


def _is_first_token(event: Event) -> bool:
    return isinstance(event, TokenEvent) and event.first_index == 0
