from __future__ import annotations

from scheduler_service.step_plan import StepPace


def test_one_step_until_something_was_measured():
    assert StepPace(window_ns=100, max_steps=8).num_steps() == 1


def test_steps_fill_the_window_within_the_bounds():
    pace = StepPace(window_ns=100, max_steps=8)
    pace.observe(60, num_steps=3)
    assert pace.num_steps() == 5
    for _ in range(30):
        pace.observe(1000, num_steps=2)
    assert pace.num_steps() == 1
    for _ in range(60):
        pace.observe(0, num_steps=4)
    assert pace.num_steps() == 8


def test_one_odd_step_changes_little():
    pace = StepPace(window_ns=1000, max_steps=100)
    pace.observe(100, 1)
    pace.observe(200, 1)
    assert pace.step_ns == 125
