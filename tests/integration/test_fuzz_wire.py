"""Any bytes over the wire: every call is answered, and the server goes on."""

from __future__ import annotations

import random

import grpc
import pytest

from integration.front import WAIT_S
from slotwise.v1 import inference_pb2 as pb

SAMPLING = pb.SamplingParams(temperature=0.5, top_k=3, logit_bias={3: 1.5}, seed=1)
CHAT = pb.Chat(
    messages=[
        pb.ChatMessage(role="user", content="hi \u4f60"),
        pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f", arguments_json="{}")]),
    ],
    template_kwargs_json='{"message": [1]}',
)
TOOLS = [pb.Tool(name="f", description="d", parameters_json='{"type": "object"}')]
GOOD = {
    "Complete": [
        pb.GenerateRequest(text="hello", sampling=SAMPLING, max_new_tokens=3, stop=["ab", "c"]),
        pb.GenerateRequest(chat=CHAT, max_new_tokens=2, logprobs=2, n=2, cache_salt="s"),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(3, 40)), prompt_logprobs=3, regex="a+b"),
    ],
    "Tokenize": [pb.TokenizeRequest(text="a \u4f60 <|im_end|>", parse_control_tokens=True)],
    "Detokenize": [pb.DetokenizeRequest(token_ids=[1, 300, 5], keep_control_tokens=True)],
    "RenderChat": [
        pb.RenderChatRequest(chat=CHAT),
        # Well made, though this template takes no tools.
        pb.RenderChatRequest(chat=pb.Chat(messages=CHAT.messages, tools=TOOLS)),
    ],
    "Cancel": [pb.CancelRequest(request_id="me")],
}
ANSWERED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
}


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, doubled, left out or put in; now and then nothing of it is left."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0:
                changed[place : place + 1] = rng.randbytes(1)
            case 1:
                changed[place:place] = rng.randbytes(rng.choice([1, 3, 30]))
            case 2:
                del changed[place : place + rng.choice([1, 3, 30])]
            case 3:
                changed[place:place] = changed[place : place + 20] * rng.choice([1, 50])
            case 4:
                changed[place : place + 1] = rng.choice(
                    [b"\xff", b"\x00", b"\x80\x80\x01", b"\x7f"]
                )
    return bytes(changed) if rng.random() > 0.05 else rng.randbytes(rng.randrange(60))


def is_a_message(kind: type, data: bytes) -> bool:
    try:
        kind.FromString(data)
    except Exception:  # of the library
        return False
    return True


@pytest.mark.parametrize("method", GOOD)
async def test_mutated_messages(front, method):
    rng = random.Random(method)
    call = front.channel.unary_unary(f"/slotwise.v1.Inference/{method}")
    codes = []
    for turn in range(200):
        good = rng.choice(GOOD[method])
        data = mutated(good.SerializeToString(), rng) if turn else good.SerializeToString()
        try:
            await call(data, timeout=WAIT_S)
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
        if not is_a_message(type(good), data):
            assert code is grpc.StatusCode.INVALID_ARGUMENT, data
        codes.append(code)
    assert set(codes) <= ANSWERED
    assert len(set(codes)) > 1
    load = await front.load()
    assert (load.num_running, load.num_waiting, load.requests.error) == (0, 0, 0)
    got = await front.collect(pb.GenerateRequest(text="hello", max_new_tokens=3, ignore_eos=True))
    assert len(got.token_ids) == 3
