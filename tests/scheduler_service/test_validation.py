from __future__ import annotations

import math
import struct
from array import array
from dataclasses import replace

import pytest

from scheduler_service.errors import InvalidArgumentError
from scheduler_service.generate_call import (
    ChatInput,
    ChatMessage,
    ConstraintSpec,
    GenerateCall,
    IdsInput,
    TextInput,
)
from scheduler_service.sampling import SamplingDefaults
from scheduler_service.validation import (
    ModelLimits,
    check_call,
    check_fits,
    choice_seed,
    make_requests,
    text_options,
)

VOCAB = 512
LIMITS = ModelLimits(VOCAB, 100, frozenset({2, 7}), SamplingDefaults(0.6, 0.95, 20, 0.05))


def request(prompt=(1, 2, 3), **options):
    call = GenerateCall(IdsInput(prompt), **options)
    check_call(call, LIMITS)
    return make_requests(call, list(prompt), LIMITS, arrival_ns=5, deadline_ns=9)[0]


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def test_a_request_with_nothing_set():
    made = request()
    assert made.request_id.startswith("req-")
    assert made.prompt_token_ids == array("I", (1, 2, 3))
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
    assert sampling.min_p == 0.05
    assert made.max_new_tokens == 97
    assert made.end_token_ids == {2, 7}
    assert (made.arrival_ns, made.deadline_ns) == (5, 9)


def test_unseeded_requests_differ_and_say_so():
    """B21."""
    made = [request() for _ in range(4)]
    assert len({r.sampling.seed for r in made}) == 4
    assert len({r.request_id for r in made}) == 4
    assert all(0 <= r.sampling.seed < 1 << 64 for r in made)
    assert request(seed=0).sampling.seed == 0


@pytest.mark.parametrize(
    ("field", "value", "got"),
    [
        ("temperature", 0.0, 0.0),
        ("temperature", float32(1e-5), float32(1e-5)),
        ("temperature", 1e-4, 1e-4),
        ("temperature", 100.0, 100.0),
        ("top_p", 0.0, 0.0),
        ("top_p", 1e-6, 1e-6),
        ("top_p", 1.0, 1.0),
        ("top_k", -1, 0),
        ("top_k", 0, 0),
        ("top_k", 1, 1),
        ("top_k", VOCAB, VOCAB),
        ("top_k", VOCAB + 1, 0),
        ("min_p", 0.0, 0.0),
        ("min_p", 1.0, 1.0),
    ],
)
def test_border_values_that_are_accepted(field, value, got):
    """B23: each has a meaning; set to zero is not unset."""
    assert getattr(request(**{field: value}).sampling, field) == got


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (1e-7, 9e-6, -0.1, 100.1, math.nan, math.inf)),
        *(("top_p", v) for v in (-1e-6, 1.000001, math.nan, math.inf, -math.inf)),
        *(("min_p", v) for v in (-1e-6, 1.000001, math.nan, math.inf)),
        ("top_k", -2),
    ],
)
def test_border_values_that_are_refused(field, value):
    """B23."""
    with pytest.raises(InvalidArgumentError) as caught:
        request(**{field: value})
    assert caught.value.field == f"sampling.{field}"
    assert f"{value:g}" in str(caught.value)


@pytest.mark.parametrize(
    ("num_prompt", "wanted", "room"), [(3, None, 97), (99, None, 1), (99, 1, 1), (3, 97, 97)]
)
def test_room_in_the_context(num_prompt, wanted, room):
    """B16: unset takes the room that is left."""
    assert request((1,) * num_prompt, max_new_tokens=wanted).max_new_tokens == room


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"max_new_tokens": 98}, "max_new_tokens", ["98", "3 tokens", "101", "100", "97 fit"]),
        ({"max_new_tokens": 0}, "max_new_tokens", ["0", "at least 1"]),
        ({"max_new_tokens": 100}, "max_new_tokens", ["100"]),
        ({"request_id": ""}, "request_id", ["0 characters"]),
        ({"request_id": "x" * 129}, "request_id", ["129"]),
        ({"request_id": "a\nb"}, "request_id", ["printable"]),
        ({"request_id": "é"}, "request_id", ["ASCII"]),
        ({"stop": ("a",) * 17}, "stop", ["17", "16"]),
        ({"stop": ("a", "")}, "stop[1]", ["0 bytes"]),
        ({"stop": ("é" * 513,)}, "stop[0]", ["1026", "1024"]),
        ({"stop_token_ids": (1, VOCAB)}, "stop_token_ids[1]", ["512"]),
    ],
)
def test_what_is_refused(options, field, words):
    with pytest.raises(InvalidArgumentError) as caught:
        request(**options)
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)


def test_limits_that_are_just_kept():
    made = request(request_id="x" * 128, stop=("é" * 512,) * 16, stop_token_ids=(VOCAB - 1,))
    assert made.request_id == "x" * 128


@pytest.mark.parametrize(
    ("ignore", "stops", "ends"),
    [
        (False, (), {2, 7}),
        (False, (9,), {2, 7, 9}),
        (True, (), set()),
        (True, (9,), {9}),
        (True, (2,), {2}),
    ],
)
def test_end_ids(ignore, stops, ends):
    """B07: ignore_eos silences the model's own ids, never the caller's."""
    assert request(ignore_eos=ignore, stop_token_ids=stops).end_token_ids == ends


def test_text_options():
    call = GenerateCall(IdsInput((1,)), stop=("a",), omit_text=True, include_stop_in_output=True)
    options = text_options(call, make_requests(call, [1], LIMITS, 0, None)[0])
    assert (options.stop, options.end_token_ids) == (("a",), {2, 7})
    assert options.omit_text
    assert options.include_stop_in_output


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("frequency_penalty", [-2.0, 0.0, 2.0], [-2.01, 2.01, NAN, INFINITY]),
        ("presence_penalty", [-2.0, 0.0, 2.0], [-2.01, 2.01, NAN, -INFINITY]),
        ("repetition_penalty", [float32(1e-6), 1.0, 10.0], [0.0, -1.0, 9e-7, 10.1, NAN, INFINITY]),
        ("logprobs", [0, 20], [21, 2**32 - 1]),
        ("prompt_logprobs", [0, 20], [21]),
        ("n", [1, 32], [0, 33]),
        ("min_new_tokens", [0, 97], [98, 2**32 - 1]),
        ("stop_token_ids", [(1,) * 1024], [(1,) * 1025]),
        ("cache_salt", ["", "x" * 256], ["x" * 257]),
        (
            "logit_bias",
            [((0, -100.0), (VOCAB - 1, 100.0)), tuple((i % VOCAB, 1.0) for i in range(1024))],
            [((VOCAB, 1.0),), ((1, 100.5),), ((1, NAN),), ((1, 1.0),) * 1025],
        ),
        (
            "constraint",
            [
                ConstraintSpec("json_object"),
                ConstraintSpec("regex", "a"),
                ConstraintSpec("choice", choices=("a",) * 1024),
            ],
            [
                ConstraintSpec("regex", ""),
                ConstraintSpec("json_schema", ""),
                ConstraintSpec("grammar", "x" * ((1 << 20) + 1)),
                ConstraintSpec("choice"),
                ConstraintSpec("choice", choices=("a", "")),
                ConstraintSpec("choice", choices=("a" * (1 << 20), "b")),
            ],
        ),
    ],
)
def test_borders(field, good, bad):
    for value in good:
        request(**{field: value})
    for value in bad:
        name = value.kind if field == "constraint" else field
        with pytest.raises(InvalidArgumentError) as caught:
            request(**{field: value})
        assert name in caught.value.field


def test_absent_is_not_zero():
    made = request()
    assert (made.num_logprobs, made.num_prompt_logprobs) == (None, None)
    assert made.sampling.repetition_penalty == 1.0
    assert made.sampling.frequency_penalty == made.sampling.presence_penalty == 0.0
    zero = request(logprobs=0, prompt_logprobs=0)
    assert (zero.num_logprobs, zero.num_prompt_logprobs) == (0, 0)


def test_min_new_tokens_is_within_the_limit():
    assert request(min_new_tokens=5, max_new_tokens=5).min_new_tokens == 5
    with pytest.raises(InvalidArgumentError, match="6 is above max_new_tokens, which is 5"):
        request(min_new_tokens=6, max_new_tokens=5)


@pytest.mark.parametrize(
    ("num_prompt", "options", "field"),
    [
        # B39, an answer and a prompt; the largest table of answers without logprobs.
        (10, {"logprobs": 20, "max_new_tokens": 1 << 16}, None),
        (1 << 16, {"prompt_logprobs": 20, "max_new_tokens": 1}, None),
        (10, {"n": 32, "max_new_tokens": 1 << 16}, None),
        (10, {"logprobs": 20, "max_new_tokens": 1 << 16, "n": 2}, "max_new_tokens"),
        (1 << 17, {"prompt_logprobs": 20, "max_new_tokens": 1}, "prompt_logprobs"),
    ],
)
def test_what_one_message_holds(num_prompt, options, field):
    call = GenerateCall(IdsInput(()), **options)
    requests = make_requests(call, (1,) * num_prompt, replace(LIMITS, max_seq_len=1 << 20), 0, None)
    if field is None:
        check_fits(requests)
        return
    with pytest.raises(InvalidArgumentError, match="one holds 64") as caught:
        check_fits(requests)
    assert caught.value.field == field


def test_a_stop_in_a_text_that_is_left_out_is_refused():
    asked = {"stop": ("a",), "include_stop_in_output": True}
    check_call(GenerateCall(IdsInput((1,)), **asked), LIMITS)
    with pytest.raises(InvalidArgumentError, match="omit_text leaves out") as caught:
        check_call(GenerateCall(IdsInput((1,)), omit_text=True, **asked), LIMITS)
    assert caught.value.field == "include_stop_in_output"


def test_seeds_of_answers_are_derived():
    """As splitmix64 gives them; answer 0 keeps the call's own."""
    assert choice_seed(5, 0) == 5
    assert choice_seed(0, 1) == 0xE220A8397B1DCDAF
    assert choice_seed(0, 2) == 0x6E789E6AA1B965F4
    assert len({choice_seed(2**64 - 1, index) for index in range(32)}) == 32


@pytest.mark.parametrize(
    ("prompt", "options", "limits"),
    [
        (TextInput("a"), {}, "qwen3"),
        (ChatInput((ChatMessage("user", "a"),)), {"omit_text": True}, "qwen3"),
        (ChatInput((ChatMessage("user", "a"),)), {}, ""),
    ],
)
def test_parsing_needs_a_chat_its_text_and_a_format(prompt, options, limits):
    call = GenerateCall(prompt, parse_output=True, **options)
    with pytest.raises(InvalidArgumentError, match="parse_output"):
        check_call(call, replace(LIMITS, output_format=limits))
    fine = GenerateCall(ChatInput((ChatMessage("user", "a"),)), parse_output=True)
    check_call(fine, replace(LIMITS, output_format="qwen3"))
