"""Fills one command with rows: the policy of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .limits import Limits
from .prefix_plan import PrefixPlan
from .seat import Seat
from .step import PlannedRow, PrefillChunk, Row

# Whose best rate counts.
_NUM_RECENT_STEPS = 256


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


class PrefillPace:
    """The least time that prompts can take, as steps of late did; depends on nothing else."""

    def __init__(self, min_step_tokens: int) -> None:
        """Steps of fewer prompt tokens say nothing: the fewer, the longer each one takes."""
        self._min_step_tokens = min_step_tokens
        # Nanoseconds and prompt tokens of full steps.
        self._recent: deque[tuple[int, int]] = deque(maxlen=_NUM_RECENT_STEPS)

    def observe(self, duration_ns: int, num_tokens: int) -> None:
        """A step with so many prompt tokens took duration_ns."""
        if num_tokens >= self._min_step_tokens:
            self._recent.append((duration_ns, num_tokens))

    def least_ns(self, num_tokens: int) -> int:
        """At the best rate seen; 0 while nothing is known."""
        return min((ns * num_tokens // of for ns, of in self._recent), default=0)


@dataclass(slots=True)
class MaskWait:
    """Keeps constrained requests together: with one row each, every command takes a step's time.

    Where nobody else has rows, one whose mask has come waits for those that are a step or a mask
    behind; for half of a step at most once no step is outstanding, so that a slow mask delays
    nobody for long.
    """

    # When the wait ends, whatever is missing; None: nobody waits, or for a result.
    until_ns: int | None = None

    def holds(self, seats: Iterable[Seat], step_ns: int, is_idle: bool, now_ns: int) -> bool:
        """Nothing is to be planned now. is_idle: no step is outstanding."""
        if not _lacks_masks(seats):
            self.until_ns = None
            return False
        if not is_idle:
            return True
        if self.until_ns is None:
            self.until_ns = now_ns + step_ns // 2
        if now_ns < self.until_ns:
            return True
        self.until_ns = None
        return False


def _lacks_masks(seats: Iterable[Seat]) -> bool:
    """All that could be planned are decode rows of constrained requests, and not of all of them."""
    ready = missing = False
    for seat in seats:
        if seat.num_prefill_left:
            return False
        if not seat.num_tokens_left:
            continue
        if seat.request.constraint is None:
            return False
        if seat.may_sample:
            ready = True
        else:
            missing = True
    return ready and missing


@dataclass(slots=True)
class StepPlan:
    """Rows of a command, and beside each what its result may hold."""

    num_steps: int
    rows: list[Row] = field(default_factory=list)
    planned: list[PlannedRow] = field(default_factory=list)
    chunks: list[tuple[Seat, PrefillChunk]] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for _, chunk in self.chunks)

    def add_decode(self, seat: Seat) -> None:
        row, planned = seat.take_decode(self.num_steps)
        self.rows.append(row)
        self.planned.append(planned)

    def add_chunk(self, seat: Seat, max_tokens: int, prefixes: PrefixPlan) -> None:
        """Nothing if the seat is better off a command later."""
        prefix = None
        if not seat.is_started:
            taken = {chunk.slot: seat for seat, chunk in self.chunks if chunk.setup}
            if prefixes.must_let_pass(seat, taken):
                return
            prefix = prefixes.take(seat, taken)
        chunk, planned = seat.take_chunk(max_tokens, prefix)
        self.rows.append(chunk)
        self.planned.append(planned)
        self.chunks.append((seat, chunk))


def share_budget(lengths: Sequence[int], budget: int) -> list[int]:
    """Of each prompt's tokens to prefill, in order of admission, how many a step takes.

    Half of the budget is the oldest prompt's, so that none waits for ever. The rest goes to those
    that are nearest to their end, the older of equals first, so that a short prompt does not wait
    for a long one, and prompts of one length come one after the other.
    """
    shares = [0] * len(lengths)
    shares[0] = min(lengths[0], (budget + 1) // 2)
    budget -= shares[0]
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i] - shares[i]):
        more = min(lengths[index] - shares[index], budget)
        shares[index] += more
        budget -= more
    return shares


def plan_rows(
    seats: Mapping[int, Seat],
    limits: Limits,
    pace: StepPace,
    prefixes: PrefixPlan,
    num_logprobs_steps: int = 0,
) -> StepPlan | None:
    """A decode row for each seat that decodes, then prefill chunks; None when no seat has work.

    `seats` by slot, in order of admission; num_logprobs_steps are outstanding. A command with a
    chunk is one step; without, it has as many as fill the window and are needed. Chunks take less
    of a step in which seats decode: those wait for it. A seat may have nothing to do for now: no
    mask has come, what it shares is on its way, or the logprobs of enough steps are.
    """
    spare_steps = limits.max_logprobs_steps - num_logprobs_steps
    able = [seat for seat in seats.values() if spare_steps > 0 or not seat.has_logprobs]
    decoding = [seat for seat in able if seat.num_decode_left]
    prefilling = [seat for seat in able if _may_prefill(seat, seats, prefixes)]
    if not decoding and not prefilling:
        return None
    plan = StepPlan(1 if prefilling else _num_steps(decoding, limits, pace, spare_steps))
    for seat in decoding:
        plan.add_decode(seat)
    if prefilling:
        budget = limits.max_step_tokens - len(decoding)
        if decoding:
            budget = min(budget, limits.max_mixed_step_tokens)
        shares = share_budget([seat.num_prefill_ready for seat in prefilling], budget)
        for seat, num_tokens in zip(prefilling, shares, strict=True):
            if num_tokens:
                plan.add_chunk(seat, num_tokens, prefixes)
    for seat, chunk in plan.chunks:
        prefixes.note_chunk(seat, chunk)
    return plan


def _may_prefill(seat: Seat, seats: Mapping[int, Seat], prefixes: PrefixPlan) -> bool:
    if not seat.num_prefill_left:
        return False
    if not seat.is_started and prefixes.must_wait(seat, seats):
        return False
    return seat.num_prefill_ready > 0


def _num_steps(decoding: Sequence[Seat], limits: Limits, pace: StepPace, spare_steps: int) -> int:
    """Of a command of decode rows. Logprobs leave room for those of the command behind it."""
    num_steps = min(pace.num_steps(), max(seat.num_decode_left for seat in decoding))
    if any(seat.has_logprobs for seat in decoding):
        share = max(1, limits.max_logprobs_steps // limits.max_outstanding)
        num_steps = min(num_steps, share, spare_steps)
    return num_steps
