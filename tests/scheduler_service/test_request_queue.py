from __future__ import annotations

import pytest
from scheduler_driver import make_request

from scheduler_service.errors import QueueFullError
from scheduler_service.request import ClientLimits
from scheduler_service.request_queue import Deadlines, FairQueue, RequestQueue, ServiceTime


def push(queue, request_id, num_tokens=3, spare=0, max_waiting=0, **fields):
    request = make_request(request_id, (1,) * num_tokens, **fields)
    queue.push([request], spare, 1.5, max_waiting)
    return request


def pop(queue):
    return queue.admit(queue.head().request_id)


def pop_all(queue):
    return "".join(pop(queue).request_id for _ in range(len(queue)))


def test_first_in_first_out():
    queue = RequestQueue(10)
    for name in "abc":
        push(queue, name)
    assert [request.request_id for request in queue] == ["a", "b", "c"]
    assert queue.remove("b").request_id == "b"
    push(queue, "d")
    assert pop_all(queue) == "acd"
    assert queue.head() is None
    with pytest.raises(KeyError):
        queue.admit("a")


def test_bounds():
    queue = RequestQueue(2, max_tokens=10)
    push(queue, "long", 50)
    with pytest.raises(QueueFullError, match=r"50 prompt tokens wait .* limit is 10") as caught:
        push(queue, "a", 1)
    assert caught.value.retry_after_s == 1.5
    pop(queue)
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
    pop(queue)
    assert queue.num_tokens == 100
    with pytest.raises(KeyError):
        queue.remove("b")
    assert queue.num_tokens == 100


def test_what_is_appended_knows_no_bounds_and_comes_last():
    queue = RequestQueue(1, max_tokens=5)
    push(queue, "a", 5)
    queue.append([make_request(name, (1,) * 9) for name in "bc"])
    assert (len(queue), queue.num_tokens) == (3, 23)
    with pytest.raises(QueueFullError, match="3 requests wait, the limit is 1"):
        push(queue, "d", 1)
    assert pop_all(queue) == "abc"


@pytest.mark.parametrize("kind", [RequestQueue, FairQueue])
def test_a_client_at_its_limit_is_passed_over_until_one_of_its_own_ends(kind):
    queue = kind(10)
    limits = ClientLimits(max_running=2)
    for name in "abcd":
        push(queue, name, client="x", client_limits=limits)
    push(queue, "y", client="y")
    running = [pop(queue) for _ in range(3)]
    order = "aby" if kind is RequestQueue else "ayb"
    assert [one.request_id for one in running] == list(order)
    assert queue.head() is None
    assert [one.request_id for one in queue] == ["c", "d"]
    queue.release(running[0])
    assert pop(queue).request_id == "c"
    assert queue.head() is None
    assert queue.num_running == {"x": 2, "y": 1}


def test_fair_shares_go_to_the_client_with_the_fewest_running():
    queue = FairQueue(100)
    for name in "abcd":
        push(queue, name, client="many")
    push(queue, "x", client="one")
    push(queue, "y", client="two")
    # All have none running: the longest wait goes first, then each has one.
    assert [pop(queue).request_id for _ in range(3)] == ["a", "x", "y"]
    push(queue, "z", client="one")
    assert pop(queue).request_id == "b"
    assert pop(queue).request_id == "z"
    assert pop_all(queue) == "cd"


def test_first_come_first_served_knows_no_clients():
    queue = RequestQueue(100)
    for name, client in zip("abcdef", "xxxyxy", strict=True):
        push(queue, name, client=client)
    assert pop_all(queue) == "abcdef"


@pytest.mark.parametrize("kind", [RequestQueue, FairQueue])
def test_a_client_may_let_so_many_wait(kind):
    queue = kind(10)
    push(queue, "a", client="x", max_waiting=2)
    push(queue, "b", client="x", max_waiting=2)
    with pytest.raises(
        QueueFullError, match=r"2 requests of this client wait or begin to run, .* client is 2;"
    ) as caught:
        push(queue, "c", client="x", max_waiting=2)
    assert caught.value.retry_after_s == 1.5
    push(queue, "c", client="y", max_waiting=2)
    push(queue, "d", client="x", max_waiting=2, spare=1)
    queue.remove("a")
    with pytest.raises(QueueFullError, match="of this client wait or begin to run and 2 more came"):
        queue.push([make_request(name, client="x") for name in ("e", "f")], 1, 1.5, 2)
    assert queue.num_waiting_of("x") == 2


def test_seats_that_a_client_may_not_take_are_no_seats_for_it():
    queue = RequestQueue(10)
    fields = {"client": "x", "client_limits": ClientLimits(max_running=1), "max_waiting": 1}
    push(queue, "a", spare=5, **fields)
    push(queue, "b", spare=5, **fields)
    with pytest.raises(QueueFullError, match="2 requests of this client"):
        push(queue, "c", spare=5, **fields)
    pop(queue)
    with pytest.raises(QueueFullError, match="1 requests of this client"):
        push(queue, "c", spare=5, **fields)


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


def test_when_to_retry_is_when_a_slot_is_free():
    time = ServiceTime()
    assert (time.retry_after_s(1), time.retry_after_s(4)) == (1.0, 0.25)
    for _ in range(100):
        time.observe(8 * 10**9)
    assert time.retry_after_s(4) == pytest.approx(2.0, rel=1e-3)
