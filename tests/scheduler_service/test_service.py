from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from tokenizer_files import write_model

from scheduler_service.errors import (
    CorruptedError,
    DeadlineError,
    DuplicateRequestError,
    InvalidArgumentError,
    QueueFullError,
    UnavailableError,
    UnknownRequestError,
)
from scheduler_service.generate_call import GenerateCall, IdsInput
from scheduler_service.request import FinishedEvent, FinishReason, Request, TokenEvent
from scheduler_service.request_stream import RequestStream
from scheduler_service.service import DEADLINE_SLACK_NS, InferenceService, Rejections, load_model


@dataclass
class FakeEngine:
    """Keeps what it is told; the test plays the events."""

    ready: bool = True
    clock_ns: int = 100
    requests: list[Request] = field(default_factory=list)
    cancelled: list[tuple[str, FinishReason]] = field(default_factory=list)
    stopped: list[tuple[str, int]] = field(default_factory=list)
    known: bool = True
    stream: RequestStream | None = None

    def now_ns(self) -> int:
        return self.clock_ns

    def info(self):
        if not self.ready:
            raise UnavailableError("starting")
        return SimpleNamespace(geometry=SimpleNamespace(max_seq_len=64))

    def submit(self, request: Request) -> RequestStream:
        self.requests.append(request)
        self.stream = RequestStream(request.request_id, 3)
        return self.stream

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        if not self.known:
            raise UnknownRequestError(request_id)
        self.cancelled.append((request_id, reason))

    def stop_request(self, request_id: str, num_tokens: int) -> bool:
        self.stopped.append((request_id, num_tokens))
        return self.known

    def tokens(self, first: int, *ids: int) -> None:
        self.stream.push(TokenEvent("r", first, ids))

    def finish(self, reason: FinishReason, num_tokens: int = 0, **more) -> None:
        self.stream.push(FinishedEvent("r", reason, 1, num_tokens, 1, 2, 3, 4, **more))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_model(tmp_path_factory.mktemp("model")), "")


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def service(model, engine):
    return InferenceService(model, engine)


def call(**options) -> GenerateCall:
    return GenerateCall(IdsInput((5,)), request_id="r", **options)


def ids(model, text: str) -> list[int]:
    return [i for char in text for i in model.tokenizer.encode(char)]


async def test_what_is_here_is_joined_into_one_update(service, engine, model):
    async with await service.begin(call(), None) as generation:
        assert generation.queue_position == 3
        a, b, c = ids(model, "abc")
        engine.tokens(0, a)
        engine.tokens(1, b)
        update = await generation.next()
        assert (update.first_token_index, update.token_ids, update.text) == (0, (a, b), "ab")
        assert update.end is None
        engine.tokens(2, c)
        engine.finish(FinishReason.LENGTH, 3)
        update = await generation.next()
        assert (update.first_token_index, update.token_ids, update.text) == (2, (c,), "c")
        assert update.end.event.reason is FinishReason.LENGTH
    assert engine.cancelled == []


@pytest.mark.parametrize("known", [True, False])
async def test_a_stop_string_ends_the_request_whatever_happened_meanwhile(
    service, engine, model, known
):
    engine.known = known
    async with await service.begin(call(stop=("bc",)), None) as generation:
        engine.tokens(0, *ids(model, "abcd"))
        update = await generation.next()
        assert update.text == "a"
        assert update.token_ids == tuple(ids(model, "abc"))
        assert engine.stopped == [("r", 3)]
        engine.tokens(4, *ids(model, "ef"))
        engine.finish(FinishReason.STOP if known else FinishReason.LENGTH, 3 if known else 6)
        update = await generation.next()
        assert (update.token_ids, update.text) == ((), "")
        assert update.end.matched_stop == "bc"
        assert update.end.event.reason is FinishReason.STOP
        assert update.end.event.num_generated_tokens == 3


async def test_held_text_is_delivered_at_the_end(service, engine, model):
    """B03."""
    async with await service.begin(call(stop=("bcd",)), None) as generation:
        engine.tokens(0, *ids(model, "abc"))
        assert (await generation.next()).text == "a"
        engine.finish(FinishReason.LENGTH, 3)
        update = await generation.next()
        assert (update.text, update.end.matched_stop) == ("bc", None)


@pytest.mark.parametrize(
    ("reason", "more", "error"),
    [
        (FinishReason.DEADLINE, {"message": "late"}, DeadlineError),
        (FinishReason.ERROR, {"message": "lost", "status": "UNAVAILABLE"}, UnavailableError),
        (FinishReason.ERROR, {"message": "nan", "status": "INTERNAL"}, CorruptedError),
    ],
)
async def test_ends_that_are_errors(service, engine, reason, more, error):
    async with await service.begin(call(), None) as generation:
        engine.finish(reason, **more)
        with pytest.raises(error, match=more["message"]):
            await generation.next()
    assert engine.cancelled == []


@pytest.mark.parametrize(
    ("deadline_ns", "reason"),
    [
        (None, FinishReason.CANCELLED),
        (201 + DEADLINE_SLACK_NS, FinishReason.CANCELLED),
        (200 + DEADLINE_SLACK_NS, FinishReason.DEADLINE),
        (100, FinishReason.DEADLINE),
    ],
)
async def test_leaving_before_the_end_cancels(service, engine, deadline_ns, reason):
    """B09, B12: counted as what it was."""
    async with await service.begin(call(), deadline_ns):
        engine.clock_ns = 200
    assert engine.cancelled == [("r", reason)]


async def test_leaving_after_an_end_that_was_not_yet_read(service, engine):
    engine.known = False
    async with await service.begin(call(), None):
        engine.finish(FinishReason.LENGTH)
    assert engine.cancelled == []


async def test_a_request_carries_its_arrival_and_deadline(service, engine):
    async with await service.begin(call(), 500):
        (request,) = engine.requests
        assert (request.arrival_ns, request.deadline_ns) == (100, 500)
        assert request.max_new_tokens == 63


async def test_refusals_are_never_submitted(service, engine):
    with pytest.raises(InvalidArgumentError):
        await service.begin(call(top_k=-2), None)
    engine.ready = False
    with pytest.raises(UnavailableError):
        await service.begin(call(), None)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (InvalidArgumentError("top_k", "-2"), (1, 0, 0)),
        (DuplicateRequestError("r"), (1, 0, 0)),
        (QueueFullError("full", 1.0), (0, 1, 0)),
        (UnavailableError("starting"), (0, 0, 1)),
        (RuntimeError("a bug"), (0, 0, 0)),
    ],
)
def test_refusals_are_counted(error, counts):
    rejections = Rejections()
    with pytest.raises(type(error)), rejections.counted():
        raise error
    assert (rejections.invalid, rejections.full, rejections.unavailable) == counts
