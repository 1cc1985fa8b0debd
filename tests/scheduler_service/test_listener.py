from __future__ import annotations

import socket

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from scheduler_service.config import ConfigError
from scheduler_service.health import HealthService
from scheduler_service.listener import bind, make_server


@pytest.fixture
async def server():
    made = make_server(HealthService(1))
    yield made
    await made.stop(None)


async def test_any_free_port(server):
    address = await bind(server, "127.0.0.1", 0)
    host, port = address.rsplit(":", 1)
    assert host == "127.0.0.1"
    assert int(port) > 0


async def test_a_port_in_use_is_named(server):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: Address already in use"):
            await bind(server, "127.0.0.1", port)


async def test_a_second_server_does_not_share_the_port(server):
    port = int((await bind(server, "127.0.0.1", 0)).rsplit(":", 1)[1])
    await server.start()
    other = make_server(HealthService(1))
    with pytest.raises(ConfigError, match="in use"):
        await bind(other, "127.0.0.1", port)
    await other.stop(None)


async def test_an_unknown_host_is_named(server):
    with pytest.raises(ConfigError, match=r"cannot listen on 203.0.113.7:5"):
        await bind(server, "203.0.113.7", 5)


async def test_another_port_is_no_cure_for_a_wrong_host(server):
    with pytest.raises(ConfigError) as caught:
        await bind(server, "203.0.113.7", 0)
    assert "--port" not in str(caught.value)


async def test_reflection_lists_all_services(server):
    address = await bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=30)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert names == {
            "slotwise.v1.Inference",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        call.cancel()
