"""The official `openai` package of npm, unmodified, as a user of the gateway."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from clients.gateways import running_gateway
from clients.scripted_server import queue_full, status
from google.rpc import code_pb2

from slotwise.v1 import inference_pb2 as pb

pytestmark = pytest.mark.clients

TIMEOUT_S = 60
QUESTION = pb.ChatMessage(role="user", content="What is the weather in K\u00f6ln?")
GREEDY = {"sampling": pb.SamplingParams(temperature=0), "max_new_tokens": 24}
# What gRPC says, and the package's error for it.
REFUSALS = {
    "AuthenticationError": status(code_pb2.UNAUTHENTICATED, "no such token"),
    "PermissionDeniedError": status(code_pb2.PERMISSION_DENIED, "not yours"),
    "RateLimitError": queue_full(1, 500_000_000),
    "InternalServerError": status(code_pb2.UNAVAILABLE, "the server drains"),
}


def by_grpc(server, *messages: pb.ChatMessage) -> str:
    """The same question asked without the gateway."""
    asked = pb.GenerateRequest(chat=pb.Chat(messages=messages), parse_output=True, **GREEDY)
    return server.stub.Complete(asked, timeout=TIMEOUT_S).choices[0].text


def until(server, condition: Callable[[pb.GetLoadResponse], bool]) -> pb.GetLoadResponse:
    """Asks again and again, until the server's load is as wanted."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition(load := server.stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S)):
        assert time.monotonic() < deadline, load
    return load


@pytest.mark.parametrize("name", ["whole", "stream", "events"])
def test_an_answer_is_that_of_grpc(talk, server, name):
    conversation = talk(name)
    assert conversation.hear() == by_grpc(server, QUESTION)
    conversation.go_on()
    conversation.end()


def test_a_conversation_is_that_of_grpc(talk, server):
    conversation = talk("turns")
    answers = conversation.hear()
    messages = [pb.ChatMessage(role="system", content="Be short.")]
    for question, answer in zip(("Hello!", "And now?", "Good bye."), answers, strict=True):
        messages.append(pb.ChatMessage(role="user", content=question))
        assert answer == by_grpc(server, *messages)
        messages.append(pb.ChatMessage(role="assistant", content=answer))
    conversation.go_on()
    conversation.end()


def test_a_legacy_completion_is_that_of_grpc(talk, server):
    conversation = talk("legacy")
    asked = pb.GenerateRequest(text="the sea and", **GREEDY)
    assert conversation.hear() == server.collect(asked).text
    conversation.go_on()
    conversation.end()


@pytest.mark.parametrize(
    "name",
    ["usage", "tools", "runner", "schema", "many", "logprobs", "models", "errors"],
)
def test_the_package_finds_what_it_expects(talk, name):
    """The program itself says what that is."""
    talk(name).end()


@pytest.mark.parametrize("name", ["left", "aborted"])
def test_a_stream_that_is_left_frees_its_slot(talk, server, name):
    before = until(server, lambda load: load.num_running == 0).requests
    conversation = talk(name)
    # The program still lives: its connections do too.
    assert conversation.hear() == name
    after = until(server, lambda load: load.num_running == 0).requests
    assert (after.cancelled, after.length) == (before.cancelled + 1, before.length)
    conversation.go_on()
    conversation.end()


def test_a_whole_answer_that_is_aborted_frees_its_slot(talk, server):
    before = until(server, lambda load: load.num_running == 0).requests
    conversation = talk("aborted_whole")
    assert conversation.hear() == "asked"
    until(server, lambda load: load.num_running == 1)
    conversation.go_on()
    assert conversation.hear() == "aborted"
    after = until(server, lambda load: load.num_running == 0).requests
    assert (after.cancelled, after.length) == (before.cancelled + 1, before.length)
    conversation.go_on()
    conversation.end()


def test_each_refusal_is_the_packages_own_error(talk, served):
    with running_gateway(served.address) as through:
        conversation = talk("statuses", through)
        for kind, refusal in REFUSALS.items():
            assert conversation.hear() == kind
            served.script.error = refusal
            conversation.go_on()
        conversation.end()
