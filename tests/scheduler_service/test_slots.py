from __future__ import annotations

import pytest

from scheduler_service.slots import WARM_UP_GENERATION, SlotTable


def test_least_recently_used_then_lowest_index():
    table = SlotTable(4)
    assert [table.take(name).index for name in "abcd"] == [0, 1, 2, 3]
    with pytest.raises(LookupError, match="all 4 slots"):
        table.take("e")
    for index in (2, 0, 3):
        table.release(index)
    assert [table.take(name).index for name in "efg"] == [2, 0, 3]


def test_slots_never_used_go_first():
    table = SlotTable(3)
    table.release(table.take("a").index)
    assert [table.take(name).index for name in "bcd"] == [1, 2, 0]


def test_generations_rise_with_each_taking_and_renewal():
    table = SlotTable(1)
    assert table.take("a").generation == WARM_UP_GENERATION + 1
    assert table.renew(0).generation == WARM_UP_GENERATION + 2
    table.release(0)
    assert table[0].generation == WARM_UP_GENERATION + 2
    assert table.take("b").generation == WARM_UP_GENERATION + 3


def test_free_and_busy_are_counted():
    table = SlotTable(2)
    assert (len(table), table.num_free) == (2, 2)
    table.take("a")
    assert table.num_free == 1
    assert [slot.request_id for slot in table] == ["a", None]
    table.release(0)
    assert table.num_free == 2


def test_errors():
    with pytest.raises(ValueError, match="num_slots is 0"):
        SlotTable(0)
    table = SlotTable(1)
    with pytest.raises(ValueError, match="slot 0 is free"):
        table.release(0)
    with pytest.raises(ValueError, match="slot 0 is free"):
        table.renew(0)
