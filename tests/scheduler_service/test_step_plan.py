from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.step_plan import StepPace, share_budget


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


@pytest.mark.parametrize(
    ("lengths", "budget", "shares"),
    [
        ([5], 8, [5]),
        ([50], 8, [8]),
        ([3, 3, 3], 8, [3, 3, 2]),
        # A short prompt goes beside a long one, whichever came first.
        ([50, 3], 8, [5, 3]),
        ([50, 9], 8, [4, 4]),
        ([9, 50], 8, [8, 0]),
        ([50, 40, 3], 8, [4, 1, 3]),
        ([50, 50], 1, [1, 0]),
    ],
)
def test_shares_of_the_budget(lengths, budget, shares):
    assert share_budget(lengths, budget) == shares


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=9), st.integers(1, 3000))
def test_the_budget_is_used_up_and_the_oldest_has_half(lengths, budget):
    shares = share_budget(lengths, budget)
    assert all(0 <= share <= length for share, length in zip(shares, lengths, strict=True))
    assert sum(shares) == min(budget, sum(lengths))
    assert shares[0] >= min(lengths[0], (budget + 1) // 2)
    left = [lengths[0] - min(lengths[0], (budget + 1) // 2), *lengths[1:]]
    before = sum(length for length in left[:-1] if length <= left[-1])
    assert shares[-1] >= min(left[-1], budget // 2 - before)
