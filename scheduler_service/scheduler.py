"""The scheduler: who waits, who sits in which slot, what the next command is.

Pure: no I/O, no clock, no asyncio. The engine calls `expire`, `plan_step` and `apply_result`; time
comes in as an argument, on the clock of Request.arrival_ns.

Policy: first come, first served, or fair shares (request_queue.py). Each command carries a decode
row for every request whose prompt is planned, then prefill chunks (step_plan.py says whose).
Commands are planned ahead of the results (seat.py says why that is safe); a result for a slot's
former tenant is known by its generation and dropped. What a slot holds outlives its tenant
(prefix_index.py) and is reused.
After a loss of the workers those that may be its cause run one at a time (trial.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from .errors import DuplicateRequestError, UnknownRequestError
from .integrity import check_integrity
from .limits import Counters, Limits
from .prefix_plan import PrefixPlan
from .request import (
    Event,
    FinishedEvent,
    FinishReason,
    Mask,
    PromptLogprobsEvent,
    Request,
    RequestState,
    TokenEvent,
    finished_event,
)
from .request_queue import Deadlines, FairQueue, RequestQueue, ServiceTime
from .seat import Seat
from .slots import Slot, SlotTable, SlotView
from .step import Outstanding, PlannedRow, ResultError, RowResult, StepCommand, StepResult
from .step_plan import MaskWait, PrefillPace, StepPace, plan_rows
from .trial import Trial

# Message and status of a request whose row is corrupted.
_CORRUPTED = ("the model gave logits that are no numbers for this request", "INTERNAL")
# The same of one that is convicted by its trial.
_POISONED = (
    "the workers died of this request twice, it was given up; the server's log says how they died",
    "INTERNAL",
)
# The same where a constraint leaves nothing.
_DEAD_END = (
    "the output can no longer become what the constraint asks for: no token can continue it",
    "FAILED_PRECONDITION",
)


class Scheduler:
    """The only owner of the queue, of the slot table and of every request's state."""

    def __init__(self, limits: Limits, counters: Counters | None = None) -> None:
        """`counters` goes on counting from a former scheduler's."""
        self.limits = limits
        self.counters = counters or Counters()
        queue = FairQueue if limits.fair_share else RequestQueue
        self.queue = queue(limits.max_queue_len, limits.max_queued_tokens)
        self.table = SlotTable(limits.num_slots, limits.max_running)
        self.prefixes = PrefixPlan(
            limits.num_slots, limits.prefix_reuse, self.counters.prefix_cache
        )
        # By slot, in order of admission.
        self.seats: dict[int, Seat] = {}
        # Every live request, waiting or running.
        self.requests: dict[str, Request] = {}
        self.outstanding: deque[Outstanding] = deque()
        # Live answers of each call.
        self.calls: Counter[str] = Counter()
        self.trial = Trial()
        self._deadlines = Deadlines()
        self._prefill_pace = PrefillPace(limits.full_step_tokens)
        self._sampled: list[tuple[Request, tuple[int, ...]]] = []
        self._pace = StepPace(limits.run_ahead_window_ns, limits.max_steps_per_command)
        self._mask_wait = MaskWait()
        self._service_time = ServiceTime()
        self._epoch = 1
        self._next_step_id = 1

    @property
    def is_empty(self) -> bool:
        """Nothing waits and nothing runs; late results may still be due."""
        return not self.requests

    @property
    def may_run_ahead(self) -> bool:
        """One more command may be in flight."""
        return len(self.outstanding) < self.limits.max_outstanding

    @property
    def next_deadline_ns(self) -> int | None:
        """When `expire` may next have something to do; None: not before another submit."""
        return self._deadlines.next_ns

    @property
    def held_until_ns(self) -> int | None:
        """When `plan_step` plans without the masks that are missing; None: it waits for none."""
        return self._mask_wait.until_ns

    @property
    def num_used_tokens(self) -> int:
        """Positions computed in busy slots."""
        return sum(seat.num_computed for seat in self.seats.values())

    @property
    def num_pending_prefill_tokens(self) -> int:
        """Tokens accepted and not yet computed, those of waiting requests included."""
        running = sum(seat.num_pending_prefill for seat in self.seats.values())
        return self.queue.num_tokens + running

    @property
    def oldest_arrival_ns(self) -> int | None:
        """Of those that wait; None: none does."""
        return self.queue.oldest_arrival_ns

    @property
    def num_cached_tokens(self) -> int:
        """Tokens kept in free slots."""
        return sum(self.prefixes.index.num_tokens(slot) for slot in self.table.free())

    def submit(self, requests: Sequence[Request]) -> int:
        """Queues the answers to one call, all or none; returns how many wait before the first one
        beyond those that may run.

        DuplicateRequestError, QueueFullError; InvalidArgumentError when one can never run.
        """
        self._check(requests)
        self.limits.check_number(requests)
        spare, num_waiting = self.table.num_spare, len(self.queue)
        max_running = self.limits.max_running_of(requests[0])
        retry_after_s = self._service_time.retry_after_s(max_running)
        max_waiting = self.limits.max_waiting_of(requests[0])
        self.queue.push(requests, spare, retry_after_s, max_waiting)
        for request in requests:
            self._accept(request)
        return max(0, num_waiting - spare)

    def resume(self, requests: Sequence[Request], now_ns: int) -> list[Event]:
        """Queues answers to one call that a former scheduler accepted, behind those that wait and
        whatever the bounds; each goes on behind its generated_token_ids, where its first_mask is.

        Returns the ends of those whose tokens have reached it. Errors as of `submit`, but that the
        queue is never full.
        """
        self._check(requests)
        self.queue.append(requests)
        for request in requests:
            self._accept(request)
        return [end for one in requests if (end := self._end_reached(one, now_ns)) is not None]

    def _check(self, requests: Sequence[Request]) -> None:
        call_id = requests[0].call_id
        if call_id in self.calls:
            raise DuplicateRequestError(
                f"a request of id {call_id!r} waits or runs; choose another id or wait for its end"
            )
        for request in requests:
            self.limits.check(request)

    def _end_reached(self, request: Request, now_ns: int) -> FinishedEvent | None:
        tokens, mask = request.generated_token_ids, request.first_mask
        if tokens and tokens[-1] in request.end_token_ids:
            return self._finish(request, FinishReason.STOP, now_ns, matched=tokens[-1])
        if len(tokens) >= request.max_new_tokens:
            return self._finish(request, FinishReason.LENGTH, now_ns)
        if mask is not None and mask.allowed is None:
            return self._end_constrained(request, mask, now_ns)
        return None

    def _end_constrained(self, request: Request, mask: Mask, now_ns: int) -> FinishedEvent:
        if mask.is_complete:
            return self._finish(request, FinishReason.STOP, now_ns)
        return self.cancel(request.request_id, FinishReason.ERROR, now_ns, *_DEAD_END)

    def _accept(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.calls[request.call_id] += 1
        if request.deadline_ns is not None:
            self._deadlines.add(request.request_id, request.deadline_ns)
        self.counters.accepted += 1
        self.counters.num_prompt_tokens += len(request.prompt_token_ids)

    def cancel(
        self,
        request_id: str,
        reason: FinishReason,
        now_ns: int,
        message: str = "",
        status: str = "",
    ) -> FinishedEvent:
        """Ends a request at once, in whatever phase. UnknownRequestError when it has ended already.

        Its slot is free for the next command. `status` is given with reason ERROR.
        """
        return self._finish(self._live(request_id), reason, now_ns, message=message, status=status)

    def stop(self, request_id: str, num_tokens: int, now_ns: int) -> FinishedEvent:
        """Ends a request with STOP and num_tokens tokens, for its text holds a stop string.

        UnknownRequestError when it has ended already; ValueError unless num_tokens were released.
        """
        request = self._live(request_id)
        if not 0 <= num_tokens <= request.num_told:
            raise ValueError(
                f"request {request_id!r} cannot stop at {num_tokens} tokens, "
                f"{request.num_told} were released"
            )
        return self._finish(request, FinishReason.STOP, now_ns, num_generated=num_tokens)

    def set_mask(self, request_id: str, num_generated: int, mask: Mask, now_ns: int) -> list[Event]:
        """What a constrained request may sample behind its num_generated tokens.

        Nothing happens when it has ended. ValueError when it has another number of tokens.
        """
        request = self.requests.get(request_id)
        if request is None:
            return []
        if request.slot < 0 or num_generated != len(request.generated_token_ids):
            raise ValueError(
                f"request {request_id!r}: a mask for {num_generated} tokens came, "
                f"it has {len(request.generated_token_ids)}"
            )
        if mask.allowed is not None:
            seat = self.seats[request.slot]
            seat.mask, seat.mask_index = mask, num_generated
            return []
        held = self._note_told(request, self.trial.clear(request_id), now_ns)
        return [*held, self._end_constrained(request, mask, now_ns)]

    def take_sampled(self) -> list[tuple[Request, tuple[int, ...]]]:
        """Constrained requests that go on, each with tokens that it got since the last call, told
        or not: it waits for the mask behind them."""
        sampled, self._sampled = self._sampled, []
        return sampled

    def flush(self) -> int:
        """Forgets what every slot holds, also the busy ones' so far; returns the tokens of free
        slots forgotten."""
        num_tokens = self.num_cached_tokens
        self.prefixes.index.forget_all()
        return num_tokens

    def expire(self, now_ns: int) -> list[Event]:
        """Ends every request whose deadline is at or before now, and those that are to be admitted
        next and cannot have a token by then. Call it before `plan_step`."""
        ended: list[Event] = [
            self._expire(self.requests[i], now_ns) for i in self._deadlines.due(now_ns)
        ]
        while self.table.num_spare and not self.trial.is_on:
            request = self.queue.head()
            least_ns = 0 if request is None else self._hopeless_ns(request, now_ns)
            if request is None or not least_ns:
                break
            ended.append(self._end_hopeless(request, least_ns, now_ns))
        return ended

    def plan_step(self, now_ns: int) -> StepCommand | None:
        """The next command, to be sent to every rank; None when there is nothing to send now."""
        if not self.may_run_ahead:
            return None
        self._admit(now_ns)
        seats = self.trial.allowed(self.seats, self.outstanding)
        is_idle = not self.outstanding
        if self._mask_wait.holds(seats.values(), self._pace.step_ns, is_idle, now_ns):
            return None
        num_logprobs_steps = sum(step.num_logprobs_steps for step in self.outstanding)
        plan = plan_rows(seats, self.limits, self._pace, self.prefixes, num_logprobs_steps)
        if plan is None:
            return None
        command = StepCommand(self._epoch, self._next_step_id, plan.num_steps, tuple(plan.rows))
        self._next_step_id += 1
        self.outstanding.append(
            Outstanding(
                command.epoch,
                command.step_id,
                plan.num_steps,
                tuple(plan.planned),
                plan.num_prefill_tokens,
            )
        )
        return command

    def apply_result(self, result: StepResult, now_ns: int) -> list[Event]:
        """Takes the result of the oldest outstanding command; returns what its requests are told.

        ResultError, with nothing changed, when the result does not answer that command.
        """
        if not self.outstanding:
            raise ResultError(f"result of step {result.step_id} came, no command is outstanding")
        step = self.outstanding[0]
        step.check(result, self._is_stopped)
        self.outstanding.popleft()
        self._count_step(step, result)
        events: list[Event] = []
        for planned, row in zip(step.rows, result.rows, strict=True):
            seat = self._seat_of(planned)
            if seat is not None:
                events += self._apply_row(seat, planned, row, now_ns)
        return events

    def lose_group(self, now_ns: int) -> list[Event]:
        """The workers were lost; returns the end of a request that they died of twice. Call it
        before `rebuild`, once for each loss."""
        convicted = self.trial.judge(self.outstanding, self.seats)
        self.outstanding.clear()
        self.counters.poisoned += len(convicted)
        error = FinishReason.ERROR
        return [self.cancel(one.request_id, error, now_ns, *_POISONED) for one in convicted]

    def rebuild(self, epoch: int, next_step_id: int) -> None:
        """The workers start anew, with empty slots: forgets what is outstanding and what slots
        held, and prefills again every running request, in its slot, from all tokens it has."""
        self._epoch = epoch
        self._next_step_id = next_step_id
        self.outstanding.clear()
        self.prefixes.index.forget_all()
        started: list[Seat] = []
        for seat in self.seats.values():
            seat.start(self.table.renew(seat.slot).generation)
            self.prefixes.join(seat, started)
            started.append(seat)

    def slot_views(self) -> list[SlotView]:
        """All slots, in order of index."""
        return [self._slot_view(slot) for slot in self.table]

    def check_integrity(self) -> None:
        """IntegrityError, naming slot and request, when the books do not balance: a bug of ours."""
        check_integrity(self)

    def _slot_view(self, slot: Slot) -> SlotView:
        seat = self.seats.get(slot.index)
        if seat is None:
            num_cached = self.prefixes.index.num_tokens(slot.index)
            return SlotView(slot.index, slot.generation, "free", None, 0, 0, 0, num_cached)
        request = seat.request
        return SlotView(
            slot.index,
            slot.generation,
            request.state.value,
            request.call_id,
            seat.num_computed,
            len(request.prompt_token_ids),
            len(request.generated_token_ids),
            choice_index=request.choice_index,
        )

    def _live(self, request_id: str) -> Request:
        request = self.requests.get(request_id)
        if request is None:
            raise UnknownRequestError(f"no request of id {request_id!r} waits or runs")
        return request

    def _seat_of(self, planned: PlannedRow) -> Seat | None:
        seat = self.seats.get(planned.slot)
        return seat if seat is not None and seat.generation == planned.generation else None

    def _is_stopped(self, planned: PlannedRow, row: RowResult) -> bool:
        seat = self._seat_of(planned)
        return seat is None or (
            bool(row.token_ids) and row.token_ids[-1] in seat.request.end_token_ids
        )

    def _admit(self, now_ns: int) -> None:
        while self.table.num_spare and not self.trial.is_on:
            request = self.queue.head()
            # `expire` ends a hopeless one before the next plan: a command is on its way by then.
            if request is None or self._hopeless_ns(request, now_ns):
                return
            seat = self._seat(self.queue.admit(request.request_id))
            self.prefixes.join(seat, self.seats.values())
            self.seats[seat.slot] = seat
            request.slot = seat.slot
            request.admitted_ns = now_ns

    def _seat(self, request: Request) -> Seat:
        index = self.prefixes.choose_slot(self.table.free(), request)
        slot = self.table.take(index, request.request_id)
        seat = Seat(
            request,
            slot.index,
            slot.generation,
            slot.decode_row,
            mask=request.first_mask,
            mask_index=len(request.generated_token_ids),
        )
        seat.start(slot.generation)
        return seat

    def _hopeless_ns(self, request: Request, now_ns: int) -> int:
        """The least time to the first token of a request that cannot have it by its deadline; 0
        where it may."""
        if request.deadline_ns is None:
            return 0
        num_tokens = len(request.prompt_token_ids) + len(request.generated_token_ids)
        if now_ns + self._prefill_pace.least_ns(num_tokens) <= request.deadline_ns:
            return 0
        num_tokens -= self.prefixes.num_reusable(request, self.seats.values())
        least_ns = self._prefill_pace.least_ns(num_tokens)
        return least_ns if now_ns + least_ns > request.deadline_ns else 0

    def _end_hopeless(self, request: Request, least_ns: int, now_ns: int) -> FinishedEvent:
        assert request.deadline_ns is not None
        message = (
            f"not started: its prompt of {len(request.prompt_token_ids)} tokens takes at least "
            f"{least_ns / 1e9:.3g} s, and the deadline is in "
            f"{(request.deadline_ns - now_ns) / 1e9:.3g} s"
        )
        return self._finish(request, FinishReason.DEADLINE, now_ns, message=message)

    def _count_step(self, step: Outstanding, result: StepResult) -> None:
        lengths = [len(row.token_ids) for row in result.rows]
        if step.num_prefill_tokens:
            self.counters.num_steps += 1
            self.counters.sizes.note_step(step.num_prefill_tokens, sum(lengths), 1)
            self.counters.prefill_step_ns += result.duration_ns
            self._prefill_pace.observe(result.duration_ns, step.num_prefill_tokens)
            return
        num_steps = max(lengths)
        self.counters.num_steps += num_steps
        self.counters.sizes.note_step(0, sum(lengths), num_steps)
        self.counters.decode_step_ns += result.duration_ns
        # Where all slots stopped early, a worker may have run the other steps or not.
        if num_steps == step.num_steps:
            self._pace.observe(result.duration_ns, num_steps)

    def _apply_row(
        self, seat: Seat, planned: PlannedRow, row: RowResult, now_ns: int
    ) -> list[Event]:
        request = seat.request
        events = self._prompt_logprobs(seat, row)
        seat.num_computed += planned.num_filled or len(row.token_ids)
        if row.corrupted:
            self.counters.corrupted += 1
            self.prefixes.index.forget(seat.slot)
            error = FinishReason.ERROR
            return [*events, self.cancel(request.request_id, error, now_ns, *_CORRUPTED)]
        if not row.token_ids:
            return events
        first_index = len(request.generated_token_ids)
        matched = self._append_tokens(request, row.token_ids)
        self.prefixes.note_tokens(seat)
        request.state = RequestState.DECODE
        new = tuple(request.generated_token_ids[first_index:])
        event = TokenEvent(request.request_id, first_index, new, row.logprobs[: len(new)])
        at_limit = len(request.generated_token_ids) == request.max_new_tokens
        told = self.trial.release(event)
        if matched is None and not at_limit:
            if request.constraint is not None:
                self._sampled.append((request, new))
            return [*events, *self._note_told(request, told, now_ns)]
        told += self.trial.clear(request.request_id)
        events += self._note_told(request, told, now_ns)
        reason = FinishReason.LENGTH if matched is None else FinishReason.STOP
        return [*events, self._finish(request, reason, now_ns, matched=matched)]

    def _note_told(
        self, request: Request, events: Sequence[TokenEvent], now_ns: int
    ) -> Sequence[TokenEvent]:
        """These are told now."""
        if events:
            num_tokens = sum(len(event.token_ids) for event in events)
            first_index = events[0].first_index
            self.counters.latencies.note_tokens(request, first_index, num_tokens, now_ns)
            if request.first_token_ns is None:
                request.first_token_ns = now_ns
            request.last_token_ns = now_ns
            self.counters.num_generated_tokens += num_tokens
        return events

    @staticmethod
    def _prompt_logprobs(seat: Seat, row: RowResult) -> list[Event]:
        """Those of a chunk that were not released before a rebuild."""
        request = seat.request
        num_told = request.num_prompt_logprobs_told
        # Such a seat has no prefix: its chunk starts where its results end.
        new = row.prompt_logprobs[num_told - seat.num_computed :] if row.prompt_logprobs else ()
        if not new:
            return []
        request.num_prompt_logprobs_told += len(new)
        return [PromptLogprobsEvent(request.request_id, num_told + 1, new)]

    @staticmethod
    def _append_tokens(request: Request, token_ids: tuple[int, ...]) -> int | None:
        """Appends up to the first end id, that one included, and returns it."""
        if request.end_token_ids.isdisjoint(token_ids):
            request.generated_token_ids.extend(token_ids)
            return None
        for token_id in token_ids:
            request.generated_token_ids.append(token_id)
            if token_id in request.end_token_ids:
                return token_id
        return None

    def _expire(self, request: Request, now_ns: int) -> FinishedEvent:
        message = (
            f"the deadline passed after {(now_ns - request.arrival_ns) / 1e6:,.0f} ms, "
            f"with {request.num_told} of {request.max_new_tokens} tokens generated"
        )
        return self._finish(request, FinishReason.DEADLINE, now_ns, message=message)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        now_ns: int,
        *,
        matched: int | None = None,
        num_generated: int | None = None,
        message: str = "",
        status: str = "",
    ) -> FinishedEvent:
        self._release(request, now_ns)
        request.state = RequestState.FINISHED
        self.counters.count_end(reason)
        if num_generated is None:
            num_generated = request.num_told
        end = finished_event(request, reason, num_generated, now_ns, matched, message, status)
        self.counters.latencies.note_end(end, now_ns - request.arrival_ns)
        self.counters.sizes.note_end(end)
        self.counters.num_cached_prompt_tokens += end.num_cached_tokens
        return end

    def _release(self, request: Request, now_ns: int) -> None:
        del self.requests[request.request_id]
        self.calls[request.call_id] -= 1
        if not self.calls[request.call_id]:
            del self.calls[request.call_id]
        self._deadlines.discard(request.request_id)
        if request.state is RequestState.WAITING:
            self.queue.remove(request.request_id)
            return
        self.trial.discard(request.request_id)
        self.queue.release(request)
        del self.seats[request.slot]
        self.table.release(request.slot)
        request.slot = -1
        if request.admitted_ns is not None:
            self._service_time.observe(now_ns - request.admitted_ns)
