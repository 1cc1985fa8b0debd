from __future__ import annotations

import pytest
from scheduler_driver import make_limits, make_request

from fakes import FakeConstraint
from scheduler_service.errors import InvalidArgumentError
from scheduler_service.request import ClientLimits, Mask


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_slots", 0),
        ("max_seq_len", 1),
        ("max_running", 0),
        ("max_running", 5),
        ("max_step_tokens", 3),
        ("max_logprobs_steps", 0),
        ("max_mixed_step_tokens", 0),
        ("max_queue_len", 0),
        ("max_queued_tokens", -1),
        ("max_waiting_per_client", -2),
        ("max_outstanding", 0),
        ("max_steps_per_command", 0),
        ("run_ahead_window_ns", -5),
    ],
)
def test_a_limit_that_cannot_hold_is_named_with_its_value(field, value):
    with pytest.raises(ValueError, match=rf"{field} is {value}|{field} .*{value}"):
        make_limits(**{"num_slots": 4, field: value})


def test_a_step_holds_a_row_of_all_that_run_not_of_all_slots():
    assert make_limits(num_slots=64, max_running=3, max_step_tokens=3).max_step_tokens == 3


@pytest.mark.parametrize(
    ("mask", "error"), [(None, ValueError), (Mask(None, True), InvalidArgumentError)]
)
def test_a_constraint_that_cannot_begin(mask, error):
    request = make_request("a", constraint=FakeConstraint(3, 1000), first_mask=mask)
    with pytest.raises(error, match="constraint"):
        make_limits().check(request)


def test_more_answers_than_can_ever_wait():
    limits = make_limits(max_queue_len=3, num_slots=2)
    limits.check_number([make_request("a")] * 5)
    with pytest.raises(InvalidArgumentError, match=r"n.*is 6; at most 5 can"):
        limits.check_number([make_request("a")] * 6)


@pytest.mark.parametrize(
    ("of_server", "of_client", "bound"), [(2, (0, 0), 6), (0, (3, 2), 5), (1, (3, 2), 4)]
)
def test_more_answers_than_one_client_may_have(of_server, of_client, bound):
    limits = make_limits(num_slots=4, max_waiting_per_client=of_server)
    request = make_request("a", client_limits=ClientLimits(*of_client))
    limits.check_number([request] * bound)
    with pytest.raises(InvalidArgumentError, match=rf"n.*; at most {bound} of one client"):
        limits.check_number([request] * (bound + 1))


def test_the_least_limits():
    limits = make_limits(
        num_slots=1,
        max_seq_len=2,
        max_step_tokens=1,
        max_mixed_step_tokens=1,
        max_queue_len=1,
        max_outstanding=1,
        max_steps_per_command=1,
        run_ahead_window_ns=0,
    )
    assert limits.max_step_tokens == 1
