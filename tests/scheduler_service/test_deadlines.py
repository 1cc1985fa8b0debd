from __future__ import annotations

from scheduler_service.deadlines import Deadlines


def test_due_takes_out_what_is_at_or_before_now():
    deadlines = Deadlines()
    for name, at_ns in (("c", 30), ("a", 10), ("b", 20)):
        deadlines.add(name, at_ns)
    assert deadlines.next_ns == 10
    assert deadlines.due(9) == []
    assert deadlines.due(20) == ["a", "b"]
    assert deadlines.next_ns == 30
    assert deadlines.due(20) == []
    assert deadlines.due(30) == ["c"]
    assert deadlines.next_ns is None


def test_a_discarded_deadline_never_comes():
    deadlines = Deadlines()
    deadlines.add("a", 10)
    deadlines.add("b", 20)
    deadlines.discard("a")
    deadlines.discard("unknown")
    assert deadlines.next_ns <= 20
    assert deadlines.due(15) == []
    assert deadlines.next_ns == 20
    deadlines.discard("b")
    assert deadlines.next_ns is None
    assert "b" not in deadlines
