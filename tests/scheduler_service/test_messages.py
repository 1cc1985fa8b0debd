from __future__ import annotations

from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest

from scheduler_service import messages
from scheduler_service.answers import End, Update
from scheduler_service.chat_output import NOTHING, OutputPiece, ToolCallPiece
from scheduler_service.errors import InvalidArgumentError
from scheduler_service.generate_call import ChatInput, ChatMessage, IdsInput, TextInput
from scheduler_service.logprobs import TokenLogprob, TokenLogprobs
from scheduler_service.request import FinishedEvent, FinishReason
from slotwise.v1 import inference_pb2 as pb


def test_nothing_set_is_none_and_not_zero():
    call = messages.generate_call(pb.GenerateRequest(text="a"))
    assert call.prompt == TextInput("a")
    assert call.request_id is None
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_new_tokens",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "logprobs",
        "prompt_logprobs",
        "constraint",
        "n",
        "cache_salt",
    ):
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


def a_value(field):
    """One that is not the field's default."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {3: 1.5}
    if field.message_type is not None:
        value = filled(field.message_type._concrete_class)
    else:
        numbers = {"float": 0.25, "double": 0.25, "bool": True, "str": "{}"}
        python = {field.CPPTYPE_FLOAT: "float", field.CPPTYPE_BOOL: "bool"}
        python[field.CPPTYPE_STRING] = "str"
        value = numbers.get(python.get(field.cpp_type, "int"), 2)
    return [value] if field.is_repeated else value


def filled(kind):
    """A message with every field set; of a oneof, the last."""
    return kind(**{field.name: a_value(field) for field in kind.DESCRIPTOR.fields})


@pytest.mark.parametrize("field", list(pb.GenerateRequest.DESCRIPTOR.fields), ids=lambda f: f.name)
def test_no_field_is_ignored(field):
    if field.name == "parse_control_tokens":
        base, changed = pb.GenerateRequest(text="a"), pb.GenerateRequest(text="a")
        changed.parse_control_tokens = True
    elif field.containing_oneof is not None and field.containing_oneof.name == "input":
        base, changed = pb.GenerateRequest(text="?"), pb.GenerateRequest()
        changed.MergeFrom(pb.GenerateRequest(**{field.name: a_value(field)}))
    else:
        base = pb.GenerateRequest(text="a")
        changed = pb.GenerateRequest(text="a", **{field.name: a_value(field)})
    assert messages.generate_call(base) != messages.generate_call(changed)


@pytest.mark.parametrize(
    "kind", [pb.SamplingParams, pb.Chat, pb.ChatMessage, pb.ToolCall, pb.Tool, pb.Choice]
)
def test_no_field_of_a_part_is_ignored(kind):
    def request(part):
        match part:
            case pb.SamplingParams():
                return pb.GenerateRequest(text="a", sampling=part)
            case pb.Choice():
                return pb.GenerateRequest(text="a", choice=part)
            case pb.Chat():
                return pb.GenerateRequest(chat=part)
            case pb.ChatMessage():
                return request(pb.Chat(messages=[part]))
            case pb.ToolCall():
                return request(pb.ChatMessage(tool_calls=[part]))
            case pb.Tool():
                return request(pb.Chat(tools=[part]))

    base = messages.generate_call(request(kind()))
    for field in kind.DESCRIPTOR.fields:
        part = kind(**{field.name: a_value(field)})
        assert messages.generate_call(request(part)) != base, field.name


def test_the_other_inputs():
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3, 1]))
    assert messages.generate_call(ids).prompt == IdsInput(array("I", (3, 1)))
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
    message = messages.finished(0, End(finished_event(matched_token_id=0), None))
    assert message.finish_reason == pb.FINISH_REASON_STOP
    assert message.WhichOneof("matched_stop") == "matched_token_id"
    assert (message.usage.prompt_tokens, message.usage.completion_tokens) == (3, 4)
    timings = message.timings
    assert (timings.queue_ns, timings.prefill_ns, timings.decode_ns) == (5, 6, 7)
    assert timings.time_to_first_token_ns == 8


def test_a_matched_string_and_no_match():
    matched = messages.finished(0, End(finished_event(), "stop"))
    assert matched.matched_stop_string == "stop"
    long = messages.finished(0, End(finished_event(reason=FinishReason.LENGTH), None))
    assert long.finish_reason == pb.FINISH_REASON_LENGTH
    assert long.WhichOneof("matched_stop") is None


def test_a_delta():
    delta = messages.delta(Update(3, 5, (1, 2), "ab"))
    assert (delta.first_token_index, list(delta.token_ids), delta.text) == (5, [1, 2], "ab")
    assert delta.index == 3


def token_logprobs(token_id: int, num_best: int) -> TokenLogprobs:
    best = tuple(TokenLogprob(i, -0.5, i + 1, b"b") for i in range(num_best))
    return TokenLogprobs(TokenLogprob(token_id, -1.0, 4, b"t"), best)


def test_an_update_as_messages():
    """Prompt logprobs, then the delta, then the end; nothing for what is empty."""
    of_prompt = tuple(token_logprobs(i, 20) for i in range(3))
    end = End(finished_event(num_cached_tokens=2), None)
    update = Update(1, 0, (7,), "t", (token_logprobs(7, 1),), first_prompt_index=5)
    whole = list(messages.responses(replace(update, prompt_logprobs=of_prompt, end=end)))
    kinds = [response.WhichOneof("event") for response in whole]
    assert kinds == ["prompt_logprobs", "delta", "finished"]
    part = whole[0].prompt_logprobs
    assert part.first_token_index == 5
    assert [one.token.token_id for one in part.logprobs] == [0, 1, 2]
    logprobs = whole[1].delta.logprobs[0]
    assert (logprobs.token.token_id, logprobs.token.rank, logprobs.token.text) == (7, 4, b"t")
    assert [best.token_id for best in logprobs.best] == [0]
    assert whole[2].finished.index == 1
    assert whole[2].finished.usage.cached_tokens == 2
    assert not list(messages.responses(Update(0, 3, (), "")))


def test_updates_join_to_whole_answers():
    request = SimpleNamespace(
        call_id="me", prompt_token_ids=(1, 2, 3), sampling=SimpleNamespace(seed=9)
    )
    generation = SimpleNamespace(request=request, num_answers=2, queue_position=4)
    whole = messages.WholeAnswers(generation, messages.accepted(generation, is_journaled=True))
    whole.add(Update(0, 0, (), "", prompt_logprobs=(token_logprobs(2, 0),), first_prompt_index=1))
    whole.add(Update(0, 0, (), "", prompt_logprobs=(token_logprobs(3, 0),), first_prompt_index=2))
    calls = [
        (ToolCallPiece(0, "id", "f", "{"),),
        (ToolCallPiece(0, arguments_json="}"), ToolCallPiece(1, "id2", "g", "[]")),
    ]
    for index, (text, call) in enumerate(zip("ab", calls, strict=True)):
        logprobs = (token_logprobs(index, 1),)
        whole.add(Update(1, index, (index,), text, logprobs, reasoning="r", tool_calls=call))
    for index in (1, 0):
        tail = OutputPiece("!", "?") if index == 1 else NOTHING
        whole.add(Update(index, 2, (), "", tail=tail, end=End(finished_event(), None)))
    response = whole.response()
    assert (response.request_id, response.accepted.seed) == ("me", 9)
    assert response.accepted.is_journaled
    assert response.accepted.num_choices == 2
    assert [one.token.token_id for one in response.prompt_logprobs] == [2, 3]
    assert [choice.index for choice in response.choices] == [0, 1]
    choice = response.choices[1]
    assert (choice.text, choice.reasoning_text, list(choice.token_ids)) == ("ab!", "rr?", [0, 1])
    assert [one.token.token_id for one in choice.logprobs] == [0, 1]
    found = [(call.id, call.name, call.arguments_json) for call in choice.tool_calls]
    assert found == [("id", "f", "{}"), ("id2", "g", "[]")]
    assert choice.finished.finish_reason == pb.FINISH_REASON_STOP
    assert (response.choices[0].text, list(response.choices[0].token_ids)) == ("", [])


@pytest.mark.parametrize(
    ("field", "limit", "request_"),
    [
        ("stop", 16, pb.GenerateRequest(text="a", stop=["a"] * 10_000)),
        ("stop_token_ids", 1024, pb.GenerateRequest(text="a", stop_token_ids=[1] * 1_000_000)),
        (
            "sampling.logit_bias",
            1024,
            pb.GenerateRequest(
                text="a", sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
            ),
        ),
        (
            "choice.texts",
            1024,
            pb.GenerateRequest(text="a", choice=pb.Choice(texts=["a"] * 1025)),
        ),
        (
            "chat.tools",
            1024,
            pb.GenerateRequest(chat=pb.Chat(tools=[pb.Tool()] * 1025)),
        ),
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
    with pytest.raises(InvalidArgumentError, match=f"at most {limit} ") as caught:
        messages.generate_call(request_)
    assert caught.value.field == field
