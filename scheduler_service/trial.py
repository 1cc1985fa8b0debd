"""Finds the request that the workers die of, while the others lose nothing but time.

When the group is lost, every request of an outstanding command becomes a suspect. Suspects then run
one at a time, the others wait, until each is cleared: it has got past all that was in flight at the
loss, or has ended. A loss with one request in flight is a strike against it. Two strikes without
being cleared between, and it is convicted.

What a suspect gets is told when it is cleared. So whoever sees a new token knows that nobody has a
strike any more, and groups that are killed from outside, each after new tokens, convict nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .request import Request, TokenEvent
from .seat import Seat
from .step import Outstanding

# Tokens beyond those it had, at least: a fault may lie in what follows a prefill.
MIN_TRIAL_TOKENS = 8
MAX_STRIKES = 2


@dataclass(slots=True)
class Suspect:
    request: Request
    # It is cleared when it has so many tokens.
    clear_at: int
    num_strikes: int = 0
    held: list[TokenEvent] = field(default_factory=list)


class Trial:
    """Who is suspected, and who may run."""

    def __init__(self) -> None:
        # By request id. All of them have seats; only one at a time has rows in commands.
        self.suspects: dict[str, Suspect] = {}

    @property
    def is_on(self) -> bool:
        return bool(self.suspects)

    def judge(self, outstanding: Iterable[Outstanding], seats: Mapping[int, Seat]) -> list[Request]:
        """The group was lost with these commands outstanding; returns whom it convicts.

        A row of a former tenant is in flight like any other: it may be what the group died of.
        """
        in_flight = {(row.slot, row.generation) for step in outstanding for row in step.rows}
        convicted = []
        for seat in seats.values():
            if (seat.slot, seat.generation) not in in_flight:
                continue
            suspect = self._suspect(seat)
            suspect.num_strikes += len(in_flight) == 1
            if suspect.num_strikes == MAX_STRIKES:
                convicted.append(seat.request)
        return convicted

    def _suspect(self, seat: Seat) -> Suspect:
        request = seat.request
        clear_at = max(
            len(request.generated_token_ids) + MIN_TRIAL_TOKENS, seat.num_generated_planned
        )
        suspect = self.suspects.setdefault(request.request_id, Suspect(request, clear_at))
        suspect.clear_at = clear_at
        return suspect

    def allowed(
        self, seats: Mapping[int, Seat], outstanding: Sequence[Outstanding]
    ) -> Mapping[int, Seat]:
        """Of `seats`, in order of admission, those that may have rows in the next command.

        On trial, that is the first suspect, and nobody until no row of another one is outstanding:
        what is in flight must be its own. One with a strike is the first: those before it were
        cleared when it got it, and only what runs is suspected anew.
        """
        if not self.suspects:
            return seats
        seat = next(one for one in seats.values() if one.request.request_id in self.suspects)
        own = (seat.slot, seat.generation)
        if any((row.slot, row.generation) != own for step in outstanding for row in step.rows):
            return {}
        return {seat.slot: seat}

    def release(self, event: TokenEvent) -> list[TokenEvent]:
        """What is to be told now that a request got these tokens: nothing while it is suspected."""
        suspect = self.suspects.get(event.request_id)
        if suspect is None:
            return [event]
        suspect.held.append(event)
        suspect.request.num_untold += len(event.token_ids)
        if len(suspect.request.generated_token_ids) < suspect.clear_at:
            return []
        return self.clear(event.request_id)

    def clear(self, request_id: str) -> list[TokenEvent]:
        """Suspects it no more; returns what was held back, to be told."""
        suspect = self.suspects.pop(request_id, None)
        if suspect is None:
            return []
        suspect.request.num_untold = 0
        return suspect.held

    def discard(self, request_id: str) -> None:
        """It ended: what was held back is never told."""
        self.suspects.pop(request_id, None)
