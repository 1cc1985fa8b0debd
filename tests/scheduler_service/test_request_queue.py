from __future__ import annotations

import pytest
from scheduler_driver import make_request

from scheduler_service.errors import QueueFullError
from scheduler_service.request_queue import Deadlines, RequestQueue


def push(queue, request_id, num_tokens=3, spare=0):
    queue.push([make_request(request_id, (1,) * num_tokens)], spare, retry_after_s=1.5)


def test_first_in_first_out():
    queue = RequestQueue(10)
    for name in "abc":
        push(queue, name)
    assert [request.request_id for request in queue] == ["a", "b", "c"]
    assert queue.remove("b").request_id == "b"
    push(queue, "d")
    popped = [queue.pop() for _ in range(3)]
    assert [request.request_id for request in popped] == ["a", "c", "d"]
    with pytest.raises(KeyError):
        queue.pop()


def test_bounds():
    queue = RequestQueue(2, max_tokens=10)
    push(queue, "long", 50)
    with pytest.raises(QueueFullError, match=r"50 prompt tokens wait .* limit is 10") as caught:
        push(queue, "a", 1)
    assert caught.value.retry_after_s == 1.5
    queue.pop()
    push(queue, "a", 5)
    push(queue, "b", 5)
    with pytest.raises(QueueFullError, match="2 requests wait, the limit is 2"):
        push(queue, "c", 0)
    push(queue, "c", 0, spare=1)
    assert len(queue) == 3


def test_tokens_are_counted_in_and_out():
    queue = RequestQueue(5)
    for name, num_tokens in (("a", 1), ("b", 10), ("c", 100)):
        push(queue, name, num_tokens)
    assert queue.num_tokens == 111
    queue.remove("b")
    assert queue.num_tokens == 101
    queue.pop()
    assert queue.num_tokens == 100
    with pytest.raises(KeyError):
        queue.remove("b")
    assert queue.num_tokens == 100


@pytest.mark.parametrize(("max_len", "max_tokens"), [(0, 0), (-1, 0), (1, -1)])
def test_bounds_that_cannot_be(max_len, max_tokens):
    with pytest.raises(ValueError, match=r"is -?[01]"):
        RequestQueue(max_len, max_tokens)


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
