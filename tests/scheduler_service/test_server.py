"""The servicer's answers where they cannot be sent."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from fake_engine import FakeEngine
from tokenizer_files import write_model

from scheduler_service.auth import Callers
from scheduler_service.engine_types import EngineConfig
from scheduler_service.request import FinishReason
from scheduler_service.server import InferenceServicer
from scheduler_service.service import InferenceService, load_model
from slotwise.v1 import inference_pb2 as pb


class GoneContext:
    """Of a call whose client is gone, before its handler was told."""

    def time_remaining(self):
        return None

    def invocation_metadata(self):
        return ()

    async def write(self, message):
        raise grpc.aio.InternalError("nothing can be sent")

    async def abort(self, code, details, metadata):
        raise grpc.aio.InternalError("nothing can be sent")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_model(tmp_path_factory.mktemp("model")), "")


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), request_id="r"),
        pb.GenerateRequest(),
    ],
)
async def test_a_client_that_is_gone_is_no_fault_of_the_server(model, request_, caplog):
    engine = FakeEngine()
    service = InferenceService(model, engine)
    servicer = InferenceServicer(service, EngineConfig(), Callers())
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        await servicer.Generate(request_, GoneContext())
    assert caplog.records == []
    expected = [("r", FinishReason.CANCELLED)] if request_.request_id else []
    assert engine.cancelled == expected
