"""Chunks and whole answers of completions."""

from __future__ import annotations

import json

import pytest
from clients.openai_gateway.test_chat_answer import (
    ACCEPTED,
    ROW,
    delta,
    finished,
    one,
    parsed,
)
from clients.openai_gateway.test_completions import read

from slotwise_client import FinishReason, PromptLogprobs, TokenLogprob, TokenLogprobs
from slotwise_gateway.answer import Envelope
from slotwise_gateway.completion_answer import CompletionStream, CompletionWhole, Echo
from slotwise_gateway.errors import ApiError

ENVELOPE = Envelope("cmpl-r", "text_completion", 1700, "m", "fp")
ECHO = Echo("pq", "p")
Q = TokenLogprobs(TokenLogprob(9, -1.5, 2, b"q"), (TokenLogprob(5, -0.5, 1, b"a"),))


def stream(job, echoes=(ECHO,)) -> CompletionStream:
    return CompletionStream(job, ENVELOPE, echoes)


def whole(job, *events, echoes=(ECHO,)) -> dict:
    """Events with the number of their prompt."""
    answer = CompletionWhole(job, ENVELOPE, echoes)
    for number in range(len(job.prompts)):
        answer.begin(number, ACCEPTED)
    for number, event in events:
        if isinstance(event, PromptLogprobs):
            answer.prompt_logprobs(number, event)
        elif hasattr(event, "finish_reason"):
            answer.finish(number, event)
        else:
            answer.delta(number, event)
    return json.loads("".join(answer.pieces()))


def test_a_stream():
    made = stream(read())
    assert made.begin(0, ACCEPTED) == b""
    assert one(made.delta(0, delta('a"b'))) == {
        "id": "cmpl-r",
        "object": "text_completion",
        "created": 1700,
        "model": "m",
        "system_fingerprint": "fp",
        "choices": [{"index": 0, "text": 'a"b', "logprobs": None, "finish_reason": None}],
    }
    assert made.delta(0, delta("")) == b""
    last = one(made.finish(0, finished(FinishReason.LENGTH)))["choices"][0]
    assert last == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert made.end() == b"data: [DONE]\n\n"


def test_choices_are_counted_over_the_prompts():
    made = stream(read(prompt=["a", "b", "c"], n=2))
    numbers = [
        one(made.delta(prompt, delta("x", index=index)))["choices"][0]["index"]
        for prompt in range(3)
        for index in range(2)
    ]
    assert numbers == list(range(6))
    assert one(made.finish(2, finished(index=1)))["choices"][0]["index"] == 5


def test_usage_of_several_prompts():
    job = read(prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True})
    made = stream(job)
    for prompt in range(2):
        for index in range(2):
            assert one(made.finish(prompt, finished(index=index)))["usage"] is None
    usage = parsed(made.end().removesuffix(b"data: [DONE]\n\n"))[0]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (14, 12)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


def test_an_echo_goes_first():
    made = stream(read(echo=True, n=2))
    texts = [chunk["choices"][0] for chunk in parsed(made.begin(0, ACCEPTED))]
    assert [(each["index"], each["text"]) for each in texts] == [(0, "pq"), (1, "pq")]
    told = whole(read(echo=True), (0, delta("r")), (0, finished()))
    assert told["choices"][0]["text"] == "pqr"


def test_an_echo_with_logprobs():
    job = read(echo=True, logprobs=1)
    made = stream(job)
    assert made.begin(0, ACCEPTED) == b""
    first = one(made.prompt_logprobs(0, PromptLogprobs("r", 1, (Q,))))["choices"][0]
    lists = {
        "tokens": ["p", "q"],
        "token_logprobs": [None, -1.5],
        "top_logprobs": [None, {"a": -0.5, "q": -1.5}],
        "text_offset": [0, 1],
    }
    assert (first["text"], first["logprobs"]) == ("pq", lists)
    more = one(made.prompt_logprobs(0, PromptLogprobs("r", 2, (Q,))))["choices"][0]
    assert (more["text"], more["logprobs"]["text_offset"]) == ("", [2])
    answer = one(made.delta(0, delta("a", logprobs=(ROW,))))["choices"][0]
    assert answer["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5}],
        "text_offset": [3],
    }
    told = whole(
        job,
        (0, PromptLogprobs("r", 1, (Q,))),
        (0, PromptLogprobs("r", 2, (Q,))),
        (0, delta("a", logprobs=(ROW,))),
        (0, finished()),
    )
    found = told["choices"][0]["logprobs"]
    assert found["tokens"] == ["p", "q", "q", "a"]
    assert found["text_offset"] == [0, 1, 2, 3]
    assert found["token_logprobs"] == [None, -1.5, -1.5, -0.5]


@pytest.mark.parametrize(
    ("echo", "rest", "tokens", "offsets"),
    [
        # The first token is half a character, as the server detokenizes it.
        (
            Echo("\u20acq", "\ufffd"),
            (b"\x82\xac", b"q"),
            [r"bytes:\xe2", r"bytes:\x82\xac", "q"],
            [0, 0, 1],
        ),
        (Echo("\u20ac", "\ufffd"), (b"\xac",), [r"bytes:\xe2\x82", r"bytes:\xac"], [0, 0]),
        # It is that character; it is the one that begins all texts, which are told without it.
        (Echo("\ufffdq", "\ufffd"), (b"q",), ["\ufffd", "q"], [0, 1]),
        (Echo("q", "<s>"), (b"q",), ["<s>", "q"], [0, 0]),
    ],
)
def test_an_echo_whose_first_token_is_no_text(echo, rest, tokens, offsets):
    rows = tuple(TokenLogprobs(TokenLogprob(9, -1.5, 2, token), ()) for token in rest)
    job = read(echo=True, logprobs=0)
    told = whole(job, (0, PromptLogprobs("r", 1, rows)), (0, finished()), echoes=[echo])
    found = told["choices"][0]["logprobs"]
    assert (found["tokens"], found["text_offset"]) == (tokens, offsets)


def test_an_echo_of_one_token_has_no_logprobs_to_come_with():
    echo = Echo("p", "p")
    job = read(echo=True, logprobs=0)
    made = stream(job, [echo])
    first, second = parsed(made.delta(0, delta("a", logprobs=(ROW,))))
    assert first["choices"][0]["text"] == "p"
    assert first["choices"][0]["logprobs"]["tokens"] == ["p"]
    assert second["choices"][0]["logprobs"]["text_offset"] == [1]
    told = whole(job, (0, delta("a", logprobs=(ROW,))), (0, finished()), echoes=[echo])
    assert told["choices"][0]["logprobs"]["tokens"] == ["p", "a"]


def test_the_prompt_alone():
    job = read(echo=True, logprobs=0, max_tokens=0)
    made = stream(job)
    chunks = parsed(made.prompt_logprobs(0, PromptLogprobs("r", 1, (Q,))))
    assert made.delta(0, delta("a", logprobs=(ROW,))) == b""
    last = one(made.finish(0, finished()))["choices"][0]
    assert (chunks[0]["choices"][0]["text"], last["finish_reason"]) == ("pq", "length")
    told = whole(
        job,
        (0, PromptLogprobs("r", 1, (Q,))),
        (0, delta("a", logprobs=(ROW,))),
        (0, finished()),
    )
    (choice,) = told["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("pq", "length")
    assert choice["logprobs"]["tokens"] == ["p", "q"]
    assert told["usage"]["completion_tokens"] == 0
    assert told["usage"]["total_tokens"] == 7


def test_token_ids_and_stops():
    job = read(return_token_ids=True, stop="END")
    made = stream(job)
    assert one(made.delta(0, delta("a", token_ids=(4, 5))))["choices"][0]["token_ids"] == [4, 5]
    assert one(made.finish(0, finished(stop="END")))["choices"][0]["stop_reason"] == "END"
    told = whole(job, (0, delta("a", token_ids=(4, 5))), (0, finished(stop=2)))
    (choice,) = told["choices"]
    assert (choice["token_ids"], choice["stop_reason"]) == ([4, 5], None)


def test_prompt_logprobs_of_each_prompt():
    job = read(prompt=["a", "b"], prompt_logprobs=0)
    told = whole(
        job,
        (1, PromptLogprobs("r", 1, (Q,))),
        (0, finished()),
        (1, finished()),
        echoes=[],
    )
    first, second = told["choices"]
    assert first["prompt_logprobs"] == [None]
    assert list(second["prompt_logprobs"][1]) == ["9", "5"]


def test_a_request_that_was_cancelled_by_its_id():
    with pytest.raises(ApiError, match="cancelled"):
        stream(read()).finish(0, finished(FinishReason.CANCELLED))
