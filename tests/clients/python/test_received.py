"""However a stream is cut and repeated, what is told is the answer, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotwise.v1 import inference_pb2 as pb
from slotwise_client._received import DifferenceError, Received
from slotwise_client.errors import InternalError

TOKENS = 8
ARGUMENTS = '{"a": [1, 2]}'


def deltas(begin: int, size: int, piece: int) -> list[pb.Delta]:
    """The answer from a token on, `size` tokens and `piece` characters of arguments at a time."""
    made = []
    for first in range(begin, TOKENS, size):
        ids = list(range(first, min(first + size, TOKENS)))
        delta = pb.Delta(first_token_index=first, token_ids=[100 + i for i in ids])
        delta.text = "".join(f" {i}" for i in ids if i < 4)
        delta.reasoning_text = "".join(f"r{i}" for i in ids if i == 2)
        if 5 in ids:
            for at in range(0, len(ARGUMENTS), piece):
                part = delta.tool_calls.add(index=0, arguments_json=ARGUMENTS[at : at + piece])
                if not at:
                    part.id, part.name = f"call_{begin}_{size}", "find"
        made.append(delta)
    return [*made, pb.Delta(first_token_index=TOKENS, text=" tail")]


STREAMS = st.tuples(
    st.booleans(), st.integers(1, 3), st.integers(1, len(ARGUMENTS)), st.integers(0, TOKENS + 2)
)


@given(st.lists(STREAMS, max_size=6))
def test_every_token_and_every_piece_of_text_comes_once(streams):
    received = Received()
    told: list[pb.Delta] = []
    for to_start, size, piece, count in [*streams, (True, 1, 3, TOKENS + 1)]:
        received.rewind(to_start=to_start)
        begin = 0 if to_start else received.num_tokens
        for delta in deltas(begin, size, piece)[:count]:
            if received.take(delta):
                told.append(delta)
    assert [i for delta in told for i in delta.token_ids] == [100 + i for i in range(TOKENS)]
    assert "".join(delta.text for delta in told) == " 0 1 2 3 tail"
    assert "".join(delta.reasoning_text for delta in told) == "r2"
    parts = [part for delta in told for part in delta.tool_calls]
    assert "".join(part.arguments_json for part in parts) == ARGUMENTS
    assert [part.name for part in parts if part.name or part.id] == ["find"]


def test_a_call_that_is_repeated_in_other_pieces_has_its_name_once():
    received = Received()
    first = pb.Delta(token_ids=[1], tool_calls=[pb.ToolCallDelta(id="a", name="f")])
    assert received.take(first)
    received.rewind(to_start=True)
    again = pb.ToolCallDelta(id="b", name="f", arguments_json="{}")
    delta = pb.Delta(token_ids=[1, 2], tool_calls=[again])
    assert received.take(delta)
    assert delta.tool_calls[0] == pb.ToolCallDelta(arguments_json="{}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": [100, 7]}, "token 1 is 7 and was 101"),
        ({"text": " 0 2"}, "the text has ' 0 2' where it had ' 0 1'"),
        ({"reasoning_text": "x"}, "the reasoning has 'x'"),
        ({"tool_calls": [pb.ToolCallDelta(name="g")]}, "tool call 0 is 'g' and was 'f'"),
    ],
)
def test_what_differs_is_told(change, words):
    whole = {
        "token_ids": [100, 101],
        "text": " 0 1",
        "reasoning_text": "r",
        "tool_calls": [pb.ToolCallDelta(name="f")],
    }
    received = Received()
    assert received.take(pb.Delta(**whole))
    received.rewind(to_start=True)
    with pytest.raises(DifferenceError, match=words):
        received.take(pb.Delta(**{**whole, **change}))


def test_a_gap_is_a_fault_of_the_server():
    received = Received(3)
    with pytest.raises(InternalError, match="goes on at 5 and had come to 3"):
        received.take(pb.Delta(first_token_index=5, token_ids=[1]))
    with pytest.raises(InternalError, match="tool call is missing"):
        received.take(pb.Delta(tool_calls=[pb.ToolCallDelta(index=1)]))
