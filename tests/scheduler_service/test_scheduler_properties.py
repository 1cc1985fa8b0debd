"""Random lives of the scheduler: what must hold after each step, and a long simulated day (B42)."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_driver import STEP_NS, Driver, make_limits, make_request

from fakes import FakeConstraint, logprobs_alone
from scheduler_service.errors import InvalidArgumentError, QueueFullError
from scheduler_service.prefix_index import PrefixReuse
from scheduler_service.request import (
    NO_CLIENT_LIMITS,
    ClientLimits,
    FinishReason,
    RequestState,
    Sampling,
    choice_id,
)
from scheduler_service.step import PrefillChunk

VOCAB_SIZE = 12


def check_told(d: Driver) -> None:
    """What each request was told is what the fake gives it alone, as far as it went."""
    for told in d.told.values():
        alone = d.alone(told.request.request_id)
        assert told.tokens == alone[: len(told.tokens)]
        logprobs = logprobs_alone(told.request, told.tokens, d.vocab_size)
        prompt_logprobs = logprobs[0] if told.tokens else logprobs[0][: len(told.prompt_logprobs)]
        assert (told.prompt_logprobs, told.logprobs) == (prompt_logprobs, logprobs[1])
        if told.end is None:
            continue
        constraint = told.request.constraint
        if told.request.request_id in d.poison:
            assert not told.tokens
            assert told.end.matched_token_id is None
            assert told.end.reason is not FinishReason.LENGTH
        elif told.end.reason is FinishReason.ERROR:
            assert told.end.status == "FAILED_PRECONDITION"
            assert len(alone) == constraint.num_tokens
            assert not constraint.is_complete
            assert told.tokens == alone
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
    num_logprobs_steps = sum(step.num_logprobs_steps for step in d.scheduler.outstanding)
    assert num_logprobs_steps <= limits.max_logprobs_steps
    assert 1 <= command.num_steps <= limits.max_steps_per_command


# Prompts are made of these: long enough to be waited for and copied, and most begin alike.
BLOCKS = [(1,) * 20, (2, 3) * 10, tuple(range(VOCAB_SIZE)) * 2]
PROMPTS = st.builds(
    lambda blocks, tail: (*(token_id for block in blocks for token_id in block), *tail),
    st.lists(st.sampled_from(BLOCKS), max_size=4),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6),
)
# By client. "solo" may run one request at a time.
CLIENTS = {"": NO_CLIENT_LIMITS, "solo": ClientLimits(1, 0), "few": ClientLimits(2, 3)}
SAMPLINGS = st.sampled_from(
    [
        {},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.5, "logit_bias": ((1, 2.0),)},
    ]
)


class SchedulerLife(RuleBasedStateMachine):
    """submit, plan, answer, cancel, stop, flush, deadlines and lost workers in any order."""

    @initialize(
        num_slots=st.integers(1, 5),
        max_running=st.integers(1, 5),
        reuse=st.sampled_from(PrefixReuse),
        budget=st.integers(0, 60),
        mixed_budget=st.integers(1, 60),
        max_outstanding=st.integers(1, 3),
        max_steps=st.integers(1, 5),
        max_queue_len=st.integers(1, 6),
        max_logprobs_steps=st.integers(1, 6),
        fair_share=st.booleans(),
        max_waiting_per_client=st.sampled_from([0, 0, 2]),
    )
    def begin(
        self,
        num_slots,
        max_running,
        reuse,
        budget,
        mixed_budget,
        max_outstanding,
        max_steps,
        max_queue_len,
        max_logprobs_steps,
        fair_share,
        max_waiting_per_client,
    ):
        limits = make_limits(
            num_slots=num_slots,
            fair_share=fair_share,
            max_waiting_per_client=max_waiting_per_client,
            max_running=min(max_running, num_slots),
            prefix_reuse=reuse,
            max_logprobs_steps=max_logprobs_steps,
            max_seq_len=120,
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
        prompt=PROMPTS,
        max_new=st.integers(1, 15),
        ends=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        deadline=st.none() | st.integers(0, 30),
        salt=st.sampled_from(["", "", "", "x"]),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        sampling=SAMPLINGS,
        constrained=st.sampled_from([None, None, (3, True), (9, True), (4, False)]),
        num_answers=st.sampled_from([1, 1, 1, 2, 4]),
        client=st.sampled_from(["", "", *CLIENTS]),
        is_poisoned=st.integers(0, 9).map(lambda number: number == 9),
    )
    def submit(
        self,
        prompt,
        max_new,
        ends,
        deadline,
        salt,
        logprobs,
        prompt_logprobs,
        sampling,
        constrained,
        num_answers,
        client,
        is_poisoned,
    ):
        self.num_submitted += 1
        deadline_ns = None if deadline is None else self.d.now_ns + deadline * STEP_NS
        requests = []
        for index in range(num_answers):
            seed = 10 * self.num_submitted + index
            fields = {}
            if constrained is not None:
                constraint = FakeConstraint(constrained[0], VOCAB_SIZE, constrained[1])
                fields = {"constraint": constraint, "first_mask": constraint.advance(())}
            requests.append(
                make_request(
                    choice_id(f"r{self.num_submitted}", index),
                    prompt,
                    max_new,
                    end_token_ids=ends,
                    deadline_ns=deadline_ns,
                    sampling=Sampling(0.8, 1.0, 0, 0.0, seed, **sampling),
                    cache_salt=salt,
                    num_logprobs=logprobs,
                    num_prompt_logprobs=prompt_logprobs,
                    client=client,
                    client_limits=CLIENTS[client],
                    **fields,
                )
            )
        limits, queue = self.d.limits, self.d.scheduler.queue
        num_waiting, of_client = len(queue), queue.num_waiting_of(client)
        max_waiting = limits.max_waiting_of(requests[0])
        try:
            self.d.submit(*requests)
        except QueueFullError:
            is_full = num_waiting + num_answers > limits.max_queue_len
            assert is_full or max_waiting < of_client + num_answers
            assert is_full or max_waiting
            assert len(queue) == num_waiting
        except InvalidArgumentError:
            bounds = [limits.max_queue_len + limits.max_running]
            if max_waiting:
                bounds.append(max_waiting + limits.max_running_of(requests[0]))
            assert num_answers > min(bounds)
        else:
            self.accepted += [request.request_id for request in requests]
            if is_poisoned:
                self.d.poison.add(requests[-1].request_id)

    @rule()
    def plan(self):
        command = self.d.plan()
        if command is not None:
            check_command(self.d, command)

    @precondition(lambda self: self.d.sent)
    @rule()
    def answer(self):
        self.d.answer()

    @precondition(lambda self: self.d.masks_due)
    @rule(data=st.data())
    def give_mask(self, data):
        """Also one that its request did not live to see."""
        self.d.give_mask(data.draw(st.sampled_from(sorted(self.d.masks_due))))

    @rule()
    def flush(self):
        num_tokens = self.d.scheduler.num_cached_tokens
        assert self.d.scheduler.flush() == num_tokens
        assert self.d.scheduler.num_cached_tokens == 0

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

    @precondition(lambda self: self.d.has_told or not self.d.sent)
    @rule()
    def lose_worker(self):
        """Through no request's fault, and not again before somebody was told a new token."""
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
        running = {choice_id(view.request_id, view.choice_index) for view in busy}
        assert len(busy) <= self.d.limits.max_running
        assert sum(view.num_cached_tokens for view in views) == scheduler.num_cached_tokens
        assert len(running) == len(busy)
        assert not waiting & running
        ended = {name for name, told in self.d.told.items() if told.end is not None}
        assert waiting | running | ended == set(self.accepted)
        assert not ended & (waiting | running)

    @invariant()
    def first_come_first_served(self):
        """Among the requests of each client."""
        last: dict[str, int] = {}
        for name in [*self.d.admitted, *(one.request_id for one in self.d.scheduler.queue)]:
            request, place = self.d.told[name].request, self.accepted.index(name)
            assert last.get(request.client, -1) < place
            last[request.client] = place
        for request in self.d.scheduler.queue:
            assert request.state is RequestState.WAITING

    @invariant()
    def clients_keep_to_their_limits(self):
        for client, limits in CLIENTS.items():
            num_running = self.d.scheduler.queue.num_running[client]
            assert not limits.max_running or num_running <= limits.max_running

    @invariant()
    def tokens_within_limits(self):
        for told in self.d.told.values():
            assert len(told.tokens) <= told.request.max_new_tokens
            assert told.request.num_cached_tokens < len(told.request.prompt_token_ids)

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
        cached = [told.request.num_cached_tokens for told in self.d.told.values()]
        assert counters.prefix_cache.num_hit_tokens == sum(cached)
        assert counters.prefix_cache.num_hits == sum(number > 0 for number in cached)


SchedulerLife.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerLife = SchedulerLife.TestCase


def simulate(num_requests: int, seed: int) -> Driver:
    """B42: random lengths, 30 % cancelled, 5 % late, 2 % invalid, 1 % with a lost worker."""
    rng = random.Random(seed)
    limits = make_limits(num_slots=8, max_running=6, max_step_tokens=32, max_queue_len=64)
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
        if rng.random() < 0.01 and d.has_told:
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
            rng.choice(BLOCKS)[: rng.choice((0, 20))]
            + tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))),
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
    assert counters.prefix_cache.num_hits > num_requests // 4
    assert counters.prefix_cache.num_copies > num_requests // 20
    assert d.scheduler.is_empty
