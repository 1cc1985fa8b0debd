"""n answers, logprobs, constraints, penalties and the prefix cache over gRPC, on a fake worker."""

from __future__ import annotations

import asyncio
import json
import math
import re

import grpc
import pytest
from fake_worker import logprobs_alone

from fakes import CORRUPTED, tokens_alone
from integration.front import VOCAB_SIZE, WAIT_S, rest, running_front
from scheduler_service.request import Request, Sampling
from scheduler_service.step import PrefillChunk
from scheduler_service.validation import choice_seed
from slotwise.v1 import inference_pb2 as pb

PROMPT = (11, 12, 13, 14)
DRAWN = pb.SamplingParams(temperature=0.75, seed=7)


def request(prompt=PROMPT, **options) -> pb.GenerateRequest:
    options = {"ignore_eos": True, "max_new_tokens": 6, "sampling": DRAWN, **options}
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), **options)


def alone(seed: int = 7, count: int = 6, prompt=PROMPT, **options) -> list[int]:
    sampling = Sampling(0.75, 1.0, 0, 0.0, seed)
    return tokens_alone(
        Request("r", prompt, sampling, count, frozenset(), 0, **options), VOCAB_SIZE
    )


def numbers(logprobs) -> list:
    """Of messages or of our own records: everything but the bytes."""
    if isinstance(logprobs[0], pb.TokenLogprobs):
        return [
            (one.token.logprob, one.token.rank, [(b.token_id, b.logprob) for b in one.best])
            for one in logprobs
        ]
    return [
        (one.logprob, one.rank, list(zip(one.best_token_ids, one.best_logprobs, strict=True)))
        for one in logprobs
    ]


async def test_three_answers(front):
    """Two run, one waits for a slot; each is what its seed gives alone."""
    got = await front.collect(request(n=3))
    assert [answer.token_ids for answer in got.answers] == [
        alone(choice_seed(7, index)) for index in range(3)
    ]
    assert got.accepted.seed == 7
    whole = await front.stub.Complete(request(n=3), timeout=WAIT_S)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    for choice, answer in zip(whole.choices, got.answers, strict=True):
        assert (list(choice.token_ids), choice.text) == (answer.token_ids, answer.text)
        assert choice.finished.usage.completion_tokens == 6
    assert (await front.load()).requests.length == 6


async def test_answers_share_the_prompt(front):
    """Its tokens are computed once: the second one copies what the first has computed."""
    before = front.worker.worker.num_prefill_tokens
    got = await front.collect(request(range(3, 203), n=2))
    cached = [answer.finished.usage.cached_tokens for answer in got.answers]
    assert cached == [0, 199]
    assert front.worker.worker.num_prefill_tokens - before == 201


async def test_cancel_ends_all_answers(front):
    meter = front.hold()
    call = front.stub.Generate(request(n=3, request_id="me"), timeout=WAIT_S)
    assert (await call.read()).HasField("accepted")
    slots = (await front.stub.ListSlots(pb.ListSlotsRequest())).slots
    assert [(slot.request_id, slot.choice_index) for slot in slots] == [("me", 0), ("me", 1)]
    await front.stub.Cancel(pb.CancelRequest(request_id="me"), timeout=WAIT_S)
    ends = [m.finished for m in await rest(call) if m.HasField("finished")]
    assert sorted(end.index for end in ends) == [0, 1, 2]
    assert {end.finish_reason for end in ends} == {pb.FINISH_REASON_CANCELLED}
    meter.allow(100)
    assert (await front.load()).requests.cancelled == 3


async def test_more_answers_than_the_server_can_hold(front_model, tmp_path):
    async with running_front(front_model, tmp_path, num_slots=1, max_queue_len=2) as front:
        error = await front.error(front.stub.Complete(request(n=4), timeout=WAIT_S))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "n: is 4; at most 3" in error.details()
        assert (await front.load()).requests.accepted == 0


@pytest.mark.parametrize("count", [0, 3, 20])
async def test_logprobs_of_tokens_and_prompt(front, front_model, count):
    wanted = request(logprobs=count, prompt_logprobs=count)
    got = await front.collect(wanted)
    made = Request(
        "r", PROMPT, Sampling(0.75, 1.0, 0, 0.0, 7), 6, frozenset(), 0,
        num_logprobs=count, num_prompt_logprobs=count,
    )  # fmt: skip
    of_prompt, of_tokens = logprobs_alone(made, alone(), VOCAB_SIZE)
    assert numbers(got.prompt_logprobs) == numbers(of_prompt)
    assert numbers(got.logprobs) == numbers(of_tokens)
    tokens = front_model.tokenizer.tokens
    for token_ids, logprobs in ((PROMPT[1:], got.prompt_logprobs), (got.token_ids, got.logprobs)):
        assert [one.token.token_id for one in logprobs] == list(token_ids)
        assert all(len(one.best) == count for one in logprobs)
        for entry in (entry for one in logprobs for entry in (one.token, *one.best)):
            assert entry.text == tokens.get(entry.token_id, True)
        assert all([b.rank for b in one.best] == list(range(1, count + 1)) for one in logprobs)
    whole = await front.stub.Complete(wanted, timeout=WAIT_S)
    assert list(whole.prompt_logprobs) == got.prompt_logprobs
    assert list(whole.choices[0].logprobs) == got.logprobs


async def test_answers_tell_of_the_prompt_once(front):
    got = await front.collect(request(n=2, prompt_logprobs=1, logprobs=1))
    assert len(got.prompt_logprobs) == len(PROMPT) - 1
    assert [len(answer.logprobs) for answer in got.answers] == [6, 6]
    # A prompt whose logprobs are asked for is computed whole.
    again = await front.collect(request(prompt_logprobs=1))
    assert again.finished.usage.cached_tokens == 0
    assert again.prompt_logprobs == got.prompt_logprobs


async def test_a_stop_string_cuts_the_logprobs(front_model, tmp_path):
    ids = [i for char in "abcdef" for i in front_model.tokenizer.encode(char)]

    def script(tokens):
        return ids[(len(tokens) - len(PROMPT)) % len(ids)]

    async with running_front(front_model, tmp_path, script, num_slots=1) as front:
        got = await front.collect(request(logprobs=2, stop=["cd"]))
        assert (got.text, got.token_ids) == ("ab", ids[:4])
        assert b"".join(one.token.text for one in got.logprobs) == b"abcd"
        late = await front.collect(request(stop=["cd"], min_new_tokens=4, max_new_tokens=12))
        assert late.text == "abcdefab"
        assert late.finished.matched_stop_string == "cd"


async def test_everything_reaches_the_worker(front):
    sampling = pb.SamplingParams(
        temperature=0.75,
        seed=7,
        frequency_penalty=0.5,
        presence_penalty=-0.25,
        repetition_penalty=1.5,
        logit_bias={9: -100.0, 3: 0.5},
    )
    await front.collect(
        request((5, 3, 5), sampling=sampling, min_new_tokens=2, logprobs=0, prompt_logprobs=4)
    )
    rows = [row for command in front.worker.commands for row in command.rows]
    setup = [row.setup for row in rows if isinstance(row, PrefillChunk) and row.setup][-1]
    assert (setup.num_logprobs, setup.num_prompt_logprobs, setup.masked) == (0, 4, False)
    adjustment = setup.adjustment
    assert (adjustment.frequency_penalty, adjustment.presence_penalty) == (0.5, -0.25)
    assert (adjustment.repetition_penalty, adjustment.prompt_token_ids) == (1.5, (3, 5))
    assert adjustment.biases == ((3, 0.5), (9, -100.0))
    assert adjustment.min_len == 5


CONSTRAINTS = {
    "regex": {"regex": "[a-c]{2,4}:[0-9]+x"},
    "choice": {"choice": pb.Choice(texts=["yes", "no", "\u4f60\u597d"])},
    "json_schema": {
        "json_schema": json.dumps(
            {
                "type": "object",
                "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        )
    },
    "grammar": {"grammar": 'root ::= "<" [xyz]+ ">" root?'},
    "json_object": {"json_object": pb.JsonObject()},
}


def satisfies(kind: str, text: str) -> bool:
    match kind:
        case "regex":
            return re.fullmatch("[a-c]{2,4}:[0-9]+x", text) is not None
        case "choice":
            return text in ("yes", "no", "\u4f60\u597d")
        case "grammar":
            return re.fullmatch("(<[xyz]+>)+", text) is not None
        case "json_object":
            return isinstance(json.loads(text), dict)
    found = json.loads(text)
    return set(found) == {"a", "b"} and found["a"] in (1, 2) and isinstance(found["b"], bool)


@pytest.mark.parametrize("kind", CONSTRAINTS)
async def test_constrained_answers_among_free_ones(front, kind):
    """The output is what was asked for; neighbours get what they get alone."""
    free = [asyncio.ensure_future(front.collect(request(max_new_tokens=50))) for _ in range(2)]
    asked = request(**CONSTRAINTS[kind], n=3, ignore_eos=False, max_new_tokens=240, logprobs=1)
    got = await front.collect(asked)
    for answer in got.answers:
        if answer.finished.finish_reason == pb.FINISH_REASON_STOP:
            assert satisfies(kind, answer.text), answer.text
        assert len(answer.logprobs) == len(answer.token_ids)
    reasons = [answer.finished.finish_reason for answer in got.answers]
    # An object of the fake's random tokens may take longer than the context holds.
    assert kind == "json_object" or pb.FINISH_REASON_STOP in reasons
    for neighbour in await asyncio.gather(*free):
        assert neighbour.token_ids == alone(count=50)
    again = await front.collect(asked)
    assert [a.token_ids for a in again.answers] == [a.token_ids for a in got.answers]


async def test_b26_logits_that_are_no_numbers(front_model, tmp_path):
    """B26: that call ends INTERNAL, all its answers; the neighbour's are what they are alone."""

    def script(tokens):
        is_bad = tokens[0] == 99 and len(tokens) == 6
        return CORRUPTED if is_bad else None

    async with running_front(front_model, tmp_path, script, num_slots=3) as front:
        free = asyncio.ensure_future(front.collect(request(max_new_tokens=50, logprobs=20)))
        for method in (front.stub.Generate, front.stub.Complete):
            bad = request((99, 12, 13), n=2, logprobs=20, max_new_tokens=50)
            error = await front.error(method(bad, timeout=WAIT_S))
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "no numbers" in error.details()
        got = await free
        assert got.token_ids == alone(count=50)
        entries = [entry for one in got.logprobs for entry in (one.token, *one.best)]
        assert all(math.isfinite(entry.logprob) for entry in entries)
        load = await front.until(lambda load: load.num_running == 0)
        # The other answer of each call was cancelled, or was as bad.
        assert load.requests.error + load.requests.cancelled == 4
        again = await front.collect(request())
        assert again.token_ids == alone()


async def test_nothing_can_follow(front):
    """Without end ids the answer ends by itself where it is complete."""
    got = await front.collect(request(choice=pb.Choice(texts=["abc"]), max_new_tokens=50))
    assert got.text == "abc"
    assert got.finished.finish_reason == pb.FINISH_REASON_STOP
    assert got.finished.WhichOneof("matched_stop") is None


async def test_an_output_that_cannot_go_on(front, front_model):
    """The stop ids take away what the constraint needs; the other calls go on."""
    b = front_model.tokenizer.token_id("b")
    free = asyncio.ensure_future(front.collect(request(max_new_tokens=50)))
    for method in (front.stub.Generate, front.stub.Complete):
        stuck = request(regex="ab+c", stop_token_ids=[b], max_new_tokens=50)
        error = await front.error(method(stuck, timeout=WAIT_S))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "no token can continue" in error.details()
    assert (await free).token_ids == alone(count=50)
    assert (await front.load()).requests.error == 2


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"regex": "("}, "regex"),
        ({"regex": "a" * 5000}, "regex"),
        ({"regex": "x" * ((1 << 20) + 1)}, "regex"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": '{"type": 5}'}, "json_schema"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"grammar": "root ::= other"}, "grammar"),
        ({"grammar": "?"}, "grammar"),
        ({"choice": pb.Choice()}, "choice.texts"),
        ({"choice": pb.Choice(texts=["a", ""])}, "choice.texts[1]"),
    ],
)
async def test_constraints_that_cannot_be(front, options, field):
    error = await front.error(front.stub.Complete(request(**options), timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"{field}: ")
    assert (await front.load()).requests.rejected_invalid == 1


async def test_a_conversation_computes_only_what_is_new(front):
    """16 turns; usage, counters and slots say so; a flush forgets it."""
    prompt = list(range(3, 15))
    for turn in range(16):
        got = await front.collect(request(prompt, max_new_tokens=4))
        assert got.token_ids == alone(count=4, prompt=tuple(prompt))
        # The last generated token of the turn before was never an input.
        known = len(prompt) - 2 - 1 if turn else 0
        assert got.finished.usage.cached_tokens == known, turn
        prompt += [*got.token_ids, 20 + turn, 21]
    cache = (await front.load()).prefix_cache
    assert (cache.num_hits, cache.num_copies) == (15, 0)
    slots = (await front.stub.ListSlots(pb.ListSlotsRequest())).slots
    num_cached = sum(slot.num_cached_tokens for slot in slots)
    assert num_cached == cache.num_cached_tokens == len(prompt) - 3
    flushed = await front.stub.FlushCache(pb.FlushCacheRequest())
    assert flushed.num_tokens == num_cached
    got = await front.collect(request(prompt[:-2], max_new_tokens=4))
    assert got.finished.usage.cached_tokens == 0
    assert (await front.load()).prefix_cache.num_hits == 15


async def test_salts_share_nothing(front):
    """B28, both ways."""
    prompt = range(3, 103)
    cached = []
    for salt in ("a", "b", "a", None, ""):
        got = await front.collect(request(prompt, cache_salt=salt))
        cached.append(got.finished.usage.cached_tokens)
    assert cached[0] == cached[1] == cached[3] == 0
    assert cached[4] == 99
    await front.stub.FlushCache(pb.FlushCacheRequest())
    await front.collect(request(prompt, cache_salt="a"))
    again = await front.collect(request(prompt, cache_salt="a"))
    assert again.finished.usage.cached_tokens == 99


async def test_fewer_run_than_there_are_slots(front_model, tmp_path):
    async with running_front(front_model, tmp_path, num_slots=4, max_running=2) as front:
        info = await front.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.num_slots, info.max_running, info.prefix_reuse) == (4, 2, "all")
        meter = front.hold()
        calls = [front.stub.Generate(request(), timeout=WAIT_S) for _ in range(3)]
        for call in calls:
            assert (await call.read()).HasField("accepted")
        meter.allow(2)
        load = await front.until(lambda load: load.num_running == 2)
        assert (load.num_waiting, load.max_running) == (1, 2)
        meter.allow(100)
        for call in calls:
            assert (await rest(call))[-1].HasField("finished")


async def test_b39_logprobs_of_a_long_prompt(front_model, tmp_path):
    """B39: 64K ids with 20 logprobs each, in small messages between which others are answered; in
    one message fewer, for the fake's sake (above the 4 MB that gRPC allows of itself)."""
    options = {"max_seq_len": 1 << 17, "max_step_tokens": 8192}
    async with running_front(front_model, tmp_path, num_slots=1, **options) as front:
        wanted = request([500] * (1 << 16), max_new_tokens=1, prompt_logprobs=20)
        count, largest, answered = 0, 0, 0
        async for message in front.stub.Generate(wanted, timeout=WAIT_S):
            count += len(message.prompt_logprobs.logprobs)
            largest = max(largest, message.ByteSize())
            if message.HasField("prompt_logprobs") and not count % 8192:
                await front.load()
                answered += 1
        assert count == (1 << 16) - 1
        assert largest < 1 << 20
        assert answered > 1
        del wanted.token_ids.ids[1 << 14 :]
        whole = await front.stub.Complete(wanted, timeout=WAIT_S)
        assert len(whole.prompt_logprobs) == (1 << 14) - 1
        assert {len(one.best) for one in whole.prompt_logprobs} == {20}
        assert whole.ByteSize() > 4 << 20
