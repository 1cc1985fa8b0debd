"""Whatever a client sends: a request within the limits, or an error that names a field."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from message_strategies import messages_of
from tokenizer_files import write_model

from scheduler_service.auth import Callers
from scheduler_service.request import FinishedEvent, FinishReason, Request
from scheduler_service.request_stream import RequestStream
from scheduler_service.server import InferenceServicer
from scheduler_service.service import InferenceService, load_model
from slotwise.v1 import inference_pb2 as pb

VOCAB_SIZE, MAX_SEQ_LEN = 512, 256
FUZZ = settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass
class EndingEngine:
    """Ends every request at once."""

    requests: list[Request] = field(default_factory=list)

    def now_ns(self) -> int:
        return 0

    def info(self):
        geometry = SimpleNamespace(
            max_seq_len=MAX_SEQ_LEN,
            fingerprint="f",
            build="b",
            weight_dtype="float32",
            kv_dtype="float32",
            device_name="cpu",
        )
        return SimpleNamespace(geometry=geometry, workers=(None,))

    def submit(self, requests):
        self.requests += requests
        stream = RequestStream(requests[0].call_id, 0, len(requests))
        for request in requests:
            length = FinishReason.LENGTH
            stream.push(FinishedEvent(request.request_id, length, 1, 0, 0, 0, 0, 0))
        return stream


class Ended(Exception):  # noqa: N818
    """The call's status."""


class Context:
    """Of a call without a deadline."""

    def __init__(self) -> None:
        self.written: list[pb.GenerateResponse] = []

    def time_remaining(self):
        return None

    def invocation_metadata(self):
        return ()

    async def write(self, message):
        self.written.append(message)

    async def abort(self, code, details, metadata):
        raise Ended(code, details, metadata)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_model(tmp_path_factory.mktemp("model")), "")


def answer(model, method: str, request) -> tuple[EndingEngine, tuple[str, str] | None]:
    """Calls a method; the engine, and field and words of the refusal if it is one."""
    engine = EndingEngine()
    servicer = InferenceServicer(InferenceService(model, engine), SimpleNamespace(), Callers())
    context = Context()
    try:
        asyncio.run(getattr(servicer, method)(request, context))
    except Ended as ended:
        code, details, metadata = ended.args
        assert code is grpc.StatusCode.INVALID_ARGUMENT, (code, details)
        return engine, (violation(dict(metadata)["grpc-status-details-bin"]), details)
    return engine, None


def violation(details: bytes) -> str:
    bad = error_details_pb2.BadRequest()
    assert [d for d in status_pb2.Status.FromString(details).details if d.Unpack(bad)]
    return bad.field_violations[0].field


def names_a_field(path: str, descriptor) -> bool:
    """ "chat.messages[1].role" names one of GenerateRequest's; a message's name is the whole."""
    if path == descriptor.name:
        return True
    for name in re.sub(r"\[\d+\]", "", path).split("."):
        if descriptor is None:
            return False
        if name in descriptor.oneofs_by_name:
            return True
        found = descriptor.fields_by_name.get(name)
        if found is None:
            return False
        descriptor = found.message_type
    return True


def check_within_limits(request: Request) -> None:
    assert len(request.prompt_token_ids) >= 1
    assert 1 <= request.max_new_tokens <= MAX_SEQ_LEN - len(request.prompt_token_ids)
    assert 0 <= request.min_new_tokens <= request.max_new_tokens
    ids = {*request.prompt_token_ids, *request.end_token_ids}
    ids |= {token_id for token_id, _ in request.sampling.logit_bias}
    assert all(0 <= token_id < VOCAB_SIZE for token_id in ids)
    sampling = request.sampling
    assert sampling.temperature == 0 or 9e-6 < sampling.temperature <= 100
    assert 0 <= sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert 0 <= sampling.top_k <= VOCAB_SIZE
    assert 0 <= sampling.seed < 1 << 64
    assert abs(sampling.frequency_penalty) <= 2
    assert abs(sampling.presence_penalty) <= 2
    assert 9e-7 < sampling.repetition_penalty <= 10
    assert len(sampling.logit_bias) <= 1024
    assert all(math.isfinite(bias) and abs(bias) <= 100 for _, bias in sampling.logit_bias)
    for count in (request.num_logprobs, request.num_prompt_logprobs):
        assert count is None or 0 <= count <= 20
    assert len(request.cache_salt) <= 256
    assert 1 <= len(request.call_id) <= 128
    assert (request.constraint is None) == (request.first_mask is None)


@FUZZ
@given(data=st.data(), method=st.sampled_from(["Generate", "Complete"]))
def test_any_generate_request(model, data, method):
    request = data.draw(messages_of(pb.GenerateRequest.DESCRIPTOR))
    engine, refusal = answer(model, method, request)
    if refusal is not None:
        assert names_a_field(refusal[0], pb.GenerateRequest.DESCRIPTOR), refusal
        assert engine.requests == []
        return
    assert len(engine.requests) == (request.n or 1)
    for made in engine.requests:
        check_within_limits(made)


@FUZZ
@given(
    request=messages_of(pb.GenerateRequest.DESCRIPTOR, max_fields=2),
    sampling=messages_of(pb.SamplingParams.DESCRIPTOR, max_fields=2),
)
def test_any_parameters_of_a_good_prompt(model, request, sampling):
    """As above, but never refused for its prompt: the parameters, few at a time, are looked at."""
    request.token_ids.ids[:] = [5, 6]
    request.ClearField("parse_control_tokens")
    request.sampling.CopyFrom(sampling)
    engine, refusal = answer(model, "Generate", request)
    if refusal is not None:
        assert names_a_field(refusal[0], pb.GenerateRequest.DESCRIPTOR), refusal
    for made in engine.requests:
        check_within_limits(made)


@FUZZ
@given(
    request=st.one_of(
        messages_of(pb.RenderChatRequest.DESCRIPTOR),
        messages_of(pb.TokenizeRequest.DESCRIPTOR),
        messages_of(pb.DetokenizeRequest.DESCRIPTOR),
        messages_of(pb.CancelRequest.DESCRIPTOR),
    )
)
def test_any_other_request(model, request):
    if isinstance(request, pb.CancelRequest) and request.request_id:
        request.request_id += "\n"
    method = request.DESCRIPTOR.name.removesuffix("Request")
    _, refusal = answer(model, method, request)
    if refusal is not None:
        assert names_a_field(refusal[0], request.DESCRIPTOR), refusal


def test_the_fuzzer_knows_a_field_from_none():
    whole = pb.GenerateRequest.DESCRIPTOR
    good = ["input", "constraint", "chat.messages[3].role", "sampling.logit_bias[7]", "stop[0]"]
    assert all(names_a_field(path, whole) for path in [*good, "GenerateRequest"])
    assert not any(names_a_field(path, whole) for path in ["", "prompt", "chat.role", "stop.a"])
