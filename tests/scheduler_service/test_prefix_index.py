from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.prefix_index import Kept, Match, PrefixIndex, PrefixReuse, common_length


def ids(*values):
    return array("I", values)


def index_of(*kept, reuse=PrefixReuse.ALL):
    """Slots 0, 1, ... keep (tokens, tokens of the prompt)."""
    index = PrefixIndex(reuse)
    for slot, (token_ids, num_prompt) in enumerate(kept):
        index.begin(slot, Kept(slot + 2, "", num_prompt, array("I", token_ids)))
    return index


@given(
    st.integers(0, 300),
    st.lists(st.integers(0, 1), max_size=90),
    st.lists(st.integers(0, 1), max_size=90),
)
def test_common_length(num_equal, first, second):
    head = [7] * num_equal
    naive = 0
    for one, other in zip(head + first, head + second, strict=False):
        if one != other:
            break
        naive += 1
    assert common_length(array("I", head + first), array("I", head + second)) == naive


def test_the_longest_wins_and_the_first_named_of_equals():
    index = index_of((range(5), 5), (range(9), 9), (range(9), 9), ([9, 9], 2))
    prompt = array("I", range(20))
    assert index.longest(range(4), prompt, "") == Match(1, 9)
    assert index.longest([2, 1], prompt, "") == Match(2, 9)
    assert index.longest(range(4), prompt, "", above=8) == Match(1, 9)
    assert index.longest(range(4), prompt, "", above=9) is None
    assert index.longest(range(4), prompt[:4], "", above=4) is None
    assert index.longest([3], prompt, "") is None
    assert index.longest(range(4), prompt, "other salt") is None
    assert index.length_in(0, prompt, "") == 5
    assert index.length_in(0, prompt, "other salt") == index.length_in(9, prompt, "") == 0


def test_tokens_of_another_tenant_are_not_added():
    index = index_of(([1, 2], 2))
    index.extend(0, 3, [9])
    index.extend(5, 2, [9])
    assert index.num_tokens(0) == 2
    index.extend(0, 2, [3])
    assert (index.num_tokens(0), index.holds(0, 2), index.holds(0, 3)) == (3, True, False)
    index.forget(0)
    assert (index.num_tokens(0), index.kept(0), index.holds(0, 2)) == (0, None, False)


def test_nothing_is_kept_where_nothing_may_be_reused():
    assert index_of((range(5), 5), reuse=PrefixReuse.NONE).kept(0) is None


LONG = tuple(range(100))
SYSTEM = LONG[:60]


@pytest.mark.parametrize(
    ("kept", "prompt", "slot"),
    [
        # Goes on with what slot 1 holds, its answer included.
        ([(range(50, 99), 40), (LONG, 80)], range(120), 1),
        # The answer is told anew; so is the opening of the assistant's turn.
        ([(range(50, 99), 40), (LONG, 80)], [*range(80), 7, 7, 7], 1),
        ([(range(50, 99), 40), (LONG, 80)], [*range(76), 7, 7, 7], 1),
        # Another conversation: it shares the beginning only.
        ([(range(50, 99), 40), (LONG, 80)], [*range(75), 7, 7, 7], 0),
        ([(LONG, 80), (range(50, 99), 40)], [*range(60), 7, 7, 7], 0),
        # Few tokens are no conversation.
        ([(range(50, 99), 40), ([*range(9), *range(50)], 9)], [*range(4), 70, 71], 0),
        ([(range(50, 99), 40), ([*range(9), *range(50)], 9)], [*range(5), 70, 71], 1),
        # One cut off in its prompt is gone on with where it ends.
        ([(range(50, 99), 40), (range(30), 80)], range(80), 1),
    ],
)
def test_choice_of_a_slot(kept, prompt, slot):
    """Of two slots the first one was not used for longer."""
    assert index_of(*kept).choose([0, 1], array("I", prompt), "") == slot


def test_a_slot_that_holds_nothing_goes_before_one_that_does():
    index = index_of((LONG, 80), (LONG, 80))
    assert index.choose([0, 1, 2], ids(5, 6), "") == 2
    index.forget(1)
    assert index.choose([0, 1, 2], ids(5, 6), "") == 1
