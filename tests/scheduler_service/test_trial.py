"""Requests that the workers die of, and those that only ran beside them."""

from __future__ import annotations

import random

import pytest
from scheduler_driver import STEP_NS, Driver, WorkerDiedError, make_limits, make_request

from fakes import FakeConstraint, logprobs_alone
from scheduler_service.request import FinishReason, choice_id
from scheduler_service.seat import Seat
from scheduler_service.step import Outstanding, PlannedRow
from scheduler_service.trial import MIN_TRIAL_TOKENS, Trial

POISON_TOKEN = 666


def driver(script=None, **changes) -> Driver:
    limits = {"num_slots": 4, "run_ahead_window_ns": 4 * STEP_NS, "max_seq_len": 128} | changes
    return Driver(make_limits(**limits), script)


def check_given_up(d: Driver, request_id: str, num_tokens: int = 0) -> None:
    told = d.told[request_id]
    assert (told.end.reason, told.end.status) == (FinishReason.ERROR, "INTERNAL")
    assert "died of this request twice" in told.end.message
    assert told.tokens == d.alone(request_id)[:num_tokens]
    assert told.end.num_generated_tokens == num_tokens


def check_whole(d: Driver, *names: str) -> None:
    for name in names:
        told = d.told[name]
        assert told.end.reason is FinishReason.LENGTH, (name, told.end)
        assert told.tokens == d.alone(name)


def test_a_request_alone_is_given_up_at_the_second_loss():
    d = driver()
    d.poison = {"p"}
    d.submit(make_request("p"))
    for num_losses in (1, 2):
        assert d.told["p"].end is None
        d.step()
        assert d.num_losses == num_losses
    check_given_up(d, "p")
    assert (d.scheduler.counters.error, d.scheduler.counters.poisoned) == (1, 1)
    d.submit(make_request("good", max_new_tokens=20))
    d.run()
    check_whole(d, "good")
    assert d.num_losses == 2


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("after", [0, 3, 6])
def test_only_the_poisoned_one_of_many_is_given_up(place, after):
    d = driver()
    names = [f"r{index}" for index in range(8)]
    for index, name in enumerate(names):
        d.submit(make_request(name, (index, *range(12)), 30, seed=index))
    for _ in range(after):
        d.step()
    d.poison = {names[place]}
    d.run()
    check_given_up(d, names[place], len(d.told[names[place]].tokens))
    check_whole(d, *(name for name in names if name != names[place]))
    # Beside the others, and alone twice.
    assert d.num_losses == 3
    assert d.scheduler.counters.poisoned == 1


@pytest.mark.parametrize("num_poisoned", [2, 3, 4])
def test_several_poisoned_ones_are_found_one_by_one(num_poisoned):
    d = driver()
    names = [f"r{index}" for index in range(8)]
    for name in names:
        d.submit(make_request(name, max_new_tokens=25))
    d.poison = set(names[:num_poisoned])
    d.run()
    for name in d.poison:
        check_given_up(d, name)
    check_whole(d, *names[num_poisoned:])
    assert d.num_losses <= 1 + 2 * num_poisoned


@pytest.mark.parametrize("at", range(2, 48, 3))
@pytest.mark.parametrize("is_early", [False, True])
def test_a_token_that_kills_is_met_twice_at_most(at, is_early):
    """However far ahead of it the commands are that were lost. Early: the worker meets it before
    the results of earlier commands have arrived."""

    def script(tokens):
        if len(tokens) == 3 + at:
            raise WorkerDiedError

    d = driver(script, max_steps_per_command=20, run_ahead_window_ns=50 * STEP_NS)
    d.submit(make_request("p", max_new_tokens=60))
    while is_early and not d.num_losses:
        while d.plan() is not None:
            pass
        if d.scheduler.seats[0].num_generated_planned > at:
            d.lose_worker()
        else:
            d.step()
    d.run()
    told = d.told["p"]
    assert told.end.status == "INTERNAL"
    assert d.num_losses == 2
    assert len(told.tokens) <= at


@pytest.mark.parametrize("num_calls", [2, 5, 8])
def test_progress_by_the_rebuild_alone_does_not_save_it(num_calls):
    """A request whose prefill passes and whose decode kills brings a token in each life."""
    calls: dict[int, int] = {}

    def script(tokens):
        calls[d.epoch] = calls.get(d.epoch, 0) + 1
        if calls[d.epoch] == num_calls:
            raise WorkerDiedError

    d = driver(script)
    d.submit(make_request("p", max_new_tokens=60))
    d.run()
    assert d.told["p"].end.status == "INTERNAL"
    assert d.num_losses == 2


@pytest.mark.parametrize("num_requests", [1, 2, 7])
@pytest.mark.parametrize("seed", range(2))
def test_hundreds_of_kills_from_outside_convict_nobody(num_requests, seed):
    """Each as soon as somebody was told a new token, or a while later."""
    rng = random.Random(seed)
    d = driver(prefix_reuse=rng.choice(list(type(make_limits().prefix_reuse))))
    names = [f"r{index}" for index in range(num_requests)]
    num_kills = 0
    while num_kills < 200:
        if all(name not in d.told or d.told[name].end for name in names):
            names = [f"r{num_kills}-{index}" for index in range(num_requests)]
            for name in names:
                prompt = (1,) * rng.randint(1, 60)
                d.submit(make_request(name, prompt, rng.randint(1, 60), seed=rng.getrandbits(9)))
        d.step()
        if d.has_told and rng.random() < rng.choice((1, 0.1)):
            d.plan()
            d.lose_worker()
            num_kills += 1
        d.scheduler.check_integrity()
    d.run()
    check_whole(d, *d.told)


def test_a_loss_with_nothing_in_flight_suspects_nobody():
    d = driver()
    d.lose_worker()
    d.submit(make_request("a"))
    for _ in range(3):
        d.lose_worker()
    assert not d.scheduler.trial.is_on
    d.run()
    check_whole(d, "a")


def test_while_a_suspect_is_on_trial_the_others_wait_and_nobody_is_admitted():
    d = driver(max_outstanding=2)
    for name in "abc":
        d.submit(make_request(name, (ord(name), *range(20)), 40))
    for _ in range(8):
        d.step()
    d.plan()
    d.lose_worker()
    d.submit(make_request("late", max_new_tokens=20))
    order: list[str] = []
    while d.scheduler.trial.is_on:
        assert "late" not in d.admitted
        command = d.plan()
        if command is None:
            d.answer()
        else:
            in_flight = {
                d.tenants[row.slot, row.generation]
                for step in d.scheduler.outstanding
                for row in step.rows
            }
            (name,) = in_flight
            order.append(name)
    assert set(order) == {"a", "b", "c"}
    assert order == sorted(order)
    d.run()
    check_whole(d, "a", "b", "c", "late")


def test_a_suspect_is_told_nothing_until_it_is_cleared():
    d = driver()
    d.submit(make_request("a", max_new_tokens=40))
    d.plan()
    d.lose_worker()
    while not d.told["a"].tokens:
        d.step()
    assert len(d.told["a"].tokens) >= MIN_TRIAL_TOKENS
    assert not d.scheduler.trial.is_on
    assert d.told["a"].request.first_token_ns == d.now_ns


def on_trial(d: Driver, **fields) -> None:
    """Request "a" has a strike, tokens that nobody was told, and more in flight; "b" waits."""
    d.submit(make_request("a", max_new_tokens=40, **fields))
    d.step()
    d.plan()
    d.lose_worker()
    d.submit(make_request("b", max_new_tokens=5))
    for _ in range(2):
        d.step()
    assert d.told["a"].request.num_untold > 0
    assert d.scheduler.trial.suspects["a"].num_strikes == 1


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
def test_what_ends_on_trial_has_the_tokens_that_it_was_told(reason):
    d = driver(max_steps_per_command=1)
    on_trial(d)
    num_told = len(d.told["a"].tokens)
    d.cancel("a", reason)
    assert d.told["a"].end.num_generated_tokens == num_told < 4
    assert d.scheduler.counters.num_generated_tokens == num_told
    d.scheduler.check_integrity()
    d.run()
    check_whole(d, "b")


def test_a_stop_on_trial_counts_what_was_told():
    d = driver(max_steps_per_command=1)
    on_trial(d)
    num_told = len(d.told["a"].tokens)
    with pytest.raises(ValueError, match=rf"{num_told} were released"):
        d.stop("a", num_told + 1)
    d.stop("a", num_told)
    d.run()
    check_whole(d, "b")


def test_a_row_of_a_cancelled_request_may_be_what_killed():
    """Then the one beside it has no strike, though it is the only one left."""
    d = driver(max_outstanding=2)
    d.submit(make_request("p"))
    d.poison = {"p"}
    d.plan()
    d.cancel("p")
    d.submit(make_request("a", max_new_tokens=30))
    d.plan()
    d.answer()
    assert d.num_losses == 1
    assert d.scheduler.trial.suspects["a"].num_strikes == 0
    d.run()
    check_whole(d, "a")


def test_answers_of_a_call_are_suspected_each_alone():
    d = driver()
    names = [choice_id("call", index) for index in range(3)]
    d.submit(*(make_request(name, max_new_tokens=20, seed=i) for i, name in enumerate(names)))
    d.poison = {names[1]}
    d.run()
    check_given_up(d, names[1])
    check_whole(d, names[0], names[2])


@pytest.mark.parametrize("lost_after", range(2, 9))
def test_logprobs_and_masks_come_through_a_trial(lost_after):
    d = Driver(make_limits(run_ahead_window_ns=4 * STEP_NS), vocab_size=40)
    constraint = FakeConstraint(14, 40)
    first = constraint.advance(())
    fields = {"num_logprobs": 2, "num_prompt_logprobs": 1}
    d.submit(make_request("c", constraint=constraint, first_mask=first, max_new_tokens=30))
    d.submit(make_request("l", tuple(range(12)), max_new_tokens=14, **fields))
    for _ in range(lost_after):
        d.step()
    d.plan()
    d.lose_worker()
    d.run()
    for name in "cl":
        assert d.told[name].tokens == d.alone(name)
    of_prompt, of_tokens = logprobs_alone(d.told["l"].request, d.told["l"].tokens, 40)
    assert d.told["l"].logprobs == of_tokens
    assert d.told["l"].prompt_logprobs == of_prompt
    assert d.told["c"].end.num_generated_tokens == 14


def test_what_a_trial_costs():
    """For each suspect its prompt and some steps alone; printed for docs (-s)."""
    for num_requests in (1, 8):
        costs = []
        for is_lost in (False, True):
            d = driver(num_slots=8, max_step_tokens=64, max_mixed_step_tokens=64)
            for index in range(num_requests):
                d.submit(make_request(f"r{index}", (index, *range(20)), 60))
            for _ in range(10):
                d.step()
            start_ns = d.now_ns
            if is_lost:
                d.plan()
                d.lose_worker()
            while not all(len(told.tokens) > 50 or told.end for told in d.told.values()):
                d.step()
            costs.append((d.now_ns - start_ns) // STEP_NS)
        print(f"{num_requests} requests: {costs[0]} steps undisturbed, {costs[1]} with a loss")
        extra = costs[1] - costs[0]
        # A chunk and the tokens of the trial each, those of a command more for the one in flight.
        assert extra <= num_requests * (1 + 3 * MIN_TRIAL_TOKENS)


def test_each_loss_says_anew_what_a_suspect_must_get_past():
    request = make_request("p", max_new_tokens=60)
    seat = Seat(request, 0, 1, 0)
    steps = [Outstanding(1, 1, 1, (PlannedRow(0, 1, 0, 1), PlannedRow(1, 1, 0, 1)), 0)]
    trial = Trial()
    for num_tokens, num_planned, clear_at in ((0, 1, MIN_TRIAL_TOKENS), (5, 30, 30)):
        request.generated_token_ids = [1] * num_tokens
        seat.num_generated_planned = num_planned
        assert trial.judge(steps, {0: seat}) == []
        assert trial.suspects["p"].clear_at == clear_at
