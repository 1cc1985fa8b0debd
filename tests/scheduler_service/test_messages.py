from __future__ import annotations

import pytest

from scheduler_service import messages
from scheduler_service.errors import InvalidArgumentError
from scheduler_service.generate_call import ChatInput, ChatMessage, IdsInput, TextInput
from scheduler_service.request import FinishedEvent, FinishReason
from scheduler_service.service import End, Update
from slotwise.v1 import inference_pb2 as pb


def test_nothing_set_is_none_and_not_zero():
    call = messages.generate_call(pb.GenerateRequest(text="a"))
    assert call.prompt == TextInput("a")
    assert call.request_id is None
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens"):
        assert getattr(call, name) is None


def test_set_to_zero_is_zero():
    sampling = pb.SamplingParams(temperature=0, top_p=0, top_k=0, min_p=0, seed=0)
    request = pb.GenerateRequest(text="a", sampling=sampling, max_new_tokens=0, request_id="")
    call = messages.generate_call(request)
    assert (call.temperature, call.top_p, call.top_k, call.min_p, call.seed) == (0, 0, 0, 0, 0)
    assert (call.max_new_tokens, call.request_id) == (0, "")


def test_everything_arrives():
    request = pb.GenerateRequest(
        text="a",
        parse_control_tokens=True,
        stop=["x", "y"],
        stop_token_ids=[4, 5],
        ignore_eos=True,
        include_stop_in_output=True,
        omit_text=True,
        sampling=pb.SamplingParams(temperature=0.5, seed=(1 << 64) - 1),
    )
    call = messages.generate_call(request)
    assert call.prompt == TextInput("a", parse_control_tokens=True)
    assert (call.stop, call.stop_token_ids) == (("x", "y"), (4, 5))
    assert call.ignore_eos
    assert call.include_stop_in_output
    assert call.omit_text
    assert (call.temperature, call.seed) == (0.5, (1 << 64) - 1)


def test_the_other_inputs():
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3, 1]))
    assert messages.generate_call(ids).prompt == IdsInput((3, 1))
    message = pb.ChatMessage(role="user", content="")
    absent = pb.ChatMessage(role="assistant")
    chat = pb.Chat(messages=[message, absent], template_kwargs_json="{}")
    call = messages.generate_call(pb.GenerateRequest(chat=chat))
    turns = (ChatMessage("user", ""), ChatMessage("assistant", None))
    assert call.prompt == ChatInput(turns, True, "{}")
    assert call.is_chat
    assert messages.chat_input(pb.Chat(omit_generation_prompt=True)).add_generation_prompt is False


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "input"),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), parse_control_tokens=True),
            "parse_control_tokens",
        ),
    ],
)
def test_what_cannot_be_read(request_, field):
    with pytest.raises(InvalidArgumentError) as caught:
        messages.generate_call(request_)
    assert caught.value.field == field


def unknown_field(number: int) -> bytes:
    """A field of a later version: a varint, value 1."""
    key = number << 3
    return bytes([key & 0x7F | 0x80, key >> 7, 1])


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda data: pb.GenerateRequest.FromString(data), "GenerateRequest"),
        (
            lambda data: pb.GenerateRequest(sampling=pb.SamplingParams.FromString(data)),
            "sampling",
        ),
        (
            lambda data: pb.GenerateRequest(
                chat=pb.Chat(messages=[pb.ChatMessage(), pb.ChatMessage.FromString(data)])
            ),
            "chat.messages[1]",
        ),
    ],
)
def test_fields_of_a_later_version_are_refused(build, field):
    """Nothing that a caller asks for is left out in silence."""
    with pytest.raises(InvalidArgumentError, match="field number 99") as caught:
        messages.generate_call(build(unknown_field(99)))
    assert caught.value.field == field


def finished_event(**changes) -> FinishedEvent:
    numbers = {
        "num_prompt_tokens": 3,
        "num_generated_tokens": 4,
        "queue_ns": 5,
        "prefill_ns": 6,
        "decode_ns": 7,
        "time_to_first_token_ns": 8,
    }
    return FinishedEvent("id", **{"reason": FinishReason.STOP, **numbers, **changes})


def test_the_end():
    message = messages.finished(End(finished_event(matched_token_id=0), None))
    assert message.finish_reason == pb.FINISH_REASON_STOP
    assert message.WhichOneof("matched_stop") == "matched_token_id"
    assert (message.usage.prompt_tokens, message.usage.completion_tokens) == (3, 4)
    timings = message.timings
    assert (timings.queue_ns, timings.prefill_ns, timings.decode_ns) == (5, 6, 7)
    assert timings.time_to_first_token_ns == 8


def test_a_matched_string_and_no_match():
    matched = messages.finished(End(finished_event(), "stop"))
    assert matched.matched_stop_string == "stop"
    long = messages.finished(End(finished_event(reason=FinishReason.LENGTH), None))
    assert long.finish_reason == pb.FINISH_REASON_LENGTH
    assert long.WhichOneof("matched_stop") is None


def test_a_delta():
    delta = messages.delta(Update(5, (1, 2), "ab"))
    assert (delta.first_token_index, list(delta.token_ids), delta.text) == (5, [1, 2], "ab")


@pytest.mark.parametrize(
    ("field", "limit", "request_"),
    [
        ("stop", 16, pb.GenerateRequest(text="a", stop=["a"] * 17)),
        (
            "chat.messages",
            1 << 14,
            pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * ((1 << 14) + 1))),
        ),
        (
            "chat.template_kwargs_json",
            1 << 20,
            pb.GenerateRequest(chat=pb.Chat(template_kwargs_json=" " * ((1 << 20) + 1))),
        ),
        (
            "token_ids.ids",
            1 << 22,
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * ((1 << 22) + 1))),
        ),
    ],
)
def test_long_lists_are_refused_by_their_length(field, limit, request_):
    """Before anything is done with their items, which would make other calls wait."""
    with pytest.raises(InvalidArgumentError, match=f"{(limit + 1)} .* at most {limit}") as caught:
        messages.generate_call(request_)
    assert caught.value.field == field
