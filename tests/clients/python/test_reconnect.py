"""What a reader gets when connections, requests and servers are lost on the way."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import threading
from collections import deque

import pytest
from clients.lossy_server import (
    DRAINS,
    EXISTS,
    EXPIRED,
    FAULT,
    LOST,
    NOT_FOUND,
    NUM_TOKENS,
    OUT_OF_RANGE,
    POISON,
    RESET,
    SLOW,
    SUPERSEDED,
    Fault,
)
from clients.scripted_server import queue_full

from slotwise_client import (
    Accepted,
    AlreadyExistsError,
    AnswerChangedError,
    AsyncClient,
    Client,
    Completion,
    DeadlineError,
    Delta,
    ExpiredError,
    Finished,
    InternalError,
    NotFoundError,
    OutOfRangeError,
    PromptLogprobs,
    QueueFullError,
    RequestRecord,
    SupersededError,
    UnavailableError,
    _reading,
)

TIMEOUT_S = 60
CUT = Fault(after=3)
ALL = {"logprobs": 1, "prompt_logprobs": 1}


class SyncReader:
    """The synchronous client behind the verbs of these tests."""

    def __init__(self, address, **settings):
        self._address, self._settings = address, settings

    def generate(self, **options):
        return self._with(lambda client: list(client.generate("x", timeout=TIMEOUT_S, **options)))

    def complete(self, **options) -> Completion:
        return self._with(lambda client: client.complete("x", timeout=TIMEOUT_S, **options))

    def attach(self, *where):
        return self._with(lambda client: list(client.attach(*where, timeout=TIMEOUT_S)))

    def _with(self, work):
        with Client(self._address, **self._settings) as client:
            client.health()
            return work(client)


class AsyncReader:
    """The same with the client for asyncio."""

    def __init__(self, address, **settings):
        self._address, self._settings = address, settings

    def generate(self, **options):
        return self._with(lambda client: read(client.generate("x", timeout=TIMEOUT_S, **options)))

    def complete(self, **options) -> Completion:
        return self._with(lambda client: client.complete("x", timeout=TIMEOUT_S, **options))

    def attach(self, *where):
        return self._with(lambda client: read(client.attach(*where, timeout=TIMEOUT_S)))

    def _with(self, work):
        async def run():
            async with AsyncClient(self._address, **self._settings) as client:
                await client.health()
                return await work(client)

        return asyncio.run(run())


async def read(stream) -> list:
    return [event async for event in stream]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(_reading, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(_reading, "MAX_DELAY_S", 0.05)
    # What the server is told at an end is awaited on a busy machine too.
    for module in ("aio", "client"):
        monkeypatch.setattr(f"slotwise_client.{module}.CANCEL_TIMEOUT_S", TIMEOUT_S)


@pytest.fixture(params=[SyncReader, AsyncReader])
def reader(request, lossy):
    return request.param(lossy.address)


def summary(events) -> dict:
    """All that a reader is told, however it was cut into events."""
    deltas = [event for event in events if isinstance(event, Delta)]
    choices = sorted({delta.index for delta in deltas})
    told = {}
    for index in choices:
        mine = [delta for delta in deltas if delta.index == index]
        firsts = [delta.first_token_index for delta in mine if delta.token_ids]
        counts = [len(delta.token_ids) for delta in mine if delta.token_ids]
        assert firsts == [sum(counts[:i]) for i in range(len(counts))], "a gap or an overlap"
        parts = [part for delta in mine for part in delta.tool_calls]
        told[index] = {
            "ids": [token_id for delta in mine for token_id in delta.token_ids],
            "text": "".join(delta.text for delta in mine),
            "reasoning": "".join(delta.reasoning_text for delta in mine),
            "calls": "".join(part.arguments_json for part in parts),
            "names": [part.name for part in parts if part.name],
            "logprobs": [row.token.token_id for delta in mine for row in delta.logprobs],
        }
    rows = [event for event in events if isinstance(event, PromptLogprobs)]
    return {
        "choices": told,
        "accepted": [type(event) for event in events].count(Accepted),
        "first": type(events[0]),
        "finished": [event.index for event in events if isinstance(event, Finished)],
        "prompt": [row.token.token_id for event in rows for row in event.logprobs],
        "ids": len({event.request_id for event in events}),
    }


def undisturbed(lossy, reader, **options) -> dict:
    lossy.script.faults.clear()
    wanted = summary(reader.generate(**options))
    lossy.script.calls.clear()
    assert wanted["accepted"] == 1
    assert wanted["choices"][0]["text"].endswith("!")
    return wanted


@pytest.mark.parametrize("after", range(NUM_TOKENS + 6))
def test_a_broken_connection_is_not_seen(lossy, reader, after):
    wanted = undisturbed(lossy, reader, **ALL)
    lossy.script.faults = deque([Fault(after=after)])
    assert summary(reader.generate(**ALL)) == wanted
    assert len(lossy.script.calls) > 1
    assert lossy.script.cancelled == []


@pytest.mark.parametrize("after", range(NUM_TOKENS + 5))
@pytest.mark.parametrize("status", [LOST, RESET, DRAINS], ids=["lost", "reset", "drains"])
def test_a_server_that_forgot_is_asked_anew_and_nothing_comes_twice(lossy, reader, after, status):
    options = {**ALL, "n": 2, "parse_output": True}
    wanted = undisturbed(lossy, reader, **options)
    assert wanted["choices"][1]["calls"] == '{"a": 1}'
    lossy.script.faults = deque([Fault(after=after, status=status, forgets=True)])
    assert summary(reader.generate(**options)) == wanted
    requests = [one for one in lossy.script.requests if one.DESCRIPTOR.name == "GenerateRequest"]
    assert requests[-1] == requests[-2], "the same id, seed and parameters"


@pytest.mark.parametrize("forgets", [True, False])
def test_many_losses_in_a_row(lossy, reader, forgets):
    options = {**ALL, "n": 2, "parse_output": True}
    wanted = undisturbed(lossy, reader, **options)
    places = [Fault(after=after, forgets=forgets) for after in (2, 5, 9, 6, 3, 7, 1, 12)]
    lossy.script.faults = deque(places)
    assert summary(reader.generate(**options)) == wanted


def test_an_end_without_the_last_messages_is_a_loss(lossy, reader):
    wanted = undisturbed(lossy, reader)
    lossy.script.faults = deque([Fault(after=4, is_silent=True)])
    assert summary(reader.generate()) == wanted
    assert lossy.script.calls == ["Generate", "Attach 3"]


# A request that the server gave up, which Attach tells after Accepted.
GIVEN_UP = Fault(1, DRAINS, forgets=True)


def refuse(status) -> Fault:
    return Fault(0, status, forgets=True)


@pytest.mark.parametrize(
    ("refusals", "calls"),
    [
        ([Fault(0, LOST), Fault(0, LOST)], "Attach, Attach, Attach"),
        ([Fault(0, DRAINS)], "Attach, Attach"),
        ([Fault(0, OUT_OF_RANGE)], "Attach, Attach 0"),
        ([refuse(DRAINS)], "Attach, Attach, Generate"),
        ([GIVEN_UP], "Attach, Generate"),
        ([GIVEN_UP, refuse(DRAINS), refuse(LOST)], "Attach, Generate, Attach, Attach, Generate"),
        ([refuse(EXPIRED)], "Attach, Generate"),
        ([refuse(NOT_FOUND)], "Attach, Generate"),
        ([refuse(NOT_FOUND), refuse(EXISTS)], "Attach, Generate, Attach, Generate"),
        ([refuse(NOT_FOUND), refuse(queue_full(0, 1000))], "Attach, Generate, Generate"),
    ],
)
def test_what_a_refusal_of_attach_leads_to(lossy, reader, refusals, calls):
    wanted = undisturbed(lossy, reader)
    lossy.script.faults = deque([Fault(3, LOST), *refusals])
    assert summary(reader.generate()) == wanted
    calls = re.sub(r"Attach(?! 0)", "Attach 2", f"Generate, {calls}")
    assert lossy.script.calls == calls.split(", ")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(SUPERSEDED, SupersededError), (POISON, InternalError), (FAULT, InternalError)],
)
def test_what_is_not_to_be_tried_again_is_raised(lossy, reader, status, kind):
    lossy.script.faults = deque([Fault(3, status)])
    with pytest.raises(kind):
        reader.generate()
    assert lossy.script.calls == ["Generate"]
    assert lossy.script.cancelled == []


UNREAD = Fault(3, cancels=True)


@pytest.mark.parametrize("n", [1, 2])
def test_what_was_cancelled_since_nobody_read_it_is_asked_anew(lossy, reader, n):
    wanted = undisturbed(lossy, reader, n=n)
    lossy.script.faults = deque([Fault(4, LOST), UNREAD])
    assert summary(reader.generate(n=n, attach_window_ms=0)) == wanted
    assert [call.split()[0] for call in lossy.script.calls] == ["Generate", "Attach", "Generate"]


def test_what_was_cancelled_while_somebody_read_it_stays_so(lossy, reader):
    for faults in ([Fault(4, LOST), UNREAD], [Fault(4, cancels=True)]):
        lossy.script.faults = deque(faults)
        events = reader.generate()
        assert events[-1].finish_reason == "cancelled"
        assert not any("!" in event.text for event in events if isinstance(event, Delta))
    assert lossy.script.calls.count("Generate") == 2


def test_who_reads_slowly_is_cut_off_and_reads_on(lossy, reader):
    wanted = undisturbed(lossy, reader)
    lossy.script.faults = deque([Fault(4, SLOW), None])
    assert summary(reader.generate()) == wanted
    assert lossy.script.calls == ["Generate", "Attach 3"]
    # Not that the connection was silent: the messages before the cut had come long before.
    lossy.script.faults = deque([Fault(4, SLOW), UNREAD])
    assert summary(reader.generate()) == wanted


def test_another_answer_is_an_error_and_its_run_is_ended(lossy, reader):
    script = lossy.script
    script.faults = deque([Fault(6, LOST, forgets=True, shift=50)])
    with pytest.raises(AnswerChangedError, match="token 2 is 152 and was 102"):
        reader.generate(request_id="mine")
    assert script.was_cancelled.wait(TIMEOUT_S)
    assert script.cancelled == ["mine"]


def test_an_id_that_another_request_has_is_not_read(lossy, reader):
    reader.generate(request_id="mine", seed=5)
    with pytest.raises(AlreadyExistsError, match="a request of that id runs"):
        reader.generate(request_id="mine", seed=6)
    lossy.script.faults = deque([Fault(0, LOST)])
    with pytest.raises(AlreadyExistsError, match="not this one"):
        reader.generate(request_id="mine", seed=6)
    assert lossy.script.cancelled == []


def test_a_full_queue_is_the_callers_to_handle(lossy, reader):
    lossy.script.faults = deque([Fault(0, queue_full(1, 0))])
    with pytest.raises(QueueFullError):
        reader.generate()
    assert lossy.script.calls == ["Generate"]


def test_a_server_without_attach_windows_is_asked_without(lossy, reader):
    lossy.script.max_window_ms = 0
    assert reader.generate()
    assert lossy.script.calls == ["Generate", "Generate"]
    sent = lossy.script.requests[-2:]
    assert [one.HasField("attach_window_ms") for one in sent] == [True, False]


@pytest.mark.parametrize("kind", [SyncReader, AsyncReader])
def test_without_reconnect_a_loss_is_an_error_and_nothing_is_added(lossy, kind):
    lossy.script.faults = deque([Fault(3, LOST)])
    with pytest.raises(UnavailableError, match="Socket closed"):
        kind(lossy.address, reconnect=False).generate()
    assert lossy.script.calls == ["Generate"]
    sent = lossy.script.requests[-1]
    assert (sent.request_id, sent.HasField("sampling"), sent.attach_window_ms) == ("", False, 0)


@pytest.mark.parametrize("kind", [SyncReader, AsyncReader])
def test_a_loss_that_lasts_is_an_error_after_the_bound(lossy, kind):
    lossy.script.faults = deque([Fault(3, LOST), *([Fault(0, LOST)] * 100)])
    with pytest.raises(UnavailableError, match="Socket closed"):
        kind(lossy.address, reconnect_timeout=0.2).generate()
    # 0.01 + 0.02 + 0.04 + 3 times 0.05 s are too long already.
    assert 2 <= len(lossy.script.calls) <= 6


def test_the_callers_timeout_ends_the_tries_and_tells_why(lossy):
    lossy.script.faults = deque([Fault(3, LOST), *([Fault(0, LOST)] * 100)])
    with Client(lossy.address) as client:
        # The time is for the tries, not for a first connection.
        client.health()
        with pytest.raises(DeadlineError, match="Socket closed"):
            list(client.generate("x", timeout=2))


@pytest.mark.parametrize("fault", [Fault(), Fault(forgets=True), Fault(0, LOST), Fault(0, DRAINS)])
def test_complete_is_one_whole_answer_all_the_same(lossy, reader, fault):
    options = {**ALL, "n": 2, "parse_output": True}
    wanted = undisturbed(lossy, reader, **options)
    lossy.script.faults = deque([fault])
    answer = reader.complete(**options)
    for one in answer.choices:
        told = wanted["choices"][one.index]
        assert (list(one.token_ids), one.text) == (told["ids"], told["text"])
        assert one.reasoning_text == told["reasoning"]
        assert [(call.name, call.arguments_json) for call in one.tool_calls] == [
            ("find", '{"a": 1}')
        ]
        assert [row.token.token_id for row in one.logprobs] == told["logprobs"]
        assert one.finished.index == one.index
    assert [row.token.token_id for row in answer.prompt_logprobs] == wanted["prompt"]
    assert len(answer.choices) == 2
    assert lossy.script.calls[0] == "Complete"


def test_attach_by_hand_begins_where_it_is_told(lossy, reader):
    reader.generate(request_id="mine", n=2)
    events = reader.attach("mine", 2, [4])
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [d.token_ids[0] for d in deltas if d.token_ids] == [102, 104, 204]
    assert [event.index for event in events if isinstance(event, Finished)] == [0, 1]
    lossy.script.faults = deque([Fault(3), Fault(2), None])
    again = reader.attach("mine", 2, [4])
    ids = [i for event in again if isinstance(event, Delta) for i in event.token_ids]
    assert ids == [102, 103, 104, 105, 204, 205]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (NOT_FOUND, NotFoundError),
        (EXPIRED, ExpiredError),
        (OUT_OF_RANGE, OutOfRangeError),
        (SUPERSEDED, SupersededError),
    ],
)
def test_attach_by_hand_is_refused_with_its_own_error(lossy, reader, status, kind):
    reader.generate(request_id="mine")
    lossy.script.faults = deque([Fault(0, status)])
    with pytest.raises(kind):
        reader.attach("mine")
    assert lossy.script.cancelled == []


def test_closing_cancels_by_name(lossy):
    lossy.script.blocked = True
    with Client(lossy.address) as client:
        with client.generate("x", request_id="mine") as stream:
            next(stream)
        # Left the block: the server knows already.
        assert lossy.script.cancelled == ["mine"]
        list(stream)
        for event in client.generate("x", request_id="dropped"):
            if isinstance(event, Delta):
                break
        gc.collect()
        open_stream = client.generate("x", request_id="open")
        next(open_stream)
    assert lossy.script.cancelled == ["mine", "dropped", "open"]
    assert list(open_stream) == []


async def test_closing_cancels_by_name_async(lossy):
    lossy.script.blocked = True
    async with AsyncClient(lossy.address) as client:
        async with client.generate("x", request_id="mine") as stream:
            await anext(stream)
        assert lossy.script.cancelled == ["mine"]
        async for event in client.generate("x", request_id="dropped"):
            if isinstance(event, Delta):
                break
        gc.collect()
        open_stream = client.generate("x", request_id="open")
        await anext(open_stream)
    assert sorted(lossy.script.cancelled) == ["dropped", "mine", "open"]
    assert await read(open_stream) == []


def test_what_has_ended_is_not_cancelled_and_detached_neither(lossy):
    with Client(lossy.address) as client:
        list(client.generate("x"))
        with client.generate("x") as stream:
            for event in stream:
                if isinstance(event, Finished):
                    break
        left = client.generate("x", request_id="left")
        next(left)
        left.detach()
        assert list(left) == []
        assert [type(event) for event in client.attach("left")][-1] is Finished
    assert lossy.script.cancelled == []


EXITS = """
import sys
import slotwise_client.client
slotwise_client.client.CANCEL_TIMEOUT_S = 60
client = slotwise_client.Client(sys.argv[1])
stream = client.generate("x", request_id="mine")
next(stream)
if sys.argv[2] == "dropped":
    del stream, client
"""


@pytest.mark.parametrize("what", ["open", "dropped"])
def test_the_end_of_the_program_ends_its_requests(lossy, what):
    lossy.script.blocked = True
    command = [sys.executable, "-c", EXITS, lossy.address, what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert lossy.script.cancelled == ["mine"]


def test_closing_while_it_waits_for_the_server_ends_the_iteration(lossy):
    lossy.script.faults = deque([Fault(3, LOST), *([Fault(0, LOST)] * 100)])
    with Client(lossy.address) as client:
        stream = client.generate("x")
        for event in stream:
            if isinstance(event, Delta) and event.first_token_index == 1:
                break
        closer = threading.Timer(0.3, stream.close)
        closer.start()
        assert list(stream) == []
        closer.join()


def test_cancelling_a_task_that_completes_ends_the_request(lossy):
    async def run() -> None:
        lossy.script.faults = deque([Fault()])
        lossy.script.break_connections.clear()
        async with AsyncClient(lossy.address) as client:
            task = asyncio.create_task(client.complete("x", request_id="mine"))
            assert await asyncio.to_thread(lossy.script.completes.wait, TIMEOUT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert lossy.script.cancelled == ["mine"]


def test_a_server_that_never_answered_is_reported_at_once(lossy):
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError, match="no answer from"):
        list(client.generate("x"))


def test_replay_tells_the_record_and_then_the_run(lossy):
    with Client(lossy.address) as client:
        record, *events = client.replay("old")
    assert isinstance(record, RequestRecord)
    assert record.answers[0].token_ids == (100, 101, 102, 103, 104, 105)
    assert (record.setup.device_name, record.seed) == ("cpu", 2**63 + 5)
    assert record.request["max_new_tokens"] == NUM_TOKENS
    assert summary(events)["choices"][0]["ids"] == list(record.answers[0].token_ids)


async def test_replay_async(lossy):
    async with AsyncClient(lossy.address) as client:
        record, *events = await read(client.replay("old"))
    assert record.request_id == "old"
    assert isinstance(events[-1], Finished)
