"""Fills one command with rows: the policy of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .seat import Seat
from .step import PlannedRow, PrefillChunk, Row


class StepPace:
    """Estimates the time of a decode step from reported durations; depends on nothing else."""

    def __init__(self, window_ns: int, max_steps: int) -> None:
        """A command should run for about window_ns, and at most max_steps steps."""
        self._window_ns = window_ns
        self._max_steps = max_steps
        # 0: nothing measured yet.
        self.step_ns = 0

    def observe(self, duration_ns: int, num_steps: int) -> None:
        """A decode-only command took duration_ns for num_steps forwards, at least 1."""
        step_ns = max(1, duration_ns // num_steps)
        self.step_ns = step_ns if self.step_ns == 0 else (3 * self.step_ns + step_ns) // 4

    def num_steps(self) -> int:
        """Steps whose time is nearest to the window, at least 1; 1 until something was measured."""
        if self.step_ns == 0:
            return 1
        nearest = (self._window_ns + self.step_ns // 2) // self.step_ns
        return max(1, min(self._max_steps, nearest))


@dataclass(slots=True)
class StepPlan:
    """Rows of a command, and beside each what its result may hold."""

    num_steps: int
    has_prefill: bool
    rows: list[Row] = field(default_factory=list)
    planned: list[PlannedRow] = field(default_factory=list)

    def add_decode(self, seat: Seat) -> None:
        row, num_tokens = seat.take_decode(self.num_steps)
        self.rows.append(row)
        self.planned.append(PlannedRow(row.slot, row.generation, 0, num_tokens))

    def add_chunk(self, chunk: PrefillChunk) -> None:
        self.rows.append(chunk)
        self.planned.append(
            PlannedRow(chunk.slot, chunk.generation, len(chunk.token_ids), int(chunk.sample))
        )


def plan_rows(seats: Iterable[Seat], max_step_tokens: int, pace: StepPace) -> StepPlan | None:
    """A decode row for each seat that decodes, then prefill chunks; None when no seat has work.

    `seats` in order of admission: earlier prompts are prefilled first, and several fit one step. A
    command with a chunk is one step; without, it has as many as fill the window and are needed.
    """
    decoding = [seat for seat in seats if seat.num_decode_left]
    prefilling = [seat for seat in seats if seat.num_prefill_left]
    if not decoding and not prefilling:
        return None
    num_steps = 1
    if not prefilling:
        num_steps = min(pace.num_steps(), max(seat.num_decode_left for seat in decoding))
    plan = StepPlan(num_steps, bool(prefilling))
    for seat in decoding:
        plan.add_decode(seat)
    budget = max_step_tokens - len(decoding)
    for seat in prefilling:
        if budget == 0:
            break
        chunk = seat.take_chunk(budget)
        budget -= len(chunk.token_ids)
        plan.add_chunk(chunk)
    return plan
