"""The scheduler's policy and its edges, with a fake worker."""

from __future__ import annotations

import dataclasses

import pytest
from scheduler_driver import STEP_NS, Driver, make_limits, make_request

from fakes import CORRUPTED, FakeConstraint, logprobs_alone
from scheduler_service.errors import (
    DuplicateRequestError,
    InvalidArgumentError,
    QueueFullError,
    UnknownRequestError,
)
from scheduler_service.request import (
    FinishReason,
    Mask,
    RequestState,
    Sampling,
    TokenLogprobs,
    choice_id,
)
from scheduler_service.scheduler import Scheduler
from scheduler_service.step import (
    DecodeRow,
    LogitAdjustment,
    PrefillChunk,
    ResultError,
    RowResult,
)


def driver(script=None, **changes) -> Driver:
    return Driver(make_limits(**changes), script)


def test_one_request_runs_to_its_limit():
    d = driver()
    d.submit(make_request("a", prompt=tuple(range(20)), max_new_tokens=5))
    d.run()
    told = d.told["a"]
    assert told.tokens == d.alone("a")
    assert told.end is not None
    assert told.end.reason is FinishReason.LENGTH
    assert told.end.num_generated_tokens == 5
    assert told.end.num_prompt_tokens == 20


@pytest.mark.parametrize("max_outstanding", [1, 2, 3])
@pytest.mark.parametrize("max_steps_per_command", range(1, 9))
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 16])
def test_b15_exactly_as_many_tokens_as_asked(
    max_outstanding, max_steps_per_command, max_new_tokens
):
    d = driver(
        max_outstanding=max_outstanding,
        max_steps_per_command=max_steps_per_command,
        run_ahead_window_ns=100 * STEP_NS,
    )
    # A first request, so that the pace is known and commands have several steps.
    d.submit(make_request("warm", max_new_tokens=4))
    d.run()
    for name in "abc":
        d.submit(make_request(name, (ord(name), 2), max_new_tokens, seed=ord(name)))
    d.run()
    for name in "abc":
        assert d.told[name].tokens == d.alone(name)
        assert len(d.told[name].tokens) == max_new_tokens
        assert d.told[name].end.num_generated_tokens == max_new_tokens
        assert d.told[name].end.reason is FinishReason.LENGTH
    assert d.worker.num_forwards <= 3 * max_new_tokens + 8


def test_b15_no_step_is_spent_past_the_limit():
    d = driver(max_steps_per_command=8, run_ahead_window_ns=100 * STEP_NS)
    d.submit(make_request("a", max_new_tokens=11))
    d.run()
    assert d.worker.num_forwards == 11


def test_several_decode_steps_fill_the_window():
    d = driver(max_steps_per_command=8, run_ahead_window_ns=4 * STEP_NS)
    d.submit(make_request("a", max_new_tokens=40))
    sizes = []
    while not d.scheduler.is_empty:
        while (command := d.plan()) is not None:
            sizes.append(command.num_steps)
        d.answer()
    assert max(sizes) == 4
    assert sizes[0] == 1


def test_the_longest_need_sets_the_number_of_steps():
    d = driver(max_steps_per_command=8, run_ahead_window_ns=4 * STEP_NS, max_outstanding=1)
    d.submit(make_request("warm", max_new_tokens=9))
    d.run()
    d.submit(make_request("short", max_new_tokens=2))
    d.submit(make_request("long", max_new_tokens=20))
    d.step()
    assert d.plan().num_steps == 4
    d.run()
    assert [len(d.told[name].tokens) for name in ("short", "long")] == [2, 20]


def test_run_ahead_keeps_two_commands_outstanding():
    d = driver()
    d.submit(make_request("a", max_new_tokens=20))
    assert d.plan() is not None
    second = d.plan()
    assert second is not None
    assert isinstance(second.rows[0], DecodeRow), "decodes before the first token is known"
    assert d.plan() is None


@pytest.mark.parametrize("ignore", [False, True])
def test_b07_any_end_id_stops_and_is_named(ignore):
    forced = [26194, 13, 151643, 33975]
    d = driver(script=lambda tokens: forced[len(tokens) - 3] if len(tokens) < 7 else None)
    end_ids = () if ignore else (151645, 151643)
    d.submit(make_request("a", max_new_tokens=4, end_token_ids=end_ids))
    d.run()
    told = d.told["a"]
    if ignore:
        assert told.tokens == forced
        assert told.end.reason is FinishReason.LENGTH
        assert told.end.matched_token_id is None
    else:
        assert told.tokens == forced[:3]
        assert told.end.reason is FinishReason.STOP
        assert told.end.matched_token_id == 151643
        assert told.end.num_generated_tokens == 3


@pytest.mark.parametrize("max_new_tokens", [1, 5])
def test_the_token_of_prefill_may_be_the_end(max_new_tokens):
    d = driver(script=lambda tokens: 9)
    d.submit(make_request("a", max_new_tokens=max_new_tokens, end_token_ids=(9,)))
    d.run()
    assert d.told["a"].tokens == [9]
    assert d.told["a"].end.reason is FinishReason.STOP


def test_tokens_past_a_stop_are_dropped():
    d = driver()
    d.submit(make_request("a", max_new_tokens=30))
    while len(d.told["a"].tokens) < 5:
        d.step()
    d.plan()
    d.stop("a", 3)
    assert d.told["a"].end.reason is FinishReason.STOP
    assert d.told["a"].end.num_generated_tokens == 3
    d.submit(make_request("b", (8, 9), 6, seed=3))
    d.run()
    assert d.told["b"].tokens == d.alone("b")


def test_stop_counts_only_released_tokens():
    d = driver()
    d.submit(make_request("a", max_new_tokens=30))
    d.step()
    with pytest.raises(ValueError, match="cannot stop at 7"):
        d.stop("a", 7)
    d.stop("a", 0)
    with pytest.raises(UnknownRequestError, match="'a'"):
        d.stop("a", 0)


def test_decode_rows_come_first_and_the_budget_holds():
    d = driver(num_slots=4, max_seq_len=200)
    d.submit(make_request("a", (1, 2), max_new_tokens=50))
    d.step()
    d.submit(make_request("long", tuple(range(100)), max_new_tokens=2))
    d.submit(make_request("short", (3,), max_new_tokens=2))
    d.answer()
    command = d.plan()
    assert [type(row) for row in command.rows] == [DecodeRow, PrefillChunk, PrefillChunk]
    assert [len(row.token_ids) for row in command.rows[1:]] == [6, 1]
    d.run()
    for name in ("a", "long", "short"):
        assert d.told[name].tokens == d.alone(name)


def test_chunks_take_less_of_a_step_while_a_slot_decodes():
    d = driver(num_slots=2, max_step_tokens=20, max_mixed_step_tokens=5, max_outstanding=1)
    d.submit(make_request("a", tuple(range(30)), max_new_tokens=4))
    d.submit(make_request("b", tuple(range(40, 70)), max_new_tokens=2))
    sizes = []
    while not d.scheduler.is_empty:
        command = d.plan()
        chunks = [row for row in command.rows if isinstance(row, PrefillChunk)]
        num_prefill = sum(len(row.token_ids) for row in chunks)
        sizes.append((num_prefill, len(command.rows) - len(chunks)))
        d.answer()
    # a is prefilled with 10 of b; then b's 20 while a decodes, until a has its tokens; the rest.
    assert sizes == [(20, 0), (20, 0), (5, 1), (5, 1), (5, 1), (5, 0), (0, 1)]


def test_a_command_that_stopped_early_says_nothing_of_the_pace():
    d = driver(max_steps_per_command=8, run_ahead_window_ns=8 * STEP_NS, max_outstanding=1)
    d.submit(make_request("warm", max_new_tokens=3))
    d.run()
    d.script = d.worker.script = lambda tokens: 9 if len(tokens) > 5 else None
    for _ in range(20):
        d.submit(make_request("ends", max_new_tokens=30, end_token_ids=(9,)))
        d.run()
    d.submit(make_request("long", max_new_tokens=30))
    d.step()
    assert d.plan().num_steps == 8


def test_several_prompts_are_prefilled_in_one_step():
    d = driver(num_slots=3)
    for name in "abc":
        d.submit(make_request(name, (1, 2, 3), max_new_tokens=2))
    command = d.plan()
    assert [len(row.token_ids) for row in command.rows] == [3, 3, 2]
    assert [row.sample for row in command.rows] == [True, True, False]


def test_head_of_the_queue_is_never_passed_over():
    d = driver(num_slots=1)
    for index in range(10):
        d.submit(make_request(f"r{index}", (index + 1,) * (10 - index), max_new_tokens=1))
    d.run()
    assert list(d.admitted) == [f"r{index}" for index in range(10)]


def test_b10_cancelled_while_queued():
    d = driver(num_slots=1)
    d.submit(make_request("busy", max_new_tokens=20))
    d.step()
    for index in range(100):
        d.submit(make_request(f"q{index}", seed=index))
    for index in range(99):
        d.cancel(f"q{index}")
        assert len(d.scheduler.queue) == 99 - index
    d.cancel("busy")
    d.submit(make_request("q5", seed=5))
    d.run()
    assert list(d.admitted) == ["busy", "q99", "q5"]
    assert d.worker.num_prefills == 3
    assert d.told["q99"].tokens == d.alone("q99")
    assert d.told["q5"].tokens == d.alone("q5")
    assert d.scheduler.counters.cancelled == 100


def test_b09_a_cancelled_request_frees_its_slot_for_the_next_command():
    d = driver(num_slots=2)
    for name in "ab":
        d.submit(make_request(name, max_new_tokens=50, seed=ord(name)))
    d.step()
    d.submit(make_request("c", seed=7))
    d.cancel("a")
    command = d.plan()
    chunk = command.rows[-1]
    assert isinstance(chunk, PrefillChunk)
    assert (chunk.slot, chunk.generation) == (0, 3)
    d.run()
    assert d.told["b"].tokens == d.alone("b")
    assert d.told["c"].tokens == d.alone("c")


def test_b12_deadline_in_the_queue():
    d = driver(num_slots=1, max_steps_per_command=1)
    d.submit(make_request("busy", max_new_tokens=30))
    d.submit(make_request("late", deadline_ns=5 * STEP_NS))
    assert d.scheduler.next_deadline_ns == 5 * STEP_NS
    d.run()
    assert d.told["late"].end.reason is FinishReason.DEADLINE
    assert d.told["late"].end.queue_ns == 5 * STEP_NS
    assert list(d.admitted) == ["busy"]
    assert d.scheduler.counters.deadline == 1
    assert d.scheduler.counters.error == 0


def test_b12_deadline_in_prefill_and_decode():
    d = driver(num_slots=2, max_seq_len=500, max_steps_per_command=1)
    d.submit(make_request("prefill", tuple(range(400)), deadline_ns=5 * STEP_NS))
    d.submit(make_request("decode", (1, 2), max_new_tokens=100, deadline_ns=60 * STEP_NS))
    d.run()
    for name, at in (("prefill", 5), ("decode", 60)):
        end = d.told[name].end
        assert end.reason is FinishReason.DEADLINE
        total_ns = end.queue_ns + end.prefill_ns + end.decode_ns
        assert total_ns <= (at + 1) * STEP_NS
    num_tokens = len(d.told["decode"].tokens)
    assert 0 < num_tokens < 100
    assert d.told["decode"].end.message == (
        f"the deadline passed after 60 ms, with {num_tokens} of 100 tokens generated"
    )


def test_a_request_past_its_deadline_is_not_started():
    d = driver()
    d.submit(make_request("a", deadline_ns=0))
    assert d.plan() is None
    assert d.told["a"].end.reason is FinishReason.DEADLINE


def test_corrupted_row_ends_that_request_only():
    d = driver(script=lambda tokens: CORRUPTED if tokens[0] == 66 and len(tokens) == 5 else None)
    d.submit(make_request("good", (65, 1, 1), max_new_tokens=12))
    d.submit(make_request("bad", (66, 1, 1), max_new_tokens=12))
    d.run()
    assert d.told["good"].tokens == d.alone("good")
    assert d.told["good"].end.reason is FinishReason.LENGTH
    end = d.told["bad"].end
    assert (end.reason, end.status, len(d.told["bad"].tokens)) == (
        FinishReason.ERROR,
        "INTERNAL",
        2,
    )
    assert d.scheduler.counters.error == 1


@pytest.mark.parametrize("lost_after", range(12))
def test_rebuild_continues_with_the_same_tokens(lost_after):
    d = driver(num_slots=2, max_steps_per_command=3, run_ahead_window_ns=50 * STEP_NS)
    for index in range(4):
        prompt = tuple(range(1, 12 + index))
        d.submit(make_request(f"r{index}", prompt, 9, seed=index))
    for _ in range(lost_after):
        d.step()
    d.plan()
    before = {slot: seat.generation for slot, seat in d.scheduler.seats.items()}
    d.lose_worker()
    assert all(seat.generation > before[slot] for slot, seat in d.scheduler.seats.items())
    d.scheduler.check_integrity()
    d.run()
    for index in range(4):
        assert d.told[f"r{index}"].tokens == d.alone(f"r{index}")
        assert d.told[f"r{index}"].end.reason is FinishReason.LENGTH


def test_submit_refuses_what_cannot_run():
    d = driver()
    d.submit(make_request("a"))
    with pytest.raises(DuplicateRequestError, match="'a'"):
        d.submit(make_request("a"))
    with pytest.raises(InvalidArgumentError, match="empty"):
        d.submit(make_request("b", prompt=()))
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        d.submit(make_request("b", max_new_tokens=0))
    with pytest.raises(InvalidArgumentError, match="are 65, the context holds 64"):
        d.submit(make_request("b", (1,) * 60, max_new_tokens=5))
    d.submit(make_request("b", (1,) * 60, max_new_tokens=4))
    d.run()
    assert d.scheduler.counters.accepted == 2


def test_a_full_queue_refuses_and_says_when_to_retry():
    d = driver(num_slots=1, max_queue_len=2)
    assert [d.submit(make_request(name)) for name in "abc"] == [0, 0, 1]
    with pytest.raises(QueueFullError, match="the limit is 2") as caught:
        d.submit(make_request("d"))
    assert 0.1 <= caught.value.retry_after_s <= 60
    d.plan()
    with pytest.raises(QueueFullError):
        d.submit(make_request("d"))
    d.run()
    d.submit(make_request("d"))


def test_timings_of_a_request():
    d = driver(num_slots=1, max_outstanding=1, max_steps_per_command=1)
    d.submit(make_request("first", max_new_tokens=3))
    d.submit(make_request("second", (1,) * 10, max_new_tokens=4))
    d.run()
    end = d.told["second"].end
    assert end.queue_ns == 3 * STEP_NS
    assert end.prefill_ns == 2 * STEP_NS
    assert end.decode_ns == 3 * STEP_NS
    assert end.time_to_first_token_ns == 5 * STEP_NS


def test_counters_and_views():
    d = driver(max_outstanding=1)
    d.submit(make_request("a", (1,) * 10, max_new_tokens=3))
    assert d.scheduler.num_pending_prefill_tokens == 10
    d.step()
    assert d.scheduler.num_pending_prefill_tokens == 2
    assert d.scheduler.num_used_tokens == 8
    d.step()
    view = d.scheduler.slot_views()[0]
    assert (view.state, view.request_id) == ("decode", "a")
    assert (view.num_computed_tokens, view.num_generated_tokens) == (10, 1)
    assert d.scheduler.slot_views()[1].state == "free"
    d.step()
    assert d.scheduler.slot_views()[0].num_computed_tokens == 11
    d.run()
    counters = d.scheduler.counters
    assert (counters.accepted, counters.length, counters.num_generated_tokens) == (1, 1, 3)
    assert (counters.num_steps, counters.num_prompt_tokens) == (4, 10)
    assert counters.prefill_step_ns == counters.decode_step_ns == 2 * STEP_NS


def planned(d: Driver):
    d.submit(make_request("a", max_new_tokens=8))
    d.plan()
    return d.worker.run(d.sent.popleft())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step_id": 2}, "step 2 came where"),
        ({"epoch": 7}, "epoch 7"),
        ({"rows": ()}, "0 rows came for 1"),
        ({"rows": (RowResult(1, 2, (5,)),)}, "slot 1"),
        ({"rows": (RowResult(0, 1, (5,)),)}, "generation 1"),
        ({"rows": (RowResult(0, 2, (5, 6)),)}, "brought 2 tokens"),
        ({"rows": (RowResult(0, 2, ()),)}, "nothing stopped it"),
    ],
)
def test_a_result_that_does_not_answer_its_command(change, words):
    d = driver()
    result = planned(d)
    with pytest.raises(ResultError, match=words):
        d.scheduler.apply_result(dataclasses.replace(result, **change), 1)
    d.scheduler.apply_result(result, 1)


def test_a_result_that_nobody_asked_for():
    d = driver()
    result = planned(d)
    d.scheduler.apply_result(result, 1)
    with pytest.raises(ResultError, match="no command is outstanding"):
        d.scheduler.apply_result(result, 1)


def test_setup_carries_the_sampling():
    d = driver()
    sampling = Sampling(0.5, 0.9, 40, 0.1, 2**64 - 1)
    d.submit(make_request("a", end_token_ids=(9, 3), sampling=sampling))
    setup = d.plan().rows[0].setup
    assert (setup.temperature, setup.top_p, setup.top_k, setup.min_p) == (0.5, 0.9, 40, 0.1)
    assert (setup.seed, setup.end_token_ids, setup.max_len) == (2**64 - 1, (3, 9), 7)


def test_cancel_of_an_unknown_request():
    scheduler = Scheduler(make_limits())
    with pytest.raises(UnknownRequestError, match="'x'"):
        scheduler.cancel("x", FinishReason.CANCELLED, 0)


def test_request_state_follows():
    d = driver(max_outstanding=1)
    request = make_request("a", (1,) * 10)
    d.submit(request)
    assert request.state is RequestState.WAITING
    d.step()
    assert request.state is RequestState.PREFILL
    d.step()
    assert request.state is RequestState.DECODE
    d.run()
    assert (request.state, request.slot) == (RequestState.FINISHED, -1)


PENALTIES = Sampling(0.8, 1.0, 0, 0.0, 3, 0.5, -0.25, 1.5, ((4, 2.0), (9, -100.0)))


def test_no_adjustment_where_nothing_is_on():
    d = driver()
    d.submit(make_request("a"))
    setup = d.plan().rows[0].setup
    assert (setup.adjustment, setup.masked, setup.decode_row) == (None, False, 0)
    assert (setup.num_logprobs, setup.num_prompt_logprobs) == (None, None)


def test_setup_carries_the_adjustment():
    d = driver()
    d.submit(make_request("a", (7, 5, 7), sampling=PENALTIES, min_new_tokens=2))
    assert d.plan().rows[0].setup.adjustment == LogitAdjustment(
        0.5, -0.25, 1.5, (5, 7), (), ((4, 2.0), (9, -100.0)), 5
    )


@pytest.mark.parametrize(
    ("fields", "adjustment"),
    [
        ({"min_new_tokens": 1}, LogitAdjustment(0, 0, 1, (), (), (), 4)),
        (
            {"sampling": Sampling(1, 1, 0, 0, 1, logit_bias=((3, 1.0),))},
            LogitAdjustment(0, 0, 1, (), (), ((3, 1.0),), 0),
        ),
        (
            {"sampling": Sampling(1, 1, 0, 0, 1, presence_penalty=1.0)},
            LogitAdjustment(0, 1.0, 1, (), (), (), 0),
        ),
    ],
)
def test_an_adjustment_holds_no_more_than_is_on(fields, adjustment):
    d = driver()
    d.submit(make_request("a", **fields))
    assert d.plan().rows[0].setup.adjustment == adjustment


@pytest.mark.parametrize("lost_after", range(8))
def test_penalties_go_on_counting_after_a_rebuild(lost_after):
    d = driver(max_steps_per_command=2, run_ahead_window_ns=50 * STEP_NS)
    d.submit(make_request("a", (7, 5, 7), 12, sampling=PENALTIES))
    for _ in range(lost_after):
        d.step()
    told = tuple(d.told["a"].tokens)
    d.lose_worker()
    setup = d.plan().rows[0].setup
    assert setup.adjustment.generated_token_ids == told
    d.run()
    assert d.told["a"].tokens == d.alone("a")


@pytest.mark.parametrize("lost_after", range(9))
def test_logprobs_of_prompt_and_tokens_come_once_each(lost_after):
    d = driver(max_steps_per_command=2, run_ahead_window_ns=50 * STEP_NS)
    request = make_request("a", tuple(range(30)), 9, num_logprobs=3, num_prompt_logprobs=2)
    d.submit(request)
    for _ in range(lost_after):
        d.step()
    wanted = None if d.told["a"].tokens else 2
    d.lose_worker()
    setup = d.plan().rows[0].setup
    assert (setup.num_logprobs, setup.num_prompt_logprobs) == (3, wanted)
    d.run()
    told = d.told["a"]
    assert told.tokens == d.alone("a")
    assert (told.prompt_logprobs, told.logprobs) == logprobs_alone(request, told.tokens)
    assert [len(told.prompt_logprobs), len(told.logprobs)] == [29, 9]


def test_logprobs_are_cut_with_the_tokens():
    d = driver(script=lambda tokens: len(tokens), max_steps_per_command=8)
    d.submit(make_request("warm", max_new_tokens=3))
    d.run()
    d.submit(make_request("a", (1, 1, 1), 20, end_token_ids=(9,), num_logprobs=0))
    d.run()
    told = d.told["a"]
    assert told.tokens == [3, 4, 5, 6, 7, 8, 9]
    assert len(told.logprobs) == 7


def test_the_token_after_a_chunk_comes_along_where_its_logprob_is_wanted():
    d = driver()
    d.submit(make_request("a", tuple(range(20)), num_prompt_logprobs=0))
    rows = [d.plan().rows[0] for _ in range(2)]
    d.answer()
    rows.append(d.plan().rows[0])
    assert [row.next_token_id for row in rows] == [8, 16, None]
    assert [row.sample for row in rows] == [False, False, True]


@pytest.mark.parametrize("max_outstanding", [1, 2, 3])
@pytest.mark.parametrize("bound", [1, 2, 5, 9])
def test_no_more_steps_with_logprobs_are_out_than_may_be(bound, max_outstanding):
    d = driver(
        max_logprobs_steps=bound,
        max_outstanding=max_outstanding,
        max_steps_per_command=8,
        run_ahead_window_ns=100 * STEP_NS,
    )
    d.submit(make_request("a", max_new_tokens=40, num_logprobs=0))
    d.submit(make_request("plain", (8, 8), max_new_tokens=20))
    most = 0
    while not d.scheduler.is_empty:
        while d.plan() is not None:
            pass
        out = sum(
            command.num_steps for command in d.sent if any(row.slot == 0 for row in command.rows)
        )
        most = max(most, out)
        d.answer()
    assert most == min(bound, 8 * max_outstanding) or bound % max_outstanding
    assert most <= bound
    for name in ("a", "plain"):
        assert d.told[name].tokens == d.alone(name)


LOGPROBS = TokenLogprobs(-1.0, 1, (), ())


@pytest.mark.parametrize(
    ("wants", "brought", "words"),
    [
        ({}, {"logprobs": (LOGPROBS,)}, "brought 1 logprobs and 0 of its prompt, 0 and 0"),
        ({"num_logprobs": 0}, {}, "brought 0 logprobs and 0 of its prompt, 1 and 0 were due"),
        ({"num_prompt_logprobs": 0}, {}, "0 logprobs and 0 of its prompt, 0 and 2 were due"),
    ],
)
def test_logprobs_that_nobody_asked_for_or_that_are_missing(wants, brought, words):
    d = driver()
    d.submit(make_request("a", **wants))
    d.plan()
    result = d.worker.run(d.sent.popleft())
    row = RowResult(0, 2, result.rows[0].token_ids, **brought)
    with pytest.raises(ResultError, match=words):
        d.scheduler.apply_result(dataclasses.replace(result, rows=(row,)), 1)
    d.scheduler.apply_result(result, 1)


def constrained(name, num_tokens, is_complete=True, **fields):
    constraint = FakeConstraint(num_tokens, 1000, is_complete)
    return make_request(name, constraint=constraint, first_mask=constraint.advance(()), **fields)


@pytest.mark.parametrize("max_outstanding", [1, 2, 3])
def test_a_constrained_request_gets_a_token_a_mask_and_the_others_keep_their_pace(max_outstanding):
    d = driver(
        num_slots=3,
        max_seq_len=1000,
        max_outstanding=max_outstanding,
        max_steps_per_command=4,
        run_ahead_window_ns=4 * STEP_NS,
    )
    d.submit(make_request("free", (8, 8), max_new_tokens=900, seed=4))
    for _ in range(4):
        d.step()
    d.submit(constrained("bound", 9, max_new_tokens=30))
    commands_between, since = [], 0
    while "bound" in d.scheduler.requests:
        while (command := d.plan()) is not None:
            since += 1
            rows = {row.slot: row for row in command.rows}
            if isinstance(command.rows[-1], DecodeRow):
                assert command.num_steps == 4
            if 1 in rows:
                assert rows[1].allowed_tokens
                commands_between.append(since)
                since = 0
            assert rows[0].allowed_tokens == b""
        d.answer()
        d.give_masks()
    # One command of the others for each that is out when its mask comes.
    assert max(commands_between[1:]) <= max_outstanding
    d.run()
    end = d.told["bound"].end
    assert (end.reason, end.matched_token_id) == (FinishReason.STOP, None)
    assert len(d.told["bound"].tokens) == 9
    for name in ("free", "bound"):
        assert d.told[name].tokens == d.alone(name)


def constrained_pair(lag):
    """Two that decode, "b" `lag` commands behind "a", each with its mask."""
    d = driver(run_ahead_window_ns=STEP_NS)
    for name in ("a", "b"):
        d.submit(constrained(name, 40, max_new_tokens=30))
        for _ in range(lag):
            d.step()
    return d


@pytest.mark.parametrize("lag", range(5))
def test_constrained_requests_share_their_commands(lag):
    d = constrained_pair(lag)
    while not d.scheduler.is_empty:
        while d.plan() is not None:
            pass
        d.answer()
        # One mask is there before the other: its request waits for that one, not for itself alone.
        for name in list(d.masks_due):
            d.plan()
            d.give_mask(name)
    # As many as one's tokens, and those that the second one began later: it shares the prefix.
    assert d.worker.last_step_id == 30 + max(1, lag)
    for name in ("a", "b"):
        assert d.told[name].tokens == d.alone(name)


def test_a_slow_mask_holds_the_others_up_for_half_a_step():
    d = constrained_pair(2)
    while len(d.masks_due) < 2:
        d.plan()
        d.answer()
    d.give_mask("a")
    assert d.plan() is None
    assert d.scheduler.held_until_ns == d.now_ns + STEP_NS // 2
    d.now_ns += STEP_NS // 2 - 1
    assert d.plan() is None
    d.now_ns += 1
    assert [row.slot for row in d.plan().rows] == [0]
    assert d.scheduler.held_until_ns is None
    # The slow one's mask comes: the other one's step is out, and it waits for that.
    d.give_mask("b")
    assert d.plan() is None
    assert d.scheduler.held_until_ns is None
    d.answer()
    d.give_masks()
    assert [row.slot for row in d.plan().rows] == [0, 1]


def test_nobody_waits_for_the_mask_of_a_request_that_is_gone():
    d = constrained_pair(2)
    while len(d.masks_due) < 2:
        d.plan()
        d.answer()
    d.give_mask("a")
    assert d.plan() is None
    d.cancel("b")
    assert [row.slot for row in d.plan().rows] == [0]


def test_no_token_without_a_mask():
    d = driver()
    d.submit(constrained("a", 9, max_new_tokens=30))
    d.plan()
    d.answer()
    assert d.plan() is None
    d.scheduler.check_integrity()
    d.give_masks()
    assert isinstance(d.plan().rows[0], DecodeRow)


@pytest.mark.parametrize("max_new_tokens", [3, 4])
def test_a_dead_end_fails_that_request_only(max_new_tokens):
    d = driver()
    d.submit(constrained("a", 3, is_complete=False, max_new_tokens=max_new_tokens))
    d.submit(make_request("b", (8, 8), max_new_tokens=20))
    d.run()
    assert d.told["b"].tokens == d.alone("b")
    end = d.told["a"].end
    if max_new_tokens == 3:
        assert end.reason is FinishReason.LENGTH
    else:
        assert (end.reason, end.status) == (FinishReason.ERROR, "FAILED_PRECONDITION")
        assert end.message.endswith("no token can continue it")


@pytest.mark.parametrize("mask_first", [True, False])
@pytest.mark.parametrize("lost_after", range(6))
def test_masks_are_good_after_a_rebuild(lost_after, mask_first):
    d = driver()
    d.submit(constrained("a", 9, prompt=tuple(range(20)), max_new_tokens=5))
    for _ in range(lost_after):
        d.step()
    while d.plan() is not None:
        pass
    if d.sent:
        d.answer()
    if mask_first:
        d.give_masks()
    lacks_mask = bool(d.masks_due)
    d.lose_worker()
    while d.plan() is not None:
        d.answer()
    d.scheduler.check_integrity()
    if lacks_mask:
        # All but the last token, which would be sampled behind.
        seat = d.scheduler.seats[0]
        assert seat.num_prefill_left == 1
        d.give_masks()
    d.run()
    assert d.told["a"].tokens == d.alone("a")
    assert d.told["a"].end.reason is FinishReason.LENGTH


def test_a_mask_for_another_number_of_tokens_is_a_bug_and_one_too_late_is_not():
    d = driver()
    d.submit(constrained("a", 9, max_new_tokens=5))
    mask = Mask(b"\xff" * 125, False)
    with pytest.raises(ValueError, match="a mask for 0 tokens came"):
        d.scheduler.set_mask("a", 0, mask, 0)
    d.plan()
    d.answer()
    with pytest.raises(ValueError, match="a mask for 2 tokens came, it has 1"):
        d.scheduler.set_mask("a", 2, mask, 0)
    d.cancel("a")
    d.give_masks()
    assert d.scheduler.set_mask("a", 1, mask, 0) == []


def answers(call_id, number, **fields):
    return [make_request(choice_id(call_id, i), seed=i, **fields) for i in range(number)]


def test_answers_of_a_call_come_all_or_none():
    d = driver(num_slots=2, max_queue_len=3)
    assert d.submit(*answers("a", 3)) == 0
    with pytest.raises(QueueFullError, match="3 requests wait and 3 more came, the limit is 3"):
        d.submit(*answers("b", 3))
    assert len(d.scheduler.requests) == 3
    assert d.submit(*answers("b", 2)) == 1
    with pytest.raises(InvalidArgumentError, match="is 6; at most 5"):
        d.submit(*answers("c", 6))
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        d.submit(make_request("c"), make_request(choice_id("c", 1), max_new_tokens=0))
    d.run()
    assert d.scheduler.counters.accepted == d.scheduler.counters.length == 5
    for name in d.told:
        assert d.told[name].tokens == d.alone(name)


def test_a_calls_id_is_taken_until_its_last_answer_has_ended():
    d = driver()
    d.submit(*answers("a", 2))
    d.cancel("a")
    with pytest.raises(DuplicateRequestError, match="'a' waits or runs"):
        d.submit(make_request("a"))
    view = d.plan() and d.scheduler.slot_views()[0]
    assert (view.request_id, view.choice_index) == ("a", 1)
    d.stop(choice_id("a", 1), 0)
    d.submit(make_request("a"))
    d.run()


def test_decode_rows_are_of_those_that_run():
    d = driver(num_slots=6, max_running=2, max_step_tokens=8)
    for index in range(6):
        d.submit(make_request(f"r{index}", (index,) * 3, 5, seed=index))
    seen = set()
    while not d.scheduler.is_empty:
        d.step()
        seen |= {(seat.slot, seat.decode_row) for seat in d.scheduler.seats.values()}
        assert len(d.scheduler.seats) <= 2
    assert {row for _, row in seen} == {0, 1}
    assert {slot for slot, _ in seen} == set(range(6))


def test_the_deadline_of_what_has_ended_never_comes():
    d = driver()
    d.submit(make_request("a", deadline_ns=10**12))
    d.run()
    assert d.scheduler.next_deadline_ns is None
    assert d.scheduler.expire(10**12) == []
