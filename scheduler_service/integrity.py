"""The scheduler's books must balance; this is where they are audited."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING

from .request import RequestState
from .trial import MAX_STRIKES

if TYPE_CHECKING:
    from .scheduler import Scheduler
    from .seat import Seat


class IntegrityError(Exception):
    """The scheduler's state contradicts itself: a bug of ours, never of a request."""


def check_integrity(scheduler: Scheduler) -> None:
    """Raises IntegrityError at the first contradiction; changes nothing."""
    _check_slots(scheduler)
    _check_kept(scheduler)
    _check_requests(scheduler)
    _check_queue(scheduler)
    _check_trial(scheduler)
    _check_prefills(scheduler)
    for seat in scheduler.seats.values():
        _check_seat(scheduler, seat)


def _check_slots(scheduler: Scheduler) -> None:
    busy = {slot.index: slot for slot in scheduler.table if slot.request_id is not None}
    if len(busy) + scheduler.table.num_free != len(scheduler.table):
        raise IntegrityError(
            f"{len(busy)} busy and {scheduler.table.num_free} free slots of {len(scheduler.table)}"
        )
    if busy.keys() != scheduler.seats.keys():
        raise IntegrityError(f"busy slots {sorted(busy)}, seats {sorted(scheduler.seats)}")
    for index, seat in scheduler.seats.items():
        owner = (busy[index].request_id, busy[index].generation)
        if owner != (seat.request.request_id, seat.generation) or seat.request.slot != index:
            raise IntegrityError(
                f"slot {index} holds {owner}, its seat is of request {seat.request.request_id!r}, "
                f"generation {seat.generation}, slot {seat.request.slot}"
            )
        if seat.decode_row != busy[index].decode_row:
            raise IntegrityError(
                f"slot {index} has decode row {busy[index].decode_row}, its seat {seat.decode_row}"
            )
    rows = [slot.decode_row for slot in scheduler.table if slot.decode_row >= 0]
    if len(set(rows)) != len(busy) or any(row >= scheduler.limits.max_running for row in rows):
        raise IntegrityError(f"{len(busy)} slots are busy, their decode rows are {rows}")


def _check_kept(scheduler: Scheduler) -> None:
    for slot in scheduler.table:
        kept = scheduler.prefixes.index.kept(slot.index)
        if kept is None:
            continue
        name, num_kept = f"slot {slot.index}", len(kept.token_ids)
        if not 0 < num_kept < scheduler.limits.max_seq_len or kept.generation > slot.generation:
            raise IntegrityError(
                f"{name}, generation {slot.generation}: keeps {num_kept} tokens of generation "
                f"{kept.generation}"
            )
        seat = scheduler.seats.get(slot.index)
        if seat is not None and seat.generation == kept.generation:
            _check_kept_of(seat, kept.token_ids, name)


def _check_kept_of(seat: Seat, kept: array[int], name: str) -> None:
    """A tenant's are its own, and never its last token, which no step has read."""
    known = [*seat.request.prompt_token_ids, *seat.request.generated_token_ids]
    num_written = max(seat.num_prefill_planned, len(known) - 1)
    if len(kept) > num_written or kept.tolist() != known[: len(kept)]:
        raise IntegrityError(
            f"{name}, request {seat.request.request_id!r}: keeps {len(kept)} tokens, of its own "
            f"are {num_written} written"
        )


def _check_prefills(scheduler: Scheduler) -> None:
    """The oldest seat in prefill waits for nobody, so none waits for ever."""
    for seat in scheduler.seats.values():
        if not seat.num_prefill_left:
            continue
        if not seat.is_started and scheduler.prefixes.must_wait(seat, scheduler.seats):
            raise IntegrityError(
                f"slot {seat.slot}, request {seat.request.request_id!r}: waits for a prefix, and "
                "none before it is in prefill"
            )
        return


def _check_requests(scheduler: Scheduler) -> None:
    waiting = [request.request_id for request in scheduler.queue]
    running = [seat.request.request_id for seat in scheduler.seats.values()]
    if sorted(waiting + running) != sorted(scheduler.requests):
        raise IntegrityError(
            f"{len(waiting)} requests wait and {len(running)} run, {len(scheduler.requests)} live"
        )
    if scheduler.calls != Counter(one.call_id for one in scheduler.requests.values()):
        raise IntegrityError(f"live answers of calls are counted as {dict(scheduler.calls)}")
    if any(request.state is not RequestState.WAITING for request in scheduler.queue):
        raise IntegrityError("a request in the queue is not in state WAITING")


def _check_queue(scheduler: Scheduler) -> None:
    queue = scheduler.queue
    num_tokens = sum(len(request.prompt_token_ids) for request in queue)
    if queue.num_tokens != num_tokens:
        raise IntegrityError(f"{num_tokens} prompt tokens wait, {queue.num_tokens} are counted")
    running = Counter(seat.request.client for seat in scheduler.seats.values())
    if queue.num_running != running:
        raise IntegrityError(
            f"requests of clients run {dict(running)}, they are counted as "
            f"{dict(queue.num_running)}"
        )
    for client, num_waiting in Counter(request.client for request in queue).items():
        if queue.num_waiting_of(client) != num_waiting:
            raise IntegrityError(
                f"{num_waiting} requests of client {client!r} wait, "
                f"{queue.num_waiting_of(client)} are counted"
            )
    head = queue.head()
    if head is not None and head.request_id not in scheduler.requests:
        raise IntegrityError(f"request {head.request_id!r} is the queue's head and is not live")


def _check_trial(scheduler: Scheduler) -> None:
    suspects = scheduler.trial.suspects
    running = [seat.request.request_id for seat in scheduler.seats.values()]
    if not suspects.keys() <= set(running):
        raise IntegrityError(f"suspected are {sorted(suspects)}, running {sorted(running)}")
    order = [name for name in running if name in suspects]
    struck = [name for name in order if suspects[name].num_strikes]
    if struck not in ([], order[:1]):
        raise IntegrityError(f"{struck} have strikes, the first of those on trial is {order[0]!r}")
    for name, suspect in suspects.items():
        request = suspect.request
        if (
            not suspect.num_strikes < MAX_STRIKES
            or len(request.generated_token_ids) >= suspect.clear_at
        ):
            raise IntegrityError(
                f"request {name!r} is on trial with {suspect.num_strikes} strikes and "
                f"{len(request.generated_token_ids)} tokens, it is cleared with {suspect.clear_at}"
            )
    for request in scheduler.requests.values():
        found = suspects.get(request.request_id)
        num_held = sum(len(event.token_ids) for event in found.held) if found else 0
        if request.num_untold != num_held:
            raise IntegrityError(
                f"request {request.request_id!r}: {num_held} tokens are held back, "
                f"{request.num_untold} are counted"
            )


def _check_seat(scheduler: Scheduler, seat: Seat) -> None:
    request = seat.request
    name = f"slot {seat.slot}, request {request.request_id!r}"
    if request.state not in (RequestState.PREFILL, RequestState.DECODE):
        raise IntegrityError(f"{name}: in a slot, yet {request.state.value}")
    num_generated = len(request.generated_token_ids)
    if seat.mask_index > num_generated:
        raise IntegrityError(f"{name}: a mask for {seat.mask_index} tokens, it has {num_generated}")
    if not num_generated <= seat.num_generated_planned <= request.max_new_tokens:
        raise IntegrityError(
            f"{name}: {num_generated} tokens known, {seat.num_generated_planned} planned, "
            f"the limit is {request.max_new_tokens}"
        )
    # Tokens that prefill went over again are counted on both sides.
    num_known = len(seat.prefill_token_ids) - len(request.prompt_token_ids)
    num_planned = seat.num_prefill_planned + seat.num_generated_planned - num_known
    if seat.num_computed > num_planned:
        raise IntegrityError(
            f"{name}: {seat.num_computed} positions computed, {num_planned} were planned"
        )
    in_flight = any(
        (row.slot, row.generation) == (seat.slot, seat.generation)
        for step in scheduler.outstanding
        for row in step.rows
    )
    if not in_flight and not seat.num_prefill_left and not seat.num_tokens_left:
        raise IntegrityError(f"{name}: makes no progress, nothing is planned and nothing in flight")
