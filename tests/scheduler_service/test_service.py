from __future__ import annotations

from dataclasses import replace

import pytest
from fake_engine import FakeEngine, accepting, call, ids
from tokenizer_files import write_model

from scheduler_service.calls import DEADLINE_SLACK_NS, PROMPT_PART
from scheduler_service.constraints import Constraints
from scheduler_service.errors import (
    ConstraintError,
    CorruptedError,
    DeadlineError,
    DuplicateRequestError,
    InvalidArgumentError,
    QueueFullError,
    UnavailableError,
)
from scheduler_service.generate_call import ConstraintSpec, GenerateCall, IdsInput
from scheduler_service.logprobs import LEAST_LOGPROB, TokenLogprob
from scheduler_service.request import (
    FinishReason,
    Mask,
    PromptLogprobsEvent,
    TokenLogprobs,
    choice_id,
)
from scheduler_service.service import InferenceService, Rejections, load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_model(tmp_path_factory.mktemp("model")), "")


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def service(model, engine):
    return InferenceService(model, engine)


def allowed(mask: Mask) -> set[int]:
    return {i for i in range(8 * len(mask.allowed)) if mask.allowed[i // 8] >> i % 8 & 1}


async def test_what_is_here_is_joined_into_one_update(service, engine, model):
    async with await service.begin(call(), accepting()) as generation:
        assert generation.queue_position == 3
        a, b, c = ids(model, "abc")
        engine.tokens(0, a)
        engine.tokens(1, b)
        (update,) = await generation.next()
        assert (update.first_token_index, update.token_ids, update.text) == (0, (a, b), "ab")
        assert update.end is None
        engine.tokens(2, c)
        engine.finish(FinishReason.LENGTH, 3)
        (update,) = await generation.next()
        assert (update.first_token_index, update.token_ids, update.text) == (2, (c,), "c")
        assert update.end.event.reason is FinishReason.LENGTH
    assert engine.cancelled == []


@pytest.mark.parametrize("known", [True, False])
async def test_a_stop_string_ends_the_request_whatever_happened_meanwhile(
    service, engine, model, known
):
    engine.known = known
    async with await service.begin(call(stop=("bc",)), accepting()) as generation:
        engine.tokens(0, *ids(model, "abcd"))
        (update,) = await generation.next()
        assert update.text == "a"
        assert update.token_ids == tuple(ids(model, "abc"))
        assert engine.stopped == [("r", 3)]
        engine.tokens(4, *ids(model, "ef"))
        engine.finish(FinishReason.STOP if known else FinishReason.LENGTH, 3 if known else 6)
        (update,) = await generation.next()
        assert (update.token_ids, update.text) == ((), "")
        assert update.end.matched_stop == "bc"
        assert update.end.event.reason is FinishReason.STOP
        assert update.end.event.num_generated_tokens == 3


async def test_held_text_is_delivered_at_the_end(service, engine, model):
    """B03."""
    async with await service.begin(call(stop=("bcd",)), accepting()) as generation:
        engine.tokens(0, *ids(model, "abc"))
        assert (await generation.next())[0].text == "a"
        engine.finish(FinishReason.LENGTH, 3)
        (update,) = await generation.next()
        assert (update.text, update.tail.text, update.end.matched_stop) == ("", "bc", None)


@pytest.mark.parametrize(
    ("reason", "more", "error"),
    [
        (FinishReason.DEADLINE, {"message": "late"}, DeadlineError),
        (FinishReason.ERROR, {"message": "lost", "status": "UNAVAILABLE"}, UnavailableError),
        (FinishReason.ERROR, {"message": "nan", "status": "INTERNAL"}, CorruptedError),
        (
            FinishReason.ERROR,
            {"message": "stuck", "status": "FAILED_PRECONDITION"},
            ConstraintError,
        ),
    ],
)
async def test_ends_that_are_errors(service, engine, reason, more, error):
    async with await service.begin(call(), accepting()) as generation:
        engine.finish(reason, **more)
        with pytest.raises(error, match=more["message"]):
            await generation.next()
    assert engine.cancelled == []


@pytest.mark.parametrize(
    ("deadline_ns", "reason"),
    [
        (None, FinishReason.CANCELLED),
        (201 + DEADLINE_SLACK_NS, FinishReason.CANCELLED),
        (200 + DEADLINE_SLACK_NS, FinishReason.DEADLINE),
        (100, FinishReason.DEADLINE),
    ],
)
async def test_leaving_before_the_end_cancels(service, engine, deadline_ns, reason):
    """B09, B12: counted as what it was."""
    async with await service.begin(call(), accepting(deadline_ns)):
        engine.clock_ns = 200
    assert engine.cancelled == [("r", reason)]


async def test_leaving_after_an_end_that_was_not_yet_read(service, engine):
    engine.known = False
    async with await service.begin(call(), accepting()):
        engine.finish(FinishReason.LENGTH)
    assert engine.cancelled == []


async def test_a_request_carries_its_arrival_and_deadline(service, engine):
    async with await service.begin(call(), accepting(500)):
        (request,) = engine.requests
        assert (request.arrival_ns, request.deadline_ns) == (100, 500)
        assert request.max_new_tokens == 63


async def test_answers_are_told_apart(service, engine, model):
    """Each has its own text, stop strings and end; their events come mixed."""
    async with await service.begin(call(n=3, stop=("bc",), seed=7), accepting()) as generation:
        assert generation.num_answers == 3
        assert [request.request_id for request in engine.requests] == [
            choice_id("r", index) for index in range(3)
        ]
        seeds = [request.sampling.seed for request in engine.requests]
        assert seeds[0] == 7
        assert len(set(seeds)) == 3
        engine.tokens(0, *ids(model, "ab"), answer=1)
        engine.tokens(0, *ids(model, "xy"), answer=0)
        engine.tokens(2, *ids(model, "cd"), answer=1)
        updates = {update.index: update for update in await generation.next()}
        assert (updates[0].text, updates[1].text) == ("xy", "a")
        assert updates[1].token_ids == tuple(ids(model, "abc"))
        assert engine.stopped == [(choice_id("r", 1), 3)]
        for answer in (1, 0):
            engine.finish(FinishReason.LENGTH, answer=answer)
        assert {update.index for update in await generation.next()} == {0, 1}
        assert not generation.has_ended
        engine.tokens(0, *ids(model, "z"), answer=2)
        engine.finish(FinishReason.LENGTH, answer=2)
        (last,) = await generation.next()
        assert (last.index, last.text) == (2, "z")
        assert generation.has_ended
    assert engine.cancelled == []


async def test_leaving_while_one_answer_runs_cancels_the_call(service, engine):
    async with await service.begin(call(n=2), accepting()) as generation:
        engine.finish(FinishReason.LENGTH, answer=1)
        await generation.next()
    assert engine.cancelled == [("r", FinishReason.CANCELLED)]


async def test_logprobs_are_of_the_tokens_that_count(service, engine, model):
    """B26: what has no probability is left out or clamped. A stop string cuts them too."""
    infinity = float("inf")
    a, b = ids(model, "ab")
    first = TokenLogprobs(-0.5, 2, (b, a), (-0.25, -infinity))
    async with await service.begin(call(logprobs=2, stop=("b",)), accepting()) as generation:
        assert engine.requests[0].num_logprobs == 2
        engine.tokens(0, a, b, a, logprobs=(first, TokenLogprobs(-infinity, 9, (), ()), first))
        (update,) = await generation.next()
    assert update.token_ids == (a, b)
    assert len(update.logprobs) == 2
    assert update.logprobs[0].token == TokenLogprob(a, -0.5, 2, b"a")
    assert update.logprobs[0].best == (TokenLogprob(b, -0.25, 1, b"b"),)
    assert update.logprobs[1].token == TokenLogprob(b, LEAST_LOGPROB, 9, b"b")


async def test_prompt_logprobs_name_the_prompts_tokens(service, engine, model):
    prompt = tuple(ids(model, "abcd"))
    asked = GenerateCall(IdsInput(prompt), request_id="r", prompt_logprobs=0, n=2)
    async with await service.begin(asked, accepting()) as generation:
        assert [request.num_prompt_logprobs for request in engine.requests] == [0, None]
        for index in (1, 2):
            found = (TokenLogprobs(-float(index), 1, (), ()),)
            engine.stream.push(PromptLogprobsEvent("r", index, found))
        updates = [update for _ in range(2) for update in await generation.next()]
    assert [update.first_prompt_index for update in updates] == [1, 2]
    assert [one.token for update in updates for one in update.prompt_logprobs] == [
        TokenLogprob(prompt[1], -1.0, 1, b"b"),
        TokenLogprob(prompt[2], -2.0, 1, b"c"),
    ]
    assert all(update.is_empty for update in updates)


async def test_long_prompt_logprobs_come_a_part_at_a_time(service, engine, model):
    """Alone and in order, before what was read behind them."""
    count = PROMPT_PART + 2
    prompt = (5,) * (count + 1)
    engine.max_seq_len = 2 * count
    asked = GenerateCall(IdsInput(prompt), request_id="r", prompt_logprobs=0)
    async with await service.begin(asked, accepting()) as generation:
        found = (TokenLogprobs(-1.0, 1, (), ()),) * count
        engine.stream.push(PromptLogprobsEvent("r", 1, found))
        engine.tokens(0, *ids(model, "a"))
        engine.finish(FinishReason.LENGTH, 1)
        updates = [update for _ in range(3) for update in await generation.next()]
        assert generation.has_ended
    parts = [(update.first_prompt_index, len(update.prompt_logprobs)) for update in updates]
    assert parts == [(1, PROMPT_PART), (1 + PROMPT_PART, 2), (0, 0)]
    assert [update.text for update in updates] == ["", "", "a"]


async def test_an_answer_too_big_for_one_message_is_refused(service, engine):
    engine.max_seq_len = 1 << 20
    with pytest.raises(InvalidArgumentError, match="max_new_tokens"):
        await service.begin(call(logprobs=20), accepting(), is_whole=True)
    assert engine.requests == []
    async with await service.begin(call(logprobs=20), accepting()):
        assert len(engine.requests) == 1


async def test_stop_strings_are_not_looked_for_in_the_first_tokens(service, engine, model):
    async with await service.begin(call(stop=("ab",), min_new_tokens=2), accepting()) as generation:
        engine.tokens(0, *ids(model, "abcabd"))
        (update,) = await generation.next()
    assert update.text == "abc"
    assert update.token_ids == tuple(ids(model, "abcab"))


async def test_constraints_are_compiled_for_each_answer(service, engine, model):
    asked = call(n=2, constraint=ConstraintSpec("choice", choices=("ab", "b")), min_new_tokens=1)
    async with await service.begin(asked, accepting()):
        first, second = engine.requests
        a, b = ids(model, "ab")
        assert allowed(first.first_mask) >= {a, b}
        assert first.first_mask == second.first_mask
        assert allowed(first.constraint.advance([a])) == {b}
        # The other one has not moved, and its end ids are its own.
        assert allowed(second.constraint.advance([b])) == second.end_token_ids


async def test_a_constraint_that_cannot_be(service, engine, model):
    with pytest.raises(InvalidArgumentError, match=r"regex: .*unclosed"):
        await service.begin(call(constraint=ConstraintSpec("regex", "(")), accepting())
    # The empty text fits, and nothing may end it.
    empty = call(constraint=ConstraintSpec("regex", "a{0}"), ignore_eos=True)
    with pytest.raises(InvalidArgumentError, match=r"regex: only an empty output .* ignore_eos"):
        await service.begin(empty, accepting())
    without = replace(model, constraints=Constraints(None, "no such decoder"))
    with pytest.raises(InvalidArgumentError, match="no such decoder"):
        await InferenceService(without, engine).begin(
            call(constraint=ConstraintSpec("json_object")), accepting()
        )
    assert engine.requests == []


async def test_refusals_are_never_submitted(service, engine):
    with pytest.raises(InvalidArgumentError):
        await service.begin(call(top_k=-2), accepting())
    engine.ready = False
    with pytest.raises(UnavailableError):
        await service.begin(call(), accepting())
    assert engine.requests == []


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (InvalidArgumentError("top_k", "-2"), (1, 0, 0)),
        (DuplicateRequestError("r"), (1, 0, 0)),
        (QueueFullError("full", 1.0), (0, 1, 0)),
        (UnavailableError("starting"), (0, 0, 1)),
        (RuntimeError("a bug"), (0, 0, 0)),
    ],
)
def test_refusals_are_counted(error, counts):
    rejections = Rejections()
    with pytest.raises(type(error)), rejections.counted():
        raise error
    assert (rejections.invalid, rejections.full, rejections.unavailable) == counts
