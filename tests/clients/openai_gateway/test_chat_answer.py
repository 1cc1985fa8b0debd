"""Chunks and whole answers of a chat."""

from __future__ import annotations

import json

import pytest
from clients.openai_gateway.test_chat import read

from slotwise_client import (
    Accepted,
    Delta,
    Finished,
    FinishReason,
    PromptLogprobs,
    Timings,
    TokenLogprob,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from slotwise_gateway.answer import Envelope
from slotwise_gateway.chat_answer import ChatStream, ChatWhole, call_id
from slotwise_gateway.errors import ApiError

ENVELOPE = Envelope('chatcmpl-"r"', "chat.completion", 1700, 'the "m"', "fp")
ACCEPTED = Accepted("r", 7, 1, 0, num_choices=1)
ROW = TokenLogprobs(TokenLogprob(5, -0.5, 1, b"a"), (TokenLogprob(5, -0.5, 1, b"a"),))


def delta(text="", index=0, **more) -> Delta:
    return Delta("r", index, 0, more.pop("token_ids", (5,)), text, **more)


def finished(reason=FinishReason.STOP, index=0, stop=None, cached=2) -> Finished:
    usage = Usage(7, 3, cached)
    return Finished("r", index, reason, stop, usage, Timings(0, 0, 0, 0))


def stream(job=None) -> ChatStream:
    return ChatStream(job or read(), ENVELOPE.as_chunk(), "r")


def whole(job, *events) -> dict:
    answer = ChatWhole(job, ENVELOPE, "r")
    answer.begin(0, ACCEPTED)
    for event in events:
        if isinstance(event, Delta):
            answer.delta(0, event)
        elif isinstance(event, PromptLogprobs):
            answer.prompt_logprobs(0, event)
        else:
            answer.finish(0, event)
    return json.loads("".join(answer.pieces()))


def parsed(written: bytes) -> list[dict]:
    *events, rest = written.split(b"\n\n")
    assert rest == b""
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def one(written: bytes) -> dict:
    (event,) = parsed(written)
    return event


# Chunks


def test_a_stream_from_the_role_to_the_end():
    made = stream()
    first = one(made.begin(0, ACCEPTED))
    assert first == {
        "id": 'chatcmpl-"r"',
        "object": "chat.completion.chunk",
        "created": 1700,
        "model": 'the "m"',
        "system_fingerprint": "fp",
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    }
    text = 'a "quote", a \\, a\nbreak, \x00 é 😀 \u2028'
    second = one(made.delta(0, delta(text)))
    assert second.keys() == first.keys()
    assert second["choices"][0]["delta"] == {"content": text}
    last = one(made.finish(0, finished()))
    assert last["choices"] == [
        {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert made.end() == b"data: [DONE]\n\n"


def test_nothing_is_told_of_text_that_is_held_back():
    made = stream()
    assert made.delta(0, delta("")) == b""
    assert made.prompt_logprobs(0, PromptLogprobs("r", 1, ())) == b""


def test_usage_where_it_is_asked_for():
    made = stream(read(stream=True, stream_options={"include_usage": True}, n=2))
    chunks = [
        *parsed(made.begin(0, ACCEPTED)),
        one(made.delta(0, delta("a"))),
        one(made.delta(0, delta("b", reasoning_text="r"))),
        one(made.finish(0, finished())),
        one(made.finish(0, finished(index=1, cached=7))),
    ]
    assert all(chunk["usage"] is None for chunk in chunks)
    *events, done = made.end().split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    (usage,) = (json.loads(event.removeprefix(b"data: ")) for event in events)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 6,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_choices_by_their_index():
    made = stream(read(n=3))
    begun = parsed(made.begin(0, ACCEPTED))
    assert [chunk["choices"][0]["index"] for chunk in begun] == [0, 1, 2]
    assert one(made.delta(0, delta("a", index=2)))["choices"][0]["index"] == 2
    assert one(made.finish(0, finished(index=1)))["choices"][0]["index"] == 1


def test_reasoning():
    told = one(stream().delta(0, delta("b", reasoning_text="a")))["choices"][0]["delta"]
    assert told == {"content": "b", "reasoning_content": "a"}


def test_calls_in_parts():
    made = stream()
    parts = (ToolCallDelta(0, "call_0", "f", '{"a'), ToolCallDelta(1, "call_1", "g", ""))
    told = one(made.delta(0, delta(tool_calls=parts)))["choices"][0]["delta"]
    assert told == {
        "tool_calls": [
            {
                "index": 0,
                "id": call_id("r", 0, 0),
                "type": "function",
                "function": {"name": "f", "arguments": '{"a'},
            },
            {
                "index": 1,
                "id": call_id("r", 0, 1),
                "type": "function",
                "function": {"name": "g", "arguments": ""},
            },
        ]
    }
    more = delta(tool_calls=(ToolCallDelta(1, "", "", '"}'),))
    told = one(made.delta(0, more))["choices"][0]["delta"]
    assert told == {"tool_calls": [{"index": 1, "function": {"arguments": '"}'}}]}
    assert one(made.finish(0, finished()))["choices"][0]["finish_reason"] == "tool_calls"


def test_ids_of_calls_are_their_own():
    ids = {call_id(r, choice, index) for r in "ab" for choice in (0, 1) for index in (0, 1)}
    assert len(ids) == 8
    assert call_id("a", 0, 0) == call_id("a", 0, 0)


def test_logprobs_come_with_text_and_without():
    made = stream(read(stream=True, logprobs=True, top_logprobs=1))
    for text in ("a", ""):
        choice = one(made.delta(0, delta(text, logprobs=(ROW,))))["choices"][0]
        token = {"token": "a", "logprob": -0.5, "bytes": [97]}
        assert choice["logprobs"]["content"] == [{**token, "top_logprobs": [token]}]
        assert choice["delta"] == ({"content": "a"} if text else {})
    assert made.delta(0, delta("", token_ids=())) == b""


def test_token_ids():
    made = stream(read(stream=True, return_token_ids=True))
    choice = one(made.delta(0, delta("", token_ids=(5, 6))))["choices"][0]
    assert choice["token_ids"] == [5, 6]
    assert made.delta(0, delta("", token_ids=())) == b""
    assert one(made.delta(0, delta("x", token_ids=())))["choices"][0]["token_ids"] == []


@pytest.mark.parametrize(
    ("reason", "calls", "told"),
    [
        (FinishReason.STOP, False, "stop"),
        (FinishReason.STOP, True, "tool_calls"),
        (FinishReason.LENGTH, False, "length"),
        (FinishReason.LENGTH, True, "length"),
    ],
)
def test_reasons(reason, calls, told):
    made = stream()
    if calls:
        made.delta(0, delta(tool_calls=(ToolCallDelta(0, "c", "f", ""),)))
    assert one(made.finish(0, finished(reason)))["choices"][0]["finish_reason"] == told


@pytest.mark.parametrize(
    ("stop", "told"), [("END", "END"), (4, 4), (2, None), ("</tool_call>", None), (None, None)]
)
def test_stops_of_the_caller_are_told(stop, told):
    job = read(stop="END", stop_token_ids=[4])
    chunk = one(stream(job).finish(0, finished(stop=stop)))
    assert chunk["choices"][0]["stop_reason"] == told
    assert whole(job, finished(stop=stop))["choices"][0]["stop_reason"] == told


def test_a_request_that_was_cancelled_by_its_id():
    for finish in (stream().finish, ChatWhole(read(), ENVELOPE, "r").finish):
        with pytest.raises(ApiError) as raised:
            finish(0, finished(FinishReason.CANCELLED))
        assert (raised.value.status, raised.value.code) == (499, "request_cancelled")


# Whole


def test_a_whole_answer():
    told = whole(read(), delta("a "), delta("b"), finished())
    assert told == {
        "id": 'chatcmpl-"r"',
        "object": "chat.completion",
        "created": 1700,
        "model": 'the "m"',
        "system_fingerprint": "fp",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "a b", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_a_whole_answer_with_everything():
    job = read(n=2, logprobs=True, return_token_ids=True, prompt_logprobs=0)
    told = whole(
        job,
        PromptLogprobs("r", 1, (ROW,)),
        PromptLogprobs("r", 2, (ROW,)),
        delta("x", reasoning_text="think", logprobs=(ROW,)),
        delta("y", index=1, logprobs=(ROW, ROW), token_ids=(8, 9)),
        delta("z", logprobs=(ROW,), token_ids=(6,)),
        finished(FinishReason.LENGTH, index=1),
        finished(),
    )
    first, second = told["choices"]
    assert first["message"] == {
        "role": "assistant",
        "content": "xz",
        "refusal": None,
        "reasoning_content": "think",
    }
    assert first["token_ids"] == [5, 6]
    assert second["token_ids"] == [8, 9]
    assert [len(each["logprobs"]["content"]) for each in told["choices"]] == [2, 2]
    assert [each["finish_reason"] for each in told["choices"]] == ["stop", "length"]
    row = {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}
    assert told["prompt_logprobs"] == [None, row, row]
    assert told["usage"]["completion_tokens"] == 6


def test_whole_calls():
    told = whole(
        read(),
        delta(tool_calls=(ToolCallDelta(0, "call_0", "f", '{"a'),)),
        delta(tool_calls=(ToolCallDelta(0, "", "", '": 1}'),)),
        delta(tool_calls=(ToolCallDelta(1, "call_1", "g", "{}"),)),
        finished(),
    )
    (choice,) = told["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {
            "id": call_id("r", 0, index),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, name, arguments in ((0, "f", '{"a": 1}'), (1, "g", "{}"))
    ]


def test_text_beside_calls_stays():
    calls = delta("so: ", tool_calls=(ToolCallDelta(0, "c", "f", "{}"),))
    assert whole(read(), calls, finished())["choices"][0]["message"]["content"] == "so: "
