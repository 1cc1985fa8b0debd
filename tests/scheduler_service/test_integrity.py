"""Each way to cook the books is found (B42's watchdog)."""

from __future__ import annotations

import pytest
from scheduler_driver import Driver, make_limits, make_request

from scheduler_service.integrity import IntegrityError
from scheduler_service.request import RequestState


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
    ],
)
def test_a_contradiction_is_named(d, crime, words):
    crime(d.scheduler)
    with pytest.raises(IntegrityError, match=words):
        d.scheduler.check_integrity()
