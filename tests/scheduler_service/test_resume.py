"""Requests that go on from the tokens that a former scheduler told."""

from __future__ import annotations

import dataclasses
import random

import pytest
from scheduler_driver import STEP_NS, Driver, make_limits, make_request

from fakes import FakeConstraint, logprobs_alone, tokens_alone
from scheduler_service.errors import DuplicateRequestError, InvalidArgumentError
from scheduler_service.request import FinishReason, Mask, Request, RequestState, Sampling, choice_id

VOCAB_SIZE = 40


def driver(**changes) -> Driver:
    limits = {"num_slots": 2, "max_seq_len": 128, "run_ahead_window_ns": 4 * STEP_NS} | changes
    return Driver(make_limits(**limits), vocab_size=VOCAB_SIZE)


def left_behind(request: Request, num_told: int) -> Request:
    """As its record would give it back, with the first num_told of its tokens."""
    told = tokens_alone(request, VOCAB_SIZE)[:num_told]
    fields = {}
    if request.constraint is not None:
        constraint = FakeConstraint(request.constraint.num_tokens, VOCAB_SIZE)
        fields = {"constraint": constraint, "first_mask": constraint.advance(tuple(told))}
    return dataclasses.replace(request, generated_token_ids=list(told), **fields)


@pytest.mark.parametrize("num_told", [0, 1, 7, 19])
@pytest.mark.parametrize(
    "sampling", [{}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.5}], ids=str
)
def test_it_goes_on_with_the_same_tokens(num_told, sampling):
    d = driver()
    fields = {"sampling": Sampling(0.8, 1.0, 0, 0.0, 9, **sampling), "min_new_tokens": 3}
    request = make_request("a", tuple(range(9)), 20, num_logprobs=1, **fields)
    d.resume(left_behind(request, num_told))
    d.run()
    told = d.told["a"]
    assert told.tokens == tokens_alone(request, VOCAB_SIZE)
    assert told.logprobs == logprobs_alone(request, told.tokens, VOCAB_SIZE)[1][num_told:]
    assert (told.end.reason, told.end.num_generated_tokens) == (FinishReason.LENGTH, 20)
    counters = d.scheduler.counters
    assert counters.num_generated_tokens == 20 - num_told
    assert (counters.accepted, counters.length) == (1, 1)
    assert told.end.time_to_first_token_ns > 0


@pytest.mark.parametrize("num_told", [0, 1, 5])
def test_its_mask_is_the_one_behind_its_tokens(num_told):
    constraint = FakeConstraint(9, VOCAB_SIZE)
    request = make_request("a", max_new_tokens=30, constraint=constraint)
    request.first_mask = constraint.advance(())
    d = driver()
    d.resume(left_behind(request, num_told))
    d.plan()
    d.scheduler.check_integrity()
    d.run()
    assert d.told["a"].tokens == tokens_alone(request, VOCAB_SIZE)
    assert (d.told["a"].end.reason, len(d.told["a"].tokens)) == (FinishReason.STOP, 9)


@pytest.mark.parametrize("num_told", [0, 3, 11])
def test_prompt_logprobs_that_were_told_are_not_told_again(num_told):
    d = driver()
    request = make_request("a", tuple(range(12)), 3, num_prompt_logprobs=2)
    request.num_prompt_logprobs_told = num_told
    wanted = logprobs_alone(request, (), VOCAB_SIZE)[0]
    d.scheduler.resume([request], 0)
    events = []
    while not d.scheduler.is_empty:
        command = d.scheduler.plan_step(0)
        events += d.scheduler.apply_result(d.worker.run(command), 0)
    logprobs = [one for event in events[:-2] for one in getattr(event, "logprobs", ())]
    assert logprobs[: 11 - num_told] == wanted[num_told:]


@pytest.mark.parametrize(
    ("fields", "tokens", "reason", "matched"),
    [
        ({"max_new_tokens": 3}, [1, 2, 3], FinishReason.LENGTH, None),
        ({"max_new_tokens": 3, "end_token_ids": {3}}, [1, 2, 3], FinishReason.STOP, 3),
        ({"end_token_ids": {2}}, [1, 2], FinishReason.STOP, 2),
        ({"first_mask": Mask(None, True)}, [1], FinishReason.STOP, None),
        ({"first_mask": Mask(None, False)}, [1], FinishReason.ERROR, None),
    ],
)
def test_one_that_has_reached_its_end_ends_at_once(fields, tokens, reason, matched):
    d = driver()
    if "first_mask" in fields:
        fields = {"constraint": FakeConstraint(1, VOCAB_SIZE), **fields}
    d.resume(make_request("a", generated_token_ids=tokens, **fields))
    end = d.told["a"].end
    assert (end.reason, end.matched_token_id) == (reason, matched)
    assert end.num_generated_tokens == len(tokens)
    assert d.told["a"].request.state is RequestState.FINISHED
    assert d.scheduler.is_empty
    assert d.scheduler.counters.num_generated_tokens == 0
    d.scheduler.check_integrity()
    assert d.plan() is None


def test_of_a_call_those_that_are_left_go_on():
    d = driver()
    names = [choice_id("call", index) for index in (1, 2, 4)]
    requests = [make_request(name, max_new_tokens=8, seed=i) for i, name in enumerate(names)]
    d.resume(*(left_behind(one, num) for one, num in zip(requests, (8, 3, 0), strict=True)))
    assert d.told[names[0]].end.reason is FinishReason.LENGTH
    with pytest.raises(DuplicateRequestError, match="'call'"):
        d.resume(make_request("call"))
    d.run()
    for request in requests:
        assert d.told[request.request_id].tokens == tokens_alone(request, VOCAB_SIZE)


def test_they_come_in_order_and_whatever_the_bounds():
    d = driver(num_slots=1, max_queue_len=1, max_queued_tokens=4, max_waiting_per_client=1)
    d.submit(make_request("first"))
    names = [f"r{index}" for index in range(9)]
    for name in names:
        d.resume(left_behind(make_request(name, max_new_tokens=4, seed=len(name)), 2))
    d.run()
    assert list(d.admitted) == ["first", *names]


def test_what_this_server_cannot_run_is_refused():
    d = driver(max_seq_len=16)
    with pytest.raises(InvalidArgumentError, match="the context holds 16"):
        d.resume(make_request("a", (1,) * 10, 10, generated_token_ids=[1]))
    assert d.scheduler.is_empty
    d.scheduler.check_integrity()


def test_its_own_tokens_may_be_found_in_the_cache():
    d = driver()
    request = make_request("a", tuple(range(30)), 20)
    told = tokens_alone(request, VOCAB_SIZE)[:10]
    d.submit(make_request("before", (*range(30), *told, 1), 2))
    d.run()
    d.resume(left_behind(request, 10))
    d.run()
    assert d.told["a"].tokens == tokens_alone(request, VOCAB_SIZE)
    assert d.told["a"].request.num_cached_tokens == 30
    assert d.worker.num_prefill_tokens < 30 + 10 + 30
    counters = d.scheduler.counters.prefix_cache
    assert counters.num_hit_tokens == 30 <= counters.num_queried_tokens


@pytest.mark.parametrize("seed", range(20))
def test_schedulers_die_one_after_the_other(seed):
    rng = random.Random(seed)
    d = driver(num_slots=3, max_step_tokens=64)
    requests = {}
    for index in range(12):
        name = f"r{index}"
        prompt = (1,) * rng.choice((0, 40)) + (index,) * rng.randint(1, 20)
        requests[name] = make_request(name, prompt, rng.randint(1, 30), seed=rng.getrandbits(20))
        d.submit(requests[name])
    told = {name: [] for name in requests}
    while not d.scheduler.is_empty:
        for _ in range(rng.randint(2, 9)):
            d.step()
        if rng.random() < 0.2:
            d.plan()
            d.lose_worker()
        told.update((name, one.tokens) for name, one in d.told.items())
        live = [name for name, one in d.told.items() if one.end is None]
        d = driver(num_slots=3, max_step_tokens=64)
        for name in live:
            request = requests[name]
            again = make_request(
                name,
                tuple(request.prompt_token_ids),
                request.max_new_tokens,
                sampling=request.sampling,
                generated_token_ids=list(told[name]),
            )
            d.resume(again)
        d.scheduler.check_integrity()
    for name, request in requests.items():
        request.generated_token_ids = []
        assert told[name] == tokens_alone(request, VOCAB_SIZE)
