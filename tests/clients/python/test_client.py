from __future__ import annotations

import gc
import threading

import pytest
from clients.scripted_server import SERVICE, WORDS, bad_field, queue_full, status
from google.rpc import code_pb2, error_details_pb2
from grpc_health.v1 import health_pb2

from slotwise_client import (
    Accepted,
    AlreadyExistsError,
    Chat,
    Client,
    DeadlineError,
    Delta,
    ExpiredError,
    FailedPreconditionError,
    Finished,
    FinishReason,
    Health,
    InternalError,
    InvalidArgumentError,
    Message,
    MessageTooLargeError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    PromptLogprobs,
    QueueFullError,
    SetupDiffersError,
    SlotState,
    SlotwiseError,
    SupersededError,
    Tool,
    ToolCall,
    UnauthenticatedError,
    UnavailableError,
)

TIMEOUT_S = 60


@pytest.fixture
def client(served):
    with Client(served.address) as connected:
        yield connected


def test_a_stream_is_accepted_then_deltas_then_finished(client):
    events = list(client.generate("x", request_id="mine", timeout=TIMEOUT_S))
    assert isinstance(events[0], Accepted)
    assert events[0].seed == 2**63 + 5
    deltas = events[1:-1]
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert "".join(delta.text for delta in deltas) == "".join(WORDS)
    assert [delta.first_token_index for delta in deltas] == list(range(len(WORDS)))
    assert isinstance(events[-1], Finished)
    assert events[-1].finish_reason is FinishReason.STOP
    assert events[-1].matched_stop == 2
    assert {event.request_id for event in events} == {"mine"}


def test_chat_sends_the_conversation(served, client):
    turns = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    list(client.chat(turns, system="s", temperature=0, timeout=TIMEOUT_S))
    sent = served.script.requests[-1]
    assert [(m.role, m.content) for m in sent.chat.messages] == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]
    assert sent.sampling.HasField("temperature")


def test_complete_answers_whole(client):
    answer = client.complete(Chat.of("q"), timeout=TIMEOUT_S)
    assert answer.text == "".join(WORDS)
    assert answer.token_ids == (100, 101, 102, 103, 104)
    assert answer.finished.usage.completion_tokens == 5
    assert answer.accepted.prompt_tokens == 7
    assert answer.choices[0].tool_calls == (ToolCall("call_0", "find", "{}"),)
    assert answer.choices[0].reasoning_text == "Let me see."
    assert answer.prompt_logprobs == ()


def test_several_answers_with_logprobs(client):
    answer = client.complete("x", n=2, prompt_logprobs=1, timeout=TIMEOUT_S)
    assert [(one.index, one.finished.index) for one in answer.choices] == [(0, 0), (1, 1)]
    assert answer.prompt_logprobs[0].token.rank == 2
    assert answer.choices[1].logprobs[0].best[0].text == b"\xe2\x82"
    events = list(client.generate("x", n=2, prompt_logprobs=1, logprobs=1, timeout=TIMEOUT_S))
    assert isinstance(events[1], PromptLogprobs)
    assert [event.index for event in events if isinstance(event, Finished)] == [0, 1]
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [delta.index for delta in deltas] == [0, 1] * len(WORDS)
    assert deltas[0].logprobs[0].token.logprob == -1.5


def test_reasoning_and_calls_are_apart_from_the_text(served, client):
    events = list(client.chat("q", tools=[Tool("find")], parse_output=True, timeout=TIMEOUT_S))
    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(delta.reasoning_text for delta in deltas) == "Let me see."
    parts = [part for delta in deltas for part in delta.tool_calls]
    assert "".join(part.arguments_json for part in parts) == '{"what": "it"}'
    assert served.script.requests[-1].chat.tools[0].name == "find"


def test_leaving_the_loop_cancels_the_call(served, client):
    served.script.blocked = True
    for event in client.generate("x"):
        if isinstance(event, Delta):
            break
    gc.collect()
    assert served.script.ended.wait(TIMEOUT_S)


def test_closing_from_another_thread_ends_the_iteration(served, client):
    served.script.blocked = True
    stream = client.generate("x")

    def close_later() -> None:
        served.script.first_delta.wait(TIMEOUT_S)
        stream.close()

    closer = threading.Thread(target=close_later)
    closer.start()
    events = list(stream)
    closer.join(TIMEOUT_S)
    # What had arrived and was not read yet may be lost; nothing else may come, and no error.
    assert [type(event) for event in events] == [Accepted, Delta][: len(events)]
    assert served.script.ended.wait(TIMEOUT_S)


def test_leaving_a_with_block_cancels_the_call(served, client):
    served.script.blocked = True
    with client.generate("x") as stream:
        next(stream)
    assert served.script.ended.wait(TIMEOUT_S)
    assert list(stream) == []


def test_the_deadline_of_a_stream(served, client):
    served.script.blocked = True
    with pytest.raises(DeadlineError):
        list(client.generate("x", timeout=0.2))


def test_the_small_calls(served, client):
    assert client.tokenize("ab") == [97, 98]
    assert client.detokenize([99, 100], keep_control_tokens=True) == "cd"
    assert served.script.requests[-1].keep_control_tokens
    assert client.render_chat(Chat.of("q")).text == "[user]q"
    assert client.model_info().end_token_ids == (2, 0)
    assert client.model_info().bos_token_id is None
    assert client.server_info().workers[0].self_tests[0].passed
    assert client.load().requests.accepted == 5
    assert [slot.state for slot in client.slots()] == [SlotState.FREE, SlotState.DECODE]
    assert client.load().prefix_cache.num_hits == 3
    assert client.server_info().max_running == 4
    assert client.flush_cache() == 42
    client.cancel("some")
    assert served.script.requests[-1].request_id == "some"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (code_pb2.NOT_FOUND, NotFoundError),
        (code_pb2.ALREADY_EXISTS, AlreadyExistsError),
        (code_pb2.UNAVAILABLE, UnavailableError),
        (code_pb2.INTERNAL, InternalError),
        (code_pb2.DEADLINE_EXCEEDED, DeadlineError),
        (code_pb2.FAILED_PRECONDITION, FailedPreconditionError),
        (code_pb2.OUT_OF_RANGE, OutOfRangeError),
        (code_pb2.ABORTED, SupersededError),
        (code_pb2.UNAUTHENTICATED, UnauthenticatedError),
        (code_pb2.PERMISSION_DENIED, PermissionDeniedError),
        (code_pb2.DATA_LOSS, SlotwiseError),
    ],
)
def test_statuses_become_typed_errors(served, code, kind):
    client = Client(served.address, reconnect_timeout=0)
    served.script.error = status(code, "what was wrong")
    with pytest.raises(kind) as caught:
        client.complete("x", timeout=TIMEOUT_S)
    assert type(caught.value) is kind
    assert "what was wrong" in str(caught.value)
    with pytest.raises(kind):
        list(client.generate("x", timeout=TIMEOUT_S))
    client.close()


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("EXPIRED_REQUEST", ExpiredError),
        ("SETUP_DIFFERS", SetupDiffersError),
        ("CONSTRAINT", FailedPreconditionError),
    ],
)
def test_one_code_for_several_things_is_told_apart(served, client, reason, kind):
    info = error_details_pb2.ErrorInfo(reason=reason, domain="slotwise.v1")
    served.script.error = status(code_pb2.FAILED_PRECONDITION, "what was wrong", info)
    with pytest.raises(FailedPreconditionError) as caught:
        client.complete("x", timeout=TIMEOUT_S)
    assert type(caught.value) is kind


def test_a_refused_field_is_named(served, client):
    served.script.error = bad_field("sampling.top_p", "1.5 is outside [0, 1]")
    with pytest.raises(InvalidArgumentError) as caught:
        list(client.generate("x", timeout=TIMEOUT_S))
    assert caught.value.field == "sampling.top_p"
    assert caught.value.violations[0].description == "1.5 is outside [0, 1]"


def test_a_full_queue_says_when_to_retry(served, client):
    served.script.error = queue_full(1, 500_000_000)
    with pytest.raises(QueueFullError) as caught:
        client.complete("x", timeout=TIMEOUT_S)
    assert caught.value.retry_after == 1.5


def test_a_message_over_the_limit_is_not_a_full_queue(client):
    with pytest.raises(MessageTooLargeError):
        client.complete("x" * (65 << 20), timeout=TIMEOUT_S)


def test_no_server_names_the_address():
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        client.model_info(timeout=TIMEOUT_S)


def test_health_names(served, client):
    assert client.health() is Health.SERVING
    assert client.health("") is Health.SERVING
    assert client.health("slotwise.worker/7") is Health.UNKNOWN_SERVICE
    served.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert client.health() is Health.NOT_SERVING


def test_waiting_for_ready_is_woken_by_the_server(served, client):
    served.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    with pytest.raises(DeadlineError, match=r"not ready after 0\.2 s"):
        client.wait_ready(0.2)
    serve = threading.Timer(
        0.05, served.health.set, (SERVICE, health_pb2.HealthCheckResponse.SERVING)
    )
    serve.start()
    client.wait_ready(TIMEOUT_S)
    serve.join()


def test_waiting_for_a_server_that_is_not_there_ends():
    with Client("127.0.0.1:1") as client, pytest.raises(DeadlineError, match=r"127\.0\.0\.1:1"):
        client.wait_ready(0.3)
