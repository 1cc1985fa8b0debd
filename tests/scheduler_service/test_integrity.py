"""Each way to cook the books is found (B42's watchdog)."""

from __future__ import annotations

from array import array

import pytest
from scheduler_driver import Driver, make_limits, make_request

from scheduler_service.integrity import IntegrityError
from scheduler_service.request import FinishReason, RequestState
from scheduler_service.trial import Suspect


@pytest.fixture
def d():
    driver = Driver(make_limits())
    for name in "abc":
        driver.submit(make_request(name, (1,) * 6, max_new_tokens=9))
    for _ in range(3):
        driver.step()
    driver.scheduler.check_integrity()
    return driver


def leak_slot(scheduler):
    scheduler.table._num_free += 1


def lose_seat(scheduler):
    del scheduler.seats[0]


def swap_generation(scheduler):
    scheduler.seats[0].generation += 1


def forget_request(scheduler):
    del scheduler.requests["c"]


def run_a_waiting_one(scheduler):
    next(iter(scheduler.queue)).state = RequestState.DECODE


def finish_a_running_one(scheduler):
    scheduler.seats[0].request.state = RequestState.FINISHED


def plan_past_the_limit(scheduler):
    scheduler.seats[0].num_generated_planned = 10


def compute_more_than_planned(scheduler):
    scheduler.seats[0].num_computed = 60


def wedge(scheduler):
    scheduler.outstanding.clear()
    scheduler.seats[0].num_generated_planned = 9


def swap_decode_row(scheduler):
    scheduler.seats[0].decode_row = 1


def share_a_decode_row(scheduler):
    scheduler.table[1].decode_row = scheduler.seats[1].decode_row = 0


def miscount_a_call(scheduler):
    scheduler.calls["a"] += 1


def keep_the_last_token(scheduler):
    request = scheduler.seats[0].request
    kept = scheduler.prefixes.index.kept(0)
    kept.token_ids.append(request.generated_token_ids[-1])


def keep_what_is_not_its_own(scheduler):
    kept = scheduler.prefixes.index.kept(0)
    kept.token_ids = array("I", [1, 1, 1, 1, 1, 2])


def keep_of_the_future(scheduler):
    kept = scheduler.prefixes.index.kept(0)
    kept.generation, kept.token_ids = 9, kept.token_ids[:6]


def wait_for_nobody(scheduler):
    """Seat 0 has an ear for a seat that says it will write and never does."""
    first = scheduler.seats[0]
    scheduler.cancel("b", FinishReason.CANCELLED, 0)
    scheduler._admit(0)
    first.prefill_token_ids = first.prefill_token_ids + array("I", (7,))
    first.num_generated_planned -= 1
    scheduler.seats[1].ahead = [(first, 500)]
    scheduler.seats.pop(0)
    scheduler.seats[0] = first


def mask_of_the_future(scheduler):
    scheduler.seats[0].mask_index = 9


def miscount_a_client(scheduler):
    scheduler.queue.num_running[""] += 1


def miscount_waiting_tokens(scheduler):
    scheduler.queue.num_tokens += 1


def lose_a_clients_place(scheduler):
    next(iter(scheduler.queue)).client = "other"


def suspect_a_waiting_one(scheduler):
    request = scheduler.requests["c"]
    scheduler.trial.suspects["c"] = Suspect(request, 9)


def suspect_a_cleared_one(scheduler):
    request = scheduler.requests["a"]
    scheduler.trial.suspects["a"] = Suspect(request, len(request.generated_token_ids))


def strike_one_that_waits_its_turn(scheduler):
    for name in "ab":
        scheduler.trial.suspects[name] = Suspect(scheduler.requests[name], 9, name == "b")


def hold_tokens_for_ever(scheduler):
    scheduler.requests["a"].num_untold = 1


@pytest.mark.parametrize(
    ("crime", "words"),
    [
        (leak_slot, "2 busy and 1 free slots of 2"),
        (lose_seat, "busy slots"),
        (swap_generation, "slot 0 holds"),
        (forget_request, "1 requests wait and 2 run, 2 live"),
        (run_a_waiting_one, "not in state WAITING"),
        (finish_a_running_one, "slot 0, request 'a': in a slot, yet finished"),
        (plan_past_the_limit, "10 planned"),
        (compute_more_than_planned, "60 positions computed"),
        (wedge, "slot 0, request 'a': makes no progress"),
        (swap_decode_row, "slot 0 has decode row 0, its seat 1"),
        (share_a_decode_row, "their decode rows are"),
        (miscount_a_call, "counted as {'a': 2"),
        (keep_the_last_token, "slot 0, request 'a': keeps"),
        (keep_what_is_not_its_own, "slot 0, request 'a': keeps 6 tokens, of its own"),
        (keep_of_the_future, "keeps 6 tokens of generation 9"),
        (wait_for_nobody, "slot 1, request 'c': waits for a prefix"),
        (mask_of_the_future, "a mask for 9 tokens"),
        (miscount_a_client, "requests of clients run {'': 2}, they are counted as {'': 3}"),
        (miscount_waiting_tokens, "6 prompt tokens wait, 7 are counted"),
        (lose_a_clients_place, "1 requests of client 'other' wait, 0 are counted"),
        (suspect_a_waiting_one, r"suspected are \['c'\], running \['a', 'b'\]"),
        (suspect_a_cleared_one, "request 'a' is on trial with 0 strikes"),
        (strike_one_that_waits_its_turn, r"\['b'\] have strikes, the first of those .* is 'a'"),
        (hold_tokens_for_ever, "0 tokens are held back, 1 are counted"),
    ],
)
def test_a_contradiction_is_named(d, crime, words):
    crime(d.scheduler)
    with pytest.raises(IntegrityError, match=words):
        d.scheduler.check_integrity()
