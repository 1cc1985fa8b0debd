from __future__ import annotations

import json
from dataclasses import fields

import pytest

from slotwise.v1 import inference_pb2 as pb
from slotwise_client import (
    Accepted,
    Chat,
    Choice,
    Completion,
    Counters,
    Delta,
    Finished,
    FinishReason,
    InvalidArgumentError,
    Load,
    Message,
    ModelInfo,
    PrefixCache,
    PromptLogprobs,
    RenderedChat,
    Sampling,
    SelfTest,
    ServerInfo,
    Setup,
    Slot,
    SlotState,
    Timings,
    TokenLogprob,
    TokenLogprobs,
    Tool,
    ToolCall,
    ToolCallDelta,
    Usage,
    Worker,
)
from slotwise_client._protocol import (
    chat_message,
    detokenize_request,
    event,
    generate_request,
    mirror,
)
from slotwise_client.types import GenerateOptions


def test_text_ids_and_chat_choose_their_member_of_the_input():
    assert generate_request("", {}).WhichOneof("input") == "text"
    assert generate_request([], {}).WhichOneof("input") == "token_ids"
    assert generate_request(Chat.of("hi"), {}).WhichOneof("input") == "chat"
    assert list(generate_request((3, 1, 2), {}).token_ids.ids) == [3, 1, 2]


def test_what_is_left_out_stays_unset():
    request = generate_request("x", {})
    assert not request.HasField("sampling")
    assert request == pb.GenerateRequest(text="x")


def test_zero_is_sent_and_is_not_unset():
    request = generate_request("x", {"temperature": 0, "top_k": 0, "seed": 0, "max_new_tokens": 0})
    for name in ("temperature", "top_k", "seed"):
        assert request.sampling.HasField(name)
    assert request.HasField("max_new_tokens")
    assert not request.sampling.HasField("top_p")


def test_every_option_reaches_its_field():
    options: GenerateOptions = {
        "request_id": "r",
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": -1,
        "min_p": 0.125,
        "seed": 2**64 - 1,
        "frequency_penalty": -0.5,
        "presence_penalty": 0.75,
        "repetition_penalty": 1.25,
        "logit_bias": {3: -100, 4: 0.5},
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [4, 5],
        "ignore_eos": True,
        "include_stop_in_output": True,
        "parse_control_tokens": True,
        "omit_text": True,
        "logprobs": 0,
        "prompt_logprobs": 20,
        "regex": "a+",
        "n": 3,
        "cache_salt": "s",
        "parse_output": True,
        "attach_window_ms": 7,
    }
    others = {"json_schema", "json_object", "grammar", "choice"}
    assert options.keys() | others == GenerateOptions.__annotations__.keys()
    sampling = pb.SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=-1,
        min_p=0.125,
        seed=2**64 - 1,
        frequency_penalty=-0.5,
        presence_penalty=0.75,
        repetition_penalty=1.25,
        logit_bias={3: -100, 4: 0.5},
    )
    assert generate_request("x", options) == pb.GenerateRequest(
        text="x",
        request_id="r",
        sampling=sampling,
        max_new_tokens=9,
        min_new_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[4, 5],
        ignore_eos=True,
        include_stop_in_output=True,
        parse_control_tokens=True,
        omit_text=True,
        logprobs=0,
        prompt_logprobs=20,
        regex="a+",
        n=3,
        cache_salt="s",
        parse_output=True,
        attach_window_ms=7,
    )


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"json_schema": '{"type": "null"}'}, {"json_schema": '{"type": "null"}'}),
        ({"json_schema": {"type": "null"}}, {"json_schema": '{"type": "null"}'}),
        ({"json_object": True}, {"json_object": pb.JsonObject()}),
        ({"json_object": False}, {}),
        ({"json_object": False, "regex": ""}, {"regex": ""}),
        ({"grammar": "start: /a/"}, {"grammar": "start: /a/"}),
        ({"choice": ["a", "b"]}, {"choice": pb.Choice(texts=["a", "b"])}),
        ({"choice": []}, {"choice": pb.Choice()}),
    ],
)
def test_a_constraint_is_the_one_member_that_was_chosen(options, fields):
    assert generate_request("x", options) == pb.GenerateRequest(text="x", **fields)


def test_a_second_constraint_is_refused_and_does_not_replace_the_first():
    with pytest.raises(InvalidArgumentError, match="json_schema is set already") as caught:
        generate_request("x", {"json_schema": "{}", "choice": ["a"]})
    assert caught.value.field == "choice"


def test_the_options_are_all_that_the_protocol_has():
    inputs = {"text", "token_ids", "chat"}
    fields = {f.name for f in pb.GenerateRequest.DESCRIPTOR.fields} - inputs - {"sampling"}
    fields |= {f.name for f in pb.SamplingParams.DESCRIPTOR.fields}
    assert GenerateOptions.__annotations__.keys() == fields


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(TypeError, match="'max_tokens'"):
        generate_request("x", {"max_tokens": 3})


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"top_k": 2**40}, "sampling.top_k"),
        ({"seed": -1}, "sampling.seed"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"max_new_tokens": -3}, "max_new_tokens"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids"),
        ({"stop": "END"}, "stop"),
        ({"choice": "END"}, "choice.texts"),
        ({"logit_bias": {-1: 2.0}}, "sampling.logit_bias"),
        ({"logit_bias": [3]}, "sampling.logit_bias"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
    ],
)
def test_a_value_its_field_cannot_hold_is_refused_with_the_field(options, field):
    with pytest.raises(InvalidArgumentError) as caught:
        generate_request("x", options)
    assert caught.value.field == field


def test_bad_ids_name_their_field():
    with pytest.raises(InvalidArgumentError) as caught:
        generate_request([1, -1], {})
    assert caught.value.field == "token_ids.ids"
    with pytest.raises(InvalidArgumentError):
        detokenize_request([2**32], keep_control_tokens=False)


def test_a_chat_keeps_roles_absent_content_and_template_arguments():
    chat = Chat(
        [Message("system", ""), Message("user", "q"), Message("assistant")],
        omit_generation_prompt=True,
        template_kwargs={"enable_thinking": False},
    )
    message = chat_message(chat)
    assert [turn.role for turn in message.messages] == ["system", "user", "assistant"]
    assert [turn.HasField("content") for turn in message.messages] == [True, True, False]
    assert message.omit_generation_prompt
    assert json.loads(message.template_kwargs_json) == {"enable_thinking": False}


def test_every_field_of_messages_and_tools_is_sent():
    call = ToolCall("call_0", "find", '{"what": "it"}')
    turn = Message("assistant", "c", [call], "call_9", "n", "r")
    tool = Tool("find", "Finds.", {"type": "object"})
    message = chat_message(Chat.of([turn], tools=[tool], template_kwargs={"a": 1}))
    assert message.messages[0] == pb.ChatMessage(
        role="assistant",
        content="c",
        tool_calls=[pb.ToolCall(id="call_0", name="find", arguments_json='{"what": "it"}')],
        tool_call_id="call_9",
        name="n",
        reasoning_content="r",
    )
    wanted = pb.Tool(name="find", description="Finds.", parameters_json='{"type": "object"}')
    assert list(message.tools) == [wanted]
    assert message.template_kwargs_json == '{"a": 1}'
    assert chat_message(Chat([], tools=[Tool("f")])).tools[0] == pb.Tool(name="f")
    for cls, kind in ((Message, pb.ChatMessage), (ToolCall, pb.ToolCall)):
        assert {f.name for f in fields(cls)} == {f.name for f in kind.DESCRIPTOR.fields}


def test_a_system_message_goes_before_a_conversation():
    chat = Chat.of([Message("user", "a"), Message("assistant", "b")], system="s")
    assert [turn.role for turn in chat.messages] == ["system", "user", "assistant"]


MIRRORS = [
    (Sampling, pb.SamplingParams),
    (ModelInfo, pb.GetModelInfoResponse),
    (SelfTest, pb.SelfTest),
    (Worker, pb.WorkerInfo),
    (ServerInfo, pb.GetServerInfoResponse),
    (Setup, pb.Setup),
    (Counters, pb.RequestCounters),
    (Load, pb.GetLoadResponse),
    (Slot, pb.Slot),
    (Usage, pb.Usage),
    (Timings, pb.Timings),
    (PrefixCache, pb.PrefixCacheCounters),
    (ToolCall, pb.ToolCall),
    (ToolCallDelta, pb.ToolCallDelta),
]


@pytest.mark.parametrize(("cls", "message"), MIRRORS)
def test_no_field_of_the_protocol_is_left_out(cls, message):
    assert {f.name for f in fields(cls)} == {f.name for f in message.DESCRIPTOR.fields}


@pytest.mark.parametrize(("cls", "message"), MIRRORS)
def test_an_empty_message_can_be_read(cls, message):
    assert isinstance(mirror(cls, message()), cls)


READ = [
    (Choice, pb.CompleteChoice),
    (Completion, pb.CompleteResponse),
    (TokenLogprob, pb.TokenLogprob),
    (TokenLogprobs, pb.TokenLogprobs),
    (RenderedChat, pb.RenderChatResponse),
]
OF_A_STREAM = [(Accepted, pb.Accepted), (Delta, pb.Delta), (PromptLogprobs, pb.PromptLogprobs)]


@pytest.mark.parametrize(("cls", "message"), READ)
def test_answers_have_the_fields_of_the_protocol(cls, message):
    assert {f.name for f in fields(cls)} == {f.name for f in message.DESCRIPTOR.fields}


@pytest.mark.parametrize(("cls", "message"), OF_A_STREAM)
def test_events_have_the_fields_of_the_protocol_and_the_request(cls, message):
    wanted = {f.name for f in message.DESCRIPTOR.fields} | {"request_id"}
    assert {f.name for f in fields(cls)} == wanted


def test_presence_becomes_none_and_zero_stays_zero():
    assert mirror(Sampling, pb.SamplingParams(top_k=0)).top_k == 0
    assert mirror(Sampling, pb.SamplingParams()).top_k is None
    assert mirror(Slot, pb.Slot()).request_id is None
    assert mirror(Sampling, pb.SamplingParams(logit_bias={3: 0.5})).logit_bias == {3: 0.5}


@pytest.mark.parametrize("state", list(SlotState))
def test_slot_states(state):
    number = pb.SlotState.Value(f"SLOT_STATE_{state.name}")
    assert mirror(Slot, pb.Slot(state=number)).state is state


def test_a_state_of_a_newer_server_is_unspecified():
    message = pb.Slot.FromString(b"\x18\x63")  # field 3, number 99
    assert mirror(Slot, message).state is SlotState.UNSPECIFIED


def test_nested_messages_are_read():
    worker = pb.WorkerInfo(rank=3, self_tests=[pb.SelfTest(name="rows", passed=True)])
    info = mirror(ServerInfo, pb.GetServerInfoResponse(workers=[worker]))
    assert info.workers[0].rank == 3
    assert info.workers[0].self_tests == (SelfTest("rows", True, ""),)


def test_events_of_a_stream():
    assert event(pb.GenerateResponse(request_id="r", accepted=pb.Accepted(seed=4))) == Accepted(
        "r", 0, 4, 0
    )
    delta = pb.Delta(index=1, first_token_index=6, token_ids=[8, 9], text="ab")
    assert event(pb.GenerateResponse(request_id="r", delta=delta)) == Delta("r", 1, 6, (8, 9), "ab")
    assert event(pb.GenerateResponse(request_id="r")) is None


def test_all_of_a_delta_is_read():
    token = pb.TokenLogprob(token_id=8, logprob=-0.5, rank=1, text=b"\xe2")
    delta = pb.Delta(
        token_ids=[8],
        logprobs=[pb.TokenLogprobs(token=token, best=[token, token])],
        reasoning_text="r",
        tool_calls=[pb.ToolCallDelta(index=1, id="i", name="n", arguments_json="{")],
    )
    mine = TokenLogprob(8, -0.5, 1, b"\xe2")
    rows = (TokenLogprobs(mine, (mine, mine)),)
    parts = (ToolCallDelta(1, "i", "n", "{"),)
    assert event(pb.GenerateResponse(request_id="r", delta=delta)) == Delta(
        "r", 0, 0, (8,), "", rows, "r", parts
    )
    part = pb.PromptLogprobs(first_token_index=4, logprobs=delta.logprobs)
    got = event(pb.GenerateResponse(request_id="r", prompt_logprobs=part))
    assert got == PromptLogprobs("r", 4, rows)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_finish_reasons(reason):
    number = pb.FinishReason.Value(f"FINISH_REASON_{reason.name}")
    got = event(pb.GenerateResponse(finished=pb.Finished(finish_reason=number)))
    assert isinstance(got, Finished)
    assert got.finish_reason is reason


@pytest.mark.parametrize(
    ("finished", "matched"),
    [
        (pb.Finished(), None),
        (pb.Finished(matched_token_id=0), 0),
        (pb.Finished(matched_stop_string="END"), "END"),
    ],
)
def test_what_stopped_generation(finished, matched):
    got = event(pb.GenerateResponse(finished=finished))
    assert isinstance(got, Finished)
    assert got.matched_stop == matched
