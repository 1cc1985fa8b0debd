"""Cancel, disconnect, deadline, duplicate ids and full queues, in every phase, over gRPC."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from integration.front import OPTIONS, WAIT_S, rest, running_front
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc


def request(num_new: int = 200, num_prompt: int = 3, **options) -> pb.GenerateRequest:
    prompt = pb.TokenIds(ids=[5] * num_prompt)
    return pb.GenerateRequest(token_ids=prompt, max_new_tokens=num_new, ignore_eos=True, **options)


async def started(stub, wanted: pb.GenerateRequest, **options):
    """A stream that is accepted."""
    call = stub.Generate(wanted, timeout=WAIT_S, **options)
    assert (await call.read()).HasField("accepted")
    return call


async def has_token(call) -> None:
    assert (await call.read()).HasField("delta")


async def idle(front, **counts: int) -> pb.GetLoadResponse:
    """Waits until nothing runs or waits, and checks how requests have ended."""
    load = await front.until(lambda load: load.num_running == 0 and load.num_waiting == 0)
    got = {name: getattr(load.requests, name) for name in counts}
    assert got == counts
    return load


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
async def test_clients_that_leave_free_their_slots(front, how):
    """B09: eight streams; then a ninth starts at once."""
    meter = front.hold()
    channels = [grpc.aio.insecure_channel(front.address, options=OPTIONS) for _ in range(8)]
    calls = [await started(rpc.InferenceStub(channel), request()) for channel in channels]
    meter.allow(3)
    for call in calls[:2]:
        await has_token(call)
    for call in calls if how == "cancel" else []:
        call.cancel()
    for channel in channels:
        await channel.close()
    await idle(front, cancelled=8, error=0)
    ninth = await started(front.stub, request(2))
    meter.allow(10)
    assert (await rest(ninth))[-1].finished.usage.completion_tokens == 2
    assert (await front.load()).requests.length == 1


async def test_a_whole_answer_whose_client_leaves(front):
    """B09, not streamed."""
    front.hold()
    call = front.stub.Complete(request(), timeout=WAIT_S)
    await front.until(lambda load: load.num_running == 1)
    call.cancel()
    await idle(front, cancelled=1)


@pytest.mark.parametrize("how", ["rpc", "client"])
async def test_requests_cancelled_in_the_queue_cost_nothing(front_model, tmp_path, how):
    """B10: no prefill for them, the queue is right at once, their ids are free again."""
    async with running_front(front_model, tmp_path, num_slots=1) as front:
        meter = front.hold()
        before = front.worker.worker.num_prefills
        busy = await started(front.stub, request(2, request_id="busy"))
        ids = [f"queued-{i}" for i in range(100)]
        calls = [await started(front.stub, request(2, request_id=i)) for i in ids]
        for request_id, call in zip(ids[:99], calls, strict=False):
            if how == "client":
                call.cancel()
            else:
                await front.stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=WAIT_S)
        load = await front.until(lambda load: load.num_waiting == 1)
        assert load.requests.cancelled == 99
        meter.allow(1000)
        for call in (busy, calls[99]):
            assert (await rest(call))[-1].finished.usage.completion_tokens == 2
        assert front.worker.worker.num_prefills - before == 2
        again = await front.collect(request(2, request_id="queued-5"))
        assert len(again.token_ids) == 2
        await idle(front, cancelled=99, length=3)


async def test_cancel_by_id_ends_the_stream_with_a_reason(front):
    meter = front.hold()
    running = await started(front.stub, request(request_id="mine"))
    meter.allow(2)
    await has_token(running)
    other = rpc.InferenceStub(grpc.aio.insecure_channel(front.address))
    await other.Cancel(pb.CancelRequest(request_id="mine"), timeout=WAIT_S)
    last = (await rest(running))[-1]
    assert last.finished.finish_reason == pb.FINISH_REASON_CANCELLED
    error = await front.error(other.Cancel(pb.CancelRequest(request_id="mine"), timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    await idle(front, cancelled=1)


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_deadlines(front_model, tmp_path, phase):
    """B12: the slot is free, the worker is told no more of it, and it counts as a deadline."""
    async with running_front(front_model, tmp_path, num_slots=1, max_step_tokens=8) as front:
        meter = front.hold()
        if phase == "queue":
            busy = await started(front.stub, request(2))
        num_prompt = 100 if phase == "prefill" else 3
        # Long enough to be accepted first.
        call = front.stub.Generate(request(150, num_prompt), timeout=3)
        assert (await call.read()).HasField("accepted")
        meter.allow(3 if phase == "decode" else 0)
        error = await front.error(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        load = await front.until(lambda load: load.requests.deadline == 1)
        assert (load.requests.cancelled, load.requests.error) == (0, 0)
        assert load.num_waiting == 0
        meter.allow(1000)
        if phase == "queue":
            assert (await rest(busy))[-1].finished.usage.completion_tokens == 2
        assert len((await front.collect(request(2))).token_ids) == 2
        await idle(front, deadline=1)


async def test_a_deadline_that_is_over_is_not_started(front):
    error = await front.error(front.stub.Complete(request(), timeout=0))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await idle(front, length=0)


async def test_an_id_is_taken_while_its_request_lives(front):
    meter = front.hold()
    first = await started(front.stub, request(2, request_id="one"))
    error = await front.error(front.stub.Generate(request(request_id="one"), timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "one" in error.details()
    meter.allow(10)
    assert (await rest(first))[-1].HasField("finished")
    assert len((await front.collect(request(2, request_id="one"))).token_ids) == 2


async def test_a_full_queue_says_when_to_come_back(front_model, tmp_path):
    async with running_front(front_model, tmp_path, num_slots=1, max_queue_len=2) as front:
        meter = front.hold()
        calls = [await started(front.stub, request(2)) for _ in range(3)]
        error = await front.error(front.stub.Generate(request(), timeout=WAIT_S))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = await rpc_status_of(error)
        retry = error_details_pb2.RetryInfo()
        assert [d for d in status.details if d.Unpack(retry)]
        assert retry.retry_delay.ToNanoseconds() > 0
        assert (await front.load()).requests.rejected_full == 1
        meter.allow(100)
        for call in calls:
            assert (await rest(call))[-1].HasField("finished")


async def test_bad_input_names_its_field(front):
    sampling = pb.SamplingParams(top_p=2)
    error = await front.error(front.stub.Complete(request(sampling=sampling), timeout=WAIT_S))
    status = await rpc_status_of(error)
    bad = error_details_pb2.BadRequest()
    assert [d for d in status.details if d.Unpack(bad)]
    assert bad.field_violations[0].field == "sampling.top_p"


async def test_before_the_workers_are_ready(front_model, tmp_path):
    """B36: refused at once, not left hanging; what needs no worker works."""
    async with running_front(front_model, tmp_path, start=False) as front:
        for call in (
            front.stub.Generate(request(), timeout=WAIT_S),
            front.stub.Complete(request(), timeout=WAIT_S),
            front.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=WAIT_S),
            front.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=WAIT_S),
            front.stub.GetLoad(pb.GetLoadRequest(), timeout=WAIT_S),
        ):
            assert (await front.error(call)).code() is grpc.StatusCode.UNAVAILABLE
        assert (await front.stub.Tokenize(pb.TokenizeRequest(text="hi"))).token_ids


async def test_a_drain_lets_streams_finish_and_refuses_new_ones(front):
    """B41."""
    meter = front.hold()
    running = await started(front.stub, request(5))
    draining = asyncio.ensure_future(front.engine.drain(WAIT_S))
    await asyncio.sleep(0)
    error = await front.error(front.stub.Generate(request(), timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    meter.allow(100)
    assert (await rest(running))[-1].finished.usage.completion_tokens == 5
    await draining


async def test_a_passed_grace_ends_streams_unavailable(front):
    """B41."""
    front.hold()
    running = await started(front.stub, request(5))
    await front.engine.drain(0)
    assert (await front.error(running)).code() is grpc.StatusCode.UNAVAILABLE


async def rpc_status_of(error: grpc.aio.AioRpcError):
    """The google.rpc.Status that came with an error."""
    status = rpc_status.from_call(_Ended(error))
    assert status is not None
    return status


class _Ended:
    """An error of grpc.aio in the form that grpcio-status reads."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self._error = error

    def code(self):
        return self._error.code()

    def details(self):
        return self._error.details()

    def trailing_metadata(self):
        return self._error.trailing_metadata()
