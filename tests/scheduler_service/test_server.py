"""The servicer's answers where they cannot be sent."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import grpc
import pytest
from fake_engine import FakeEngine, is_known
from tokenizer_files import write_model

from scheduler_service import messages
from scheduler_service.auth import Caller, Callers
from scheduler_service.engine_types import EngineConfig
from scheduler_service.journal import Journal, RecordedCall
from scheduler_service.record import AnswerLog
from scheduler_service.request import FinishedEvent, FinishReason
from scheduler_service.server import InferenceServicer, resume_calls
from scheduler_service.service import Accepting, InferenceService, Survival, load_model
from slotwise.v1 import inference_pb2 as pb

WAIT_S = 60


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


class FullContext(GoneContext):
    """Of a call whose client reads no more after the first message."""

    def __init__(self):
        self.num_written = 0

    async def write(self, message):
        self.num_written += 1
        if self.num_written > 1:
            await asyncio.Event().wait()

    async def abort(self, code, details, metadata):
        raise RuntimeError(code.name, details)


@pytest.mark.parametrize("how", ["Generate", "Attach", "Replay"])
async def test_who_reads_nothing_is_cut_off(model, how):
    engine = FakeEngine()
    service = InferenceService(model, engine, Survival(slow_reader_s=0.02))
    servicer = InferenceServicer(service, EngineConfig(), Callers())
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), request_id="r")
    if how == "Generate":
        work = servicer.Generate(request, FullContext())
    else:
        call, kept = messages.generate_call(request), messages.take_kept(request)
        await service.begin(call, Accepting(Caller(), kept))
        engine.finish(FinishReason.LENGTH)
        kind = {"Attach": pb.AttachRequest, "Replay": pb.ReplayRequest}[how]
        work = getattr(servicer, how)(kind(request_id="r"), FullContext())
    running = asyncio.create_task(work)
    if how == "Generate":
        async with asyncio.timeout(WAIT_S):
            while engine.stream is None:  # noqa: ASYNC110 (the servicer submits, and tells nobody)
                await asyncio.sleep(0)
        engine.finish(FinishReason.LENGTH)
    with pytest.raises(RuntimeError, match=r"ABORTED.*0\.02 s"):
        async with asyncio.timeout(WAIT_S):
            await running
    assert service.num_slow_readers == 1


async def test_a_request_that_this_server_cannot_run_leaves_the_journal(model, tmp_path):
    def opened():
        options = {"max_bytes": 1 << 20, "retention_s": 3600.0, "accept_timeout_s": WAIT_S}
        return Journal.open(tmp_path, **options)

    journal, _ = opened()
    service = InferenceService(model, FakeEngine(), Survival(journal))
    ids = pb.TokenIds(ids=[5])
    request = pb.GenerateRequest(token_ids=ids, request_id="r", max_new_tokens=30)
    call, kept = messages.generate_call(request), messages.take_kept(request)
    generation = await service.begin(call, Accepting(Caller(), kept))
    assert await generation.is_journaled()
    journal.close()
    journal, left = opened()
    service = InferenceService(model, FakeEngine(max_seq_len=8), Survival(journal), is_open=False)
    await resume_calls(service, left)
    assert (len(left), service.num_resumed, service.is_open) == (1, 0, True)
    journal.close()
    journal, left = opened()
    journal.close()
    assert left == []


async def test_what_had_ended_is_forgotten_in_the_order_of_its_end(model):
    """Not in that of its acceptance, in which the journal gives it."""
    service = InferenceService(model, FakeEngine(), Survival(retention_s=3600.0))
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), request_id="r")
    call, kept = messages.generate_call(request), messages.take_kept(request)
    generation = await service.begin(call, Accepting(Caller(), kept))
    now_ns, left = time.time_ns(), []
    for name, ended_s_ago in (("first", 1.0), ("second", 3599.9)):
        record = replace(generation.call.record, call_id=name)
        log = AnswerLog(end=FinishedEvent(name, FinishReason.LENGTH, 1, 0, 1, 2, 3, 4))
        left.append(RecordedCall(record, [log], now_ns - int(ended_s_ago * 1e9)))
    await resume_calls(service, left)
    async with asyncio.timeout(WAIT_S):
        while is_known(service, "second"):  # noqa: ASYNC110 (a timer, which tells nobody)
            await asyncio.sleep(0.01)
    assert is_known(service, "first")
    service.calls.close()
