from __future__ import annotations

import pytest

from scheduler_service.slots import WARM_UP_GENERATION, SlotTable


def take_first(table, request_id="r"):
    return table.take(table.free()[0], request_id)


def test_free_slots_least_recently_used_then_lowest_index():
    table = SlotTable(4, 4)
    assert table.free() == [0, 1, 2, 3]
    assert [take_first(table).index for _ in range(4)] == [0, 1, 2, 3]
    for index in (2, 0, 3):
        table.release(index)
    assert table.free() == [2, 0, 3]


def test_slots_never_used_go_first():
    table = SlotTable(3, 3)
    table.release(take_first(table).index)
    assert table.free() == [1, 2, 0]


def test_generations_rise_with_each_taking_and_renewal():
    table = SlotTable(1, 1)
    assert table.take(0, "a").generation == WARM_UP_GENERATION + 1
    assert table.renew(0).generation == WARM_UP_GENERATION + 2
    table.release(0)
    assert table[0].generation == WARM_UP_GENERATION + 2
    assert table.take(0, "b").generation == WARM_UP_GENERATION + 3


def test_free_and_busy_are_counted():
    table = SlotTable(2, 2)
    assert (len(table), table.num_free, table.num_spare) == (2, 2, 2)
    table.take(1, "a")
    assert (table.num_free, table.num_spare) == (1, 1)
    assert [slot.request_id for slot in table] == [None, "a"]
    table.release(1)
    assert (table.num_free, table.num_spare) == (2, 2)


def test_fewer_run_than_there_are_slots_each_in_a_decode_row_of_its_own():
    table = SlotTable(5, 2)
    assert [table.take(index, "r").decode_row for index in (3, 1)] == [0, 1]
    assert (table.num_free, table.num_spare) == (3, 0)
    with pytest.raises(LookupError, match="2 slots are busy, no more may be"):
        table.take(0, "r")
    table.release(3)
    assert table[3].decode_row == -1
    assert table.take(4, "r").decode_row == 0


def test_errors():
    with pytest.raises(ValueError, match="num_slots is 0"):
        SlotTable(0, 1)
    with pytest.raises(ValueError, match="max_running is 3; 1 to 2"):
        SlotTable(2, 3)
    table = SlotTable(2, 2)
    with pytest.raises(ValueError, match="slot 0 is free"):
        table.release(0)
    with pytest.raises(ValueError, match="slot 0 is free"):
        table.renew(0)
    table.take(0, "a")
    with pytest.raises(LookupError, match="slot 0 is busy"):
        table.take(0, "b")
