from __future__ import annotations

import pytest
from scheduler_driver import make_limits


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_slots", 0),
        ("max_seq_len", 1),
        ("max_step_tokens", 3),
        ("max_mixed_step_tokens", 0),
        ("max_queue_len", 0),
        ("max_queued_tokens", -1),
        ("max_outstanding", 0),
        ("max_steps_per_command", 0),
        ("run_ahead_window_ns", -5),
    ],
)
def test_a_limit_that_cannot_hold_is_named_with_its_value(field, value):
    with pytest.raises(ValueError, match=rf"{field} is {value}|{field} .*{value}"):
        make_limits(**{"num_slots": 4, field: value})


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
