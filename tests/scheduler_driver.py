"""Drives a Scheduler with a FakeWorker and keeps count of what each request was told."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from fakes import FakeWorker, Script, tokens_alone
from scheduler_service.limits import Limits
from scheduler_service.prefix_index import PrefixReuse
from scheduler_service.request import (
    Event,
    FinishedEvent,
    FinishReason,
    PromptLogprobsEvent,
    Request,
    Sampling,
    TokenEvent,
    TokenLogprobs,
)
from scheduler_service.scheduler import Scheduler
from scheduler_service.step import StepCommand

STEP_NS = 1_000_000


def make_limits(**changes: Any) -> Limits:
    limits: dict[str, Any] = {
        "num_slots": 2,
        "max_seq_len": 64,
        "max_step_tokens": 8,
        "max_mixed_step_tokens": 8,
        "max_queue_len": 256,
        "max_queued_tokens": 0,
        "max_outstanding": 2,
        "max_steps_per_command": 8,
        "run_ahead_window_ns": 30 * STEP_NS,
        "max_logprobs_steps": 64,
        "prefix_reuse": PrefixReuse.ALL,
    }
    limits["max_running"] = changes.get("num_slots", limits["num_slots"])
    return Limits(**limits | changes)


def make_request(
    request_id: str, prompt: tuple[int, ...] = (5, 6, 7), max_new_tokens: int = 4, **fields: Any
) -> Request:
    sampling = fields.pop("sampling", Sampling(0.8, 1.0, 0, 0.0, fields.pop("seed", 1)))
    return Request(
        request_id=request_id,
        prompt_token_ids=array("I", prompt),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        end_token_ids=frozenset(fields.pop("end_token_ids", ())),
        arrival_ns=fields.pop("arrival_ns", 0),
        **fields,
    )


@dataclass
class Told:
    """What one request was told, checked as it comes."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: FinishedEvent | None = None

    def take(self, event: Event) -> None:
        assert self.end is None, "an event after the last one"
        if isinstance(event, FinishedEvent):
            self.end = event
            return
        if isinstance(event, PromptLogprobsEvent):
            assert not self.tokens, "prompt logprobs after a token"
            assert event.first_index == len(self.prompt_logprobs) + 1, "a gap or an overlap"
            assert event.logprobs, "an empty event"
            self.prompt_logprobs += event.logprobs
            return
        assert event.token_ids, "an empty token event"
        assert event.first_index == len(self.tokens), "a gap or an overlap"
        self.tokens += event.token_ids
        self.logprobs += event.logprobs
        wants = self.request.num_logprobs is not None
        assert len(event.logprobs) == (len(event.token_ids) if wants else 0)


class WorkerDiedError(Exception):
    """For scripts: the group is lost in this step."""


class Driver:
    """A scheduler and its worker. `now_ns` moves by hand and with each result."""

    def __init__(self, limits: Limits, script: Script | None = None, vocab_size: int = 1000):
        self.limits = limits
        self.script = script
        self.vocab_size = vocab_size
        self.scheduler = Scheduler(limits)
        self.now_ns = 0
        self.epoch = 1
        self.sent: deque[StepCommand] = deque()
        self.told: dict[str, Told] = {}
        # Constrained requests whose tokens a mask is due for, with those tokens.
        self.masks_due: dict[str, tuple[int, ...]] = {}
        # Requests that the worker dies of, whatever it does for them.
        self.poison: set[str] = set()
        self.num_losses = 0
        # Some token was told since the last loss.
        self.has_told = False
        # Who had which (slot, generation).
        self.tenants: dict[tuple[int, int], str] = {}
        # In order; a dict for its order and its speed.
        self.admitted: dict[str, None] = {}
        self.worker = self._new_worker()

    def _new_worker(self) -> FakeWorker:
        return FakeWorker(
            self.limits.num_slots,
            self.limits.max_seq_len,
            self.limits.max_step_tokens,
            self.vocab_size,
            self.script,
            STEP_NS,
            max_running=self.limits.max_running,
            reuse=self.limits.prefix_reuse,
        )

    def submit(self, *requests: Request) -> int:
        """One call."""
        for request in requests:
            request.arrival_ns = self.now_ns
        position = self.scheduler.submit(requests)
        self.told.update((request.request_id, Told(request)) for request in requests)
        return position

    def resume(self, *requests: Request) -> None:
        """Answers to one call, as a former scheduler has left them."""
        ended = self.scheduler.resume(requests, self.now_ns)
        for request in requests:
            self.told[request.request_id] = Told(request, list(request.generated_token_ids))
        self._tell(ended)

    def plan(self) -> StepCommand | None:
        self._tell(self.scheduler.expire(self.now_ns))
        command = self.scheduler.plan_step(self.now_ns)
        if command is not None:
            assert command.epoch == self.epoch
            for row in command.rows:
                name = self.scheduler.seats[row.slot].request.request_id
                self.tenants[row.slot, row.generation] = name
            self.sent.append(command)
            self._note_admissions()
        return command

    def _note_admissions(self) -> None:
        for seat in self.scheduler.seats.values():
            self.admitted.setdefault(seat.request.request_id)

    def answer(self) -> list[Event]:
        """The worker runs the oldest command, the scheduler takes its result; or the worker dies
        of it."""
        command = self.sent.popleft()
        try:
            if any(self.tenants[row.slot, row.generation] in self.poison for row in command.rows):
                raise WorkerDiedError
            result = self.worker.run(command)
        except WorkerDiedError:
            self.lose_worker()
            return []
        self.now_ns += result.duration_ns
        events = self.scheduler.apply_result(result, self.now_ns)
        self._tell(events)
        self.masks_due.update(
            (request.request_id, token_ids) for request, token_ids in self.scheduler.take_sampled()
        )
        return events

    def give_mask(self, request_id: str) -> None:
        """A constraint's answer comes, be its request still there or not."""
        token_ids = self.masks_due.pop(request_id)
        request = self.told[request_id].request
        assert request.constraint is not None
        mask = request.constraint.advance(token_ids)
        num_generated = len(request.generated_token_ids)
        self._tell(self.scheduler.set_mask(request_id, num_generated, mask, self.now_ns))

    def give_masks(self) -> None:
        for request_id in list(self.masks_due):
            self.give_mask(request_id)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self._tell([self.scheduler.cancel(request_id, reason, self.now_ns)])

    def stop(self, request_id: str, num_tokens: int) -> None:
        self._tell([self.scheduler.stop(request_id, num_tokens, self.now_ns)])

    def lose_worker(self) -> None:
        """The group dies and comes back with empty slots under a new epoch."""
        self.epoch += 1
        self.num_losses += 1
        self.has_told = False
        self.worker = self._new_worker()
        self.worker.last_step_id = 2
        self.sent.clear()
        self._tell(self.scheduler.lose_group(self.now_ns))
        self.scheduler.rebuild(self.epoch, next_step_id=3)

    def step(self) -> list[Event]:
        """Plans while it can, then one answer and the masks for its tokens."""
        while self.plan() is not None:
            pass
        events = self.answer() if self.sent else []
        self.give_masks()
        return events

    def run(self, max_steps: int = 100_000) -> None:
        """Until nothing waits, runs or is due."""
        for _ in range(max_steps):
            self.step()
            if self.scheduler.is_empty and not self.sent:
                self.scheduler.check_integrity()
                return
        raise AssertionError(f"not done after {max_steps} steps")

    def alone(self, request_id: str) -> list[int]:
        return tokens_alone(self.told[request_id].request, self.vocab_size, self.script)

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            self.told[event.request_id].take(event)
            self.has_told |= isinstance(event, TokenEvent)
