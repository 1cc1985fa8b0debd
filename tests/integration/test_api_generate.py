"""Generate and Complete over gRPC, on a fake worker whose tokens are known."""

from __future__ import annotations

import grpc
import pytest

from fakes import tokens_alone
from integration.front import VOCAB_SIZE, WAIT_S, rest, running_front
from integration.streams import Generation
from scheduler_service.request import Request, Sampling
from slotwise.v1 import inference_pb2 as pb

IDS = pb.TokenIds(ids=[11, 12, 13])
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 7}
B01_TEXT = "\U0001f469\u200d\U0001f467 \u9ea4 \U0001f1e9\U0001f1ea"


def request(**options) -> pb.GenerateRequest:
    if not {"text", "chat", "token_ids"} & set(options):
        options["token_ids"] = IDS
    return pb.GenerateRequest(**options)


def script_of(token_ids):
    """Forces these tokens after the prompt IDS, then 300 for ever."""

    def script(tokens):
        place = len(tokens) - len(IDS.ids)
        return token_ids[place] if place < len(token_ids) else 300

    return script


def char_ids(model, text: str) -> list[int]:
    return [i for char in text for i in model.tokenizer.encode(char)]


async def forced(front_model, tmp_path, token_ids, **options) -> Generation:
    async with running_front(front_model, tmp_path, script_of(token_ids), num_slots=2) as front:
        return await front.collect(request(**options))


@pytest.mark.parametrize("count", [1, 2, 3, 16])
async def test_exactly_the_tokens_asked_for(front, count):
    """B15: streamed and whole, the same number in usage."""
    sampling = Sampling(**GREEDY)
    alone = tokens_alone(Request("r", (11, 12, 13), sampling, count, frozenset(), 0), VOCAB_SIZE)
    wanted = request(max_new_tokens=count, ignore_eos=True, sampling=pb.SamplingParams(**GREEDY))
    got = await front.collect(wanted)
    assert got.token_ids == alone
    assert got.finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert (got.accepted.prompt_tokens, got.finished.usage.prompt_tokens) == (3, 3)
    whole = await front.stub.Complete(wanted, timeout=WAIT_S)
    (choice,) = whole.choices
    assert list(choice.token_ids) == alone
    assert choice.text == got.text
    assert choice.finished.usage.completion_tokens == count
    assert choice.finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert (whole.accepted.seed, whole.accepted.prompt_tokens) == (7, 3)
    assert whole.request_id


async def test_split_characters_over_the_wire(front_model, tmp_path):
    """B01."""
    ids = front_model.tokenizer.encode(B01_TEXT)
    async with running_front(front_model, tmp_path, script_of(ids), num_slots=1) as front:
        call = front.stub.Generate(request(max_new_tokens=len(ids)), timeout=WAIT_S)
        texts = [m.delta.text async for m in call if m.WhichOneof("event") == "delta"]
    assert "".join(texts) == B01_TEXT
    assert not [text for text in texts if "\ufffd" in text]


@pytest.mark.parametrize("omit_text", [False, True])
async def test_a_stop_string(front_model, tmp_path, omit_text):
    """B03, B04: nothing of it leaks, and it works without text."""
    ids = char_ids(front_model, "ABC DEFGHIJ KLM")
    got = await forced(front_model, tmp_path, ids, stop=["DEFGHIJ"], omit_text=omit_text)
    assert got.text == ("" if omit_text else "ABC ")
    assert got.finished.finish_reason == pb.FINISH_REASON_STOP
    assert got.finished.matched_stop_string == "DEFGHIJ"
    assert got.token_ids == ids[:11]


async def test_half_a_stop_string_at_the_limit(front_model, tmp_path):
    """B03: the held text is delivered."""
    ids = char_ids(front_model, "ABC DEF")
    got = await forced(front_model, tmp_path, ids, stop=["DEFGHIJ"], max_new_tokens=7)
    assert got.text == "ABC DEF"
    assert got.finished.finish_reason == pb.FINISH_REASON_LENGTH


async def test_a_stop_string_in_the_last_token(front_model, tmp_path):
    """The scheduler says LENGTH at the same moment; the caller's stop string wins."""
    ids = char_ids(front_model, "ABC")
    got = await forced(front_model, tmp_path, ids, stop=["BC"], max_new_tokens=3)
    assert (got.text, got.finished.matched_stop_string) == ("A", "BC")
    assert got.finished.finish_reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("options", "count", "matched"),
    [
        ({}, 3, 2),
        ({"ignore_eos": True}, 8, None),
        ({"ignore_eos": True, "stop_token_ids": [33]}, 4, 33),
        ({"stop_token_ids": [31]}, 2, 31),
    ],
)
async def test_end_ids(front_model, tmp_path, options, count, matched):
    """B07."""
    got = await forced(
        front_model, tmp_path, [30, 31, 2, 33, 34, 35, 36, 37], max_new_tokens=8, **options
    )
    assert got.token_ids == [30, 31, 2, 33, 34, 35, 36, 37][:count]
    if matched is None:
        assert got.finished.WhichOneof("matched_stop") is None
    else:
        assert got.finished.matched_token_id == matched


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab<|im_end|>")])
async def test_the_text_of_the_end_id(front_model, tmp_path, include, text):
    ids = [*char_ids(front_model, "ab"), 2]
    assert (await forced(front_model, tmp_path, ids, include_stop_in_output=include)).text == text


async def test_unseeded_requests_differ_and_can_be_repeated(front):
    """B21."""
    options = {"max_new_tokens": 8, "ignore_eos": True}
    sampled = pb.SamplingParams(temperature=0.8)
    answers = [await front.collect(request(sampling=sampled, **options)) for _ in range(4)]
    assert len({tuple(a.token_ids) for a in answers}) == 4
    seeded = pb.SamplingParams(temperature=0.8, seed=answers[0].accepted.seed)
    again = await front.collect(request(sampling=seeded, **options))
    assert again.token_ids == answers[0].token_ids


@pytest.mark.parametrize(
    ("num_prompt", "new", "code"),
    [
        (255, None, None),
        (256, None, grpc.StatusCode.INVALID_ARGUMENT),
        (257, None, grpc.StatusCode.INVALID_ARGUMENT),
        (2560, None, grpc.StatusCode.INVALID_ARGUMENT),
        (246, 100, grpc.StatusCode.INVALID_ARGUMENT),
        (246, 10, None),
    ],
)
async def test_prompts_around_the_context(front, num_prompt, new, code):
    """B16: refused at once with both numbers, while a normal request is not delayed."""
    prompt = pb.TokenIds(ids=[5] * num_prompt)
    wanted = request(token_ids=prompt, max_new_tokens=new, ignore_eos=True)
    if code is None:
        got = await front.collect(wanted)
        assert len(got.token_ids) == 256 - num_prompt
        return
    meter = front.hold()
    running = front.stub.Generate(request(max_new_tokens=3, ignore_eos=True), timeout=WAIT_S)
    error = await front.error(front.stub.Generate(wanted, timeout=WAIT_S))
    assert error.code() is code
    assert str(num_prompt) in error.details()
    assert "256" in error.details()
    assert (await front.load()).num_waiting == 0
    meter.allow(100)
    assert (await rest(running))[-1].finished.usage.completion_tokens == 3


@pytest.mark.parametrize(
    "empty",
    [
        {"text": ""},
        {"token_ids": pb.TokenIds()},
        {"chat": pb.Chat()},
        {"max_new_tokens": 0},
        {"stop": [""]},
        {"request_id": ""},
    ],
)
async def test_empty_things_hurt_nobody(front, empty):
    """B17: refused, and a running stream goes on untouched."""
    meter = front.hold()
    running = front.stub.Generate(request(max_new_tokens=9, ignore_eos=True), timeout=WAIT_S)
    assert (await running.read()).HasField("accepted")
    for method in (front.stub.Generate, front.stub.Complete):
        error = await front.error(method(request(**empty), timeout=WAIT_S))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    meter.allow(100)
    assert (await rest(running))[-1].finished.usage.completion_tokens == 9
    load = await front.load()
    assert (load.requests.rejected_invalid, load.requests.accepted) == (2, 1)


async def test_an_input_is_needed(front):
    error = await front.error(front.stub.Complete(pb.GenerateRequest(), timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "one of text, token_ids and chat" in error.details()


@pytest.mark.parametrize("value", [0.0, 1e-7, 1e-4, 2.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
async def test_the_sampling_grid(front, field, value):
    """B23: accepted with a meaning, or refused by name; the server lives on."""
    sampling = pb.SamplingParams(**{field: value})
    call = front.stub.Complete(
        request(sampling=sampling, max_new_tokens=2, ignore_eos=True), timeout=WAIT_S
    )
    accepted = {"temperature": (0.0, 1e-4, 2.0)}.get(field, (0.0, 1e-7, 1e-4))
    if value in accepted:
        assert len((await call).choices[0].token_ids) == 2
    else:
        error = await front.error(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"sampling.{field}" in error.details()
    again = await front.collect(request(max_new_tokens=2, ignore_eos=True))
    assert len(again.token_ids) == 2


async def test_absent_is_not_zero(front):
    """B23: what reaches the worker is the model's default where unset, zero where zero."""
    options = {"max_new_tokens": 1, "ignore_eos": True}
    await front.collect(request(**options))
    unset = front.worker.commands[-1].rows[0].setup
    assert (unset.temperature, unset.top_p, unset.top_k, unset.min_p) == (1.0, 1.0, 0, 0.0)
    zero = pb.SamplingParams(temperature=0, top_p=0, top_k=-1, min_p=0, seed=0)
    await front.collect(request(sampling=zero, **options))
    setup = front.worker.commands[-1].rows[0].setup
    assert (setup.temperature, setup.top_p, setup.top_k, setup.seed) == (0.0, 0.0, 0, 0)
    await front.collect(request(sampling=pb.SamplingParams(top_k=VOCAB_SIZE + 1), **options))
    assert front.worker.commands[-1].rows[0].setup.top_k == 0
