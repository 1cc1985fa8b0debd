"""Random lives of the scheduler: what must hold after each step, and a long simulated day (B42)."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_driver import STEP_NS, Driver, make_limits, make_request

from scheduler_service.errors import InvalidArgumentError, QueueFullError
from scheduler_service.request import FinishReason, RequestState
from scheduler_service.step import PrefillChunk

VOCAB_SIZE = 12


def check_told(d: Driver) -> None:
    """What each request was told is what the fake gives it alone, as far as it went."""
    for told in d.told.values():
        alone = d.alone(told.request.request_id)
        assert told.tokens == alone[: len(told.tokens)]
        if told.end is None:
            continue
        if told.end.reason is FinishReason.LENGTH:
            assert told.tokens == alone
            assert len(alone) == told.request.max_new_tokens
        elif told.end.matched_token_id is not None:
            assert told.tokens == alone
            assert told.end.reason is FinishReason.STOP
            assert told.tokens[-1] == told.end.matched_token_id


def check_command(d: Driver, command) -> None:
    limits = d.limits
    chunks = [row for row in command.rows if isinstance(row, PrefillChunk)]
    num_decode = len(command.rows) - len(chunks)
    num_prefill = sum(len(row.token_ids) for row in chunks)
    assert num_decode + num_prefill <= limits.max_step_tokens
    if num_decode:
        assert num_prefill <= limits.max_mixed_step_tokens
    assert len(d.scheduler.outstanding) <= limits.max_outstanding
    assert 1 <= command.num_steps <= limits.max_steps_per_command


class SchedulerLife(RuleBasedStateMachine):
    """submit, plan, answer, cancel, stop, deadlines and lost workers in any order."""

    @initialize(
        num_slots=st.integers(1, 4),
        budget=st.integers(0, 9),
        mixed_budget=st.integers(1, 9),
        max_outstanding=st.integers(1, 3),
        max_steps=st.integers(1, 5),
        max_queue_len=st.integers(1, 6),
    )
    def begin(self, num_slots, budget, mixed_budget, max_outstanding, max_steps, max_queue_len):
        limits = make_limits(
            num_slots=num_slots,
            max_seq_len=40,
            max_step_tokens=num_slots + budget,
            max_mixed_step_tokens=mixed_budget,
            max_queue_len=max_queue_len,
            max_outstanding=max_outstanding,
            max_steps_per_command=max_steps,
            run_ahead_window_ns=4 * STEP_NS,
        )
        self.d = Driver(limits, vocab_size=VOCAB_SIZE)
        self.num_submitted = 0
        self.accepted: list[str] = []

    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=25),
        max_new=st.integers(1, 15),
        ends=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        deadline=st.none() | st.integers(0, 30),
    )
    def submit(self, prompt, max_new, ends, deadline):
        request_id = f"r{self.num_submitted}"
        self.num_submitted += 1
        deadline_ns = None if deadline is None else self.d.now_ns + deadline * STEP_NS
        request = make_request(
            request_id,
            tuple(prompt),
            max_new,
            end_token_ids=ends,
            deadline_ns=deadline_ns,
            seed=self.num_submitted,
        )
        try:
            self.d.submit(request)
        except QueueFullError:
            assert len(self.d.scheduler.queue) >= self.d.limits.max_queue_len
        else:
            self.accepted.append(request_id)

    @rule()
    def plan(self):
        command = self.d.plan()
        if command is not None:
            check_command(self.d, command)

    @precondition(lambda self: self.d.sent)
    @rule()
    def answer(self):
        self.d.answer()

    @rule(times=st.integers(1, 8))
    def run_a_while(self, times):
        for _ in range(times):
            self.d.step()

    @precondition(lambda self: self.d.scheduler.requests)
    @rule(data=st.data())
    def cancel(self, data):
        self.d.cancel(data.draw(st.sampled_from(sorted(self.d.scheduler.requests))))

    @precondition(lambda self: self.d.scheduler.requests)
    @rule(data=st.data())
    def stop(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.d.scheduler.requests)))
        released = len(self.d.told[request_id].tokens)
        self.d.stop(request_id, data.draw(st.integers(0, released)))

    @rule()
    def lose_worker(self):
        self.d.lose_worker()

    @rule(steps=st.integers(1, 20))
    def time_passes(self, steps):
        self.d.now_ns += steps * STEP_NS

    @invariant()
    def books_balance(self):
        scheduler = self.d.scheduler
        scheduler.check_integrity()
        views = scheduler.slot_views()
        busy = [view for view in views if view.state != "free"]
        assert len(busy) + scheduler.table.num_free == len(views) == self.d.limits.num_slots
        waiting = {request.request_id for request in scheduler.queue}
        running = {view.request_id for view in busy}
        assert len(running) == len(busy)
        assert not waiting & running
        ended = {name for name, told in self.d.told.items() if told.end is not None}
        assert waiting | running | ended == set(self.accepted)
        assert not ended & (waiting | running)

    @invariant()
    def first_come_first_served(self):
        order = [self.accepted.index(name) for name in self.d.admitted]
        assert order == sorted(order)
        for request in self.d.scheduler.queue:
            assert request.state is RequestState.WAITING
            assert not order or self.accepted.index(request.request_id) > order[-1]

    @invariant()
    def tokens_within_limits(self):
        for told in self.d.told.values():
            assert len(told.tokens) <= told.request.max_new_tokens

    def teardown(self):
        if not hasattr(self, "d"):
            return
        self.d.run(max_steps=2000)
        assert all(told.end is not None for told in self.d.told.values())
        check_told(self.d)
        counters = self.d.scheduler.counters
        ended = (
            counters.stop
            + counters.length
            + counters.cancelled
            + counters.deadline
            + counters.error
        )
        assert counters.accepted == len(self.accepted) == ended


SchedulerLife.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerLife = SchedulerLife.TestCase


def simulate(num_requests: int, seed: int) -> Driver:
    """B42: random lengths, 30 % cancelled, 5 % late, 2 % invalid, 1 % with a lost worker."""
    rng = random.Random(seed)
    limits = make_limits(num_slots=8, max_step_tokens=32, max_queue_len=64)
    d = Driver(limits, vocab_size=VOCAB_SIZE)
    for index in range(num_requests):
        while len(d.scheduler.queue) >= limits.max_queue_len:
            d.step()
        submit_random(d, rng, f"r{index}")
        if rng.random() < 0.02:
            with pytest.raises(InvalidArgumentError):
                d.submit(make_request(f"invalid{index}", (1,) * 60, max_new_tokens=5))
        if rng.random() < 0.30 and not d.scheduler.is_empty:
            d.cancel(rng.choice(list(d.scheduler.requests)))
        if rng.random() < 0.01:
            d.lose_worker()
        if rng.random() < 0.7:
            d.step()
        if index % 500 == 0:
            d.scheduler.check_integrity()
    d.run()
    return d


def submit_random(d: Driver, rng: random.Random, request_id: str) -> None:
    late = rng.random() < 0.05
    d.submit(
        make_request(
            request_id,
            tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))),
            rng.randint(1, 12),
            seed=rng.getrandbits(64),
            end_token_ids={rng.randrange(VOCAB_SIZE)} if rng.random() < 0.5 else (),
            deadline_ns=d.now_ns + rng.randint(0, 3) * STEP_NS if late else None,
        )
    )


@pytest.mark.parametrize("num_requests", [20_000])
def test_b42_takes_work_for_ever(num_requests):
    d = simulate(num_requests, seed=42)
    check_told(d)
    counters = d.scheduler.counters
    assert counters.accepted == num_requests
    assert all(told.end is not None for told in d.told.values())
    assert counters.cancelled > num_requests // 5
    assert counters.deadline > num_requests // 100
    assert d.epoch > num_requests // 200
    assert d.scheduler.table.num_free == 8
    assert d.scheduler.is_empty
