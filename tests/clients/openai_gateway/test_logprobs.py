from __future__ import annotations

import json

from slotwise_client import TokenLogprob, TokenLogprobs
from slotwise_gateway.logprobs import (
    CompletionLogprobs,
    PromptRows,
    TextOffsets,
    chat_logprobs,
    token_text,
)

EURO = "€".encode()
A = TokenLogprob(1, -0.5, 1, b"a")
B = TokenLogprob(2, -1.5, 2, b"b")
HALF = TokenLogprob(3, -2.5, 9, EURO[:2])


def test_tokens_that_are_no_characters():
    assert token_text(EURO) == "€"
    assert token_text(EURO[:2]) == r"bytes:\xe2\x82"
    assert token_text(b"") == ""


def test_of_a_chat():
    found = chat_logprobs([TokenLogprobs(HALF, (A, B))], 2)
    assert found == {
        "content": [
            {
                "token": r"bytes:\xe2\x82",
                "logprob": -2.5,
                "bytes": [0xE2, 0x82],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "b", "logprob": -1.5, "bytes": [98]},
                ],
            }
        ],
        "refusal": None,
    }
    assert chat_logprobs([TokenLogprobs(A, (A, B))], 0)["content"][0]["top_logprobs"] == []


def test_of_a_prompt():
    rows = PromptRows()
    rows.add([TokenLogprobs(A, (A, B))])
    rows.add([TokenLogprobs(HALF, (A,))])
    a = {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
    b = {"logprob": -1.5, "rank": 2, "decoded_token": "b"}
    half = {"logprob": -2.5, "rank": 9, "decoded_token": r"bytes:\xe2\x82"}
    assert json.loads(rows.json()) == [None, {"1": a, "2": b}, {"3": half, "1": a}]
    assert json.loads(PromptRows().json()) == [None]


def test_offsets_count_characters():
    offsets = TextOffsets(5)
    tokens = [b"ab", EURO[:2], EURO[2:], "😀".encode(), b"c"]
    assert [offsets.next(token) for token in tokens] == [5, 7, 7, 8, 9]


def test_of_a_completion():
    lists, offsets = CompletionLogprobs(), TextOffsets()
    lists.add_first("x")
    offsets.next(b"x")
    lists.add([TokenLogprobs(A, (A, B)), TokenLogprobs(HALF, (A, B))], 2, offsets)
    assert json.loads(lists.json()) == {
        "tokens": ["x", "a", r"bytes:\xe2\x82"],
        "token_logprobs": [None, -0.5, -2.5],
        "top_logprobs": [
            None,
            {"a": -0.5, "b": -1.5},
            {"a": -0.5, "b": -1.5, r"bytes:\xe2\x82": -2.5},
        ],
        "text_offset": [0, 1, 2],
    }


def test_of_a_completion_without_the_likeliest():
    lists = CompletionLogprobs()
    lists.add([TokenLogprobs(A, ())], 0, TextOffsets())
    assert json.loads(lists.json())["top_logprobs"] == [{}]


def test_of_two_tokens_of_one_text_the_likelier_is_told():
    twin = TokenLogprob(7, -3.5, 3, b"a")
    lists = CompletionLogprobs()
    lists.add([TokenLogprobs(twin, (A, B, twin))], 3, TextOffsets())
    assert json.loads(lists.json())["top_logprobs"] == [{"a": -0.5, "b": -1.5}]
    assert json.loads(lists.json())["token_logprobs"] == [-3.5]
