"""An engine whose events the test plays, and calls to submit to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from scheduler_service.auth import Caller
from scheduler_service.errors import (
    ExpiredRequestError,
    UnavailableError,
    UnknownRequestError,
)
from scheduler_service.generate_call import GenerateCall, IdsInput
from scheduler_service.request import (
    FinishedEvent,
    FinishReason,
    Request,
    TokenEvent,
    choice_id,
)
from scheduler_service.request_stream import RequestStream
from scheduler_service.service import Accepting, InferenceService


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
    max_seq_len: int = 64
    build: str = "b"

    def now_ns(self) -> int:
        return self.clock_ns

    def info(self):
        if not self.ready:
            raise UnavailableError("starting")
        geometry = SimpleNamespace(
            max_seq_len=self.max_seq_len,
            fingerprint="f",
            build=self.build,
            weight_dtype="float32",
            kv_dtype="float32",
            device_name="cpu",
        )
        return SimpleNamespace(geometry=geometry, workers=(None,))

    def submit(self, requests: Sequence[Request]) -> RequestStream:
        self.requests += requests
        self.stream = RequestStream(requests[0].call_id, 3, len(requests))
        return self.stream

    def resume(self, requests: Sequence[Request], stream: RequestStream) -> None:
        self.requests += requests
        self.stream = stream

    def redirect(self, stream: RequestStream) -> None:
        if self.known:
            self.stream = stream

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        if not self.known:
            raise UnknownRequestError(request_id)
        self.cancelled.append((request_id, reason))

    def stop_request(self, request: Request, num_tokens: int) -> bool:
        self.stopped.append((request.request_id, num_tokens))
        return self.known

    def tokens(self, first: int, *ids: int, answer: int = 0, logprobs=()) -> None:
        self.stream.push(TokenEvent(choice_id("r", answer), first, ids, logprobs))

    def finish(self, reason: FinishReason, num_tokens: int = 0, answer: int = 0, **more) -> None:
        name = choice_id("r", answer)
        self.stream.push(FinishedEvent(name, reason, 1, num_tokens, 1, 2, 3, 4, **more))


def accepting(deadline_ns: int | None = None) -> Accepting:
    return Accepting(Caller(), b"", deadline_ns)


def call(**options) -> GenerateCall:
    return GenerateCall(IdsInput((5,)), request_id="r", **options)


def ids(model, text: str) -> list[int]:
    return [i for char in text for i in model.tokenizer.encode(char)]


def is_known(service: InferenceService, call_id: str) -> bool:
    """It waits, runs or is still kept."""
    try:
        service.calls.find(call_id)
    except (UnknownRequestError, ExpiredRequestError):
        return False
    return True
