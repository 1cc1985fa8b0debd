"""Bytes that are no message, sent to the services of generated code."""

from __future__ import annotations

import logging

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from scheduler_service.health import HealthService
from scheduler_service.readable import Readable

WAIT_S = 60
NOT_A_MESSAGE = [b"\xff\xff\xff", b"\x0a\x05abc"]
NOT_TEXT = b"\x0a\x02\xff\xfe"
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.fixture
async def channel(tmp_path):
    server = grpc.aio.server(interceptors=[Readable()])
    health = HealthService(1)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection(["grpc.health.v1.Health"], server)
    address = f"unix:{tmp_path}/front.sock"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as dialled:
        yield dialled
    health.close()
    await server.stop(None)


async def refusal(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize("data", [*NOT_A_MESSAGE, NOT_TEXT])
async def test_unreadable_bytes_are_the_clients_fault(channel, data, caplog):
    calls = [
        channel.unary_unary(HEALTH + "Check")(data, timeout=WAIT_S),
        channel.unary_stream(HEALTH + "Watch")(data, timeout=WAIT_S),
    ]
    stream = channel.stream_stream(REFLECTION)(timeout=WAIT_S)
    await stream.write(data)
    with caplog.at_level(logging.WARNING):
        for call in [*calls, stream]:
            code, words = await refusal(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "the bytes sent cannot be read" in words
    assert caplog.records == []


async def test_what_can_be_read_is_answered(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest()
    assert (await stub.Check(request, timeout=WAIT_S)).status == 1
    assert "slotwise.worker/0" in (await stub.List(health_pb2.HealthListRequest())).statuses
    watch = stub.Watch(request, timeout=WAIT_S)
    assert (await watch.read()).status == 1
    watch.cancel()
    stream = channel.stream_stream(REFLECTION)(timeout=WAIT_S)
    asked = reflection_pb2.ServerReflectionRequest(list_services="*")
    await stream.write(asked.SerializeToString())
    answer = reflection_pb2.ServerReflectionResponse.FromString(await stream.read())
    assert [one.name for one in answer.list_services_response.service] == ["grpc.health.v1.Health"]
    stream.cancel()


async def test_no_such_method(channel):
    code, _ = await refusal(channel.unary_unary("/grpc.health.v1.Health/No")(b"", timeout=WAIT_S))
    assert code is grpc.StatusCode.UNIMPLEMENTED
