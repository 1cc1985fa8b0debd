from __future__ import annotations

import asyncio
import resource
import socket

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from scheduler_service import listener
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
        call = stub.ServerReflectionInfo(timeout=60)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert names == {
            "slotwise.v1.Inference",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        call.cancel()


async def served(server, handler=None) -> str:
    async def echo(request: bytes, _: object) -> bytes:
        return request

    method = handler or grpc.unary_unary_rpc_method_handler(echo)
    handlers = grpc.method_handlers_generic_handler("test.Echo", {"Echo": method})
    server.add_generic_rpc_handlers((handlers,))
    address = await bind(server, "127.0.0.1", 0)
    await server.start()
    return address


def connection(address: str) -> grpc.aio.Channel:
    """One of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(address, options=options)


async def echo(channel: grpc.aio.Channel, **options) -> str:
    """The status of a call, and its words."""
    try:
        await channel.unary_unary("/test.Echo/Echo")(b"hello", timeout=60, **options)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"


async def test_long_metadata_is_refused(server):
    async with connection(await served(server)) as channel:
        assert await echo(channel, metadata=(("a", "x" * 15_000),)) == "OK"
        refused = await echo(channel, metadata=(("a", "x" * 17_000),))
        assert refused.startswith("RESOURCE_EXHAUSTED: received metadata size exceeds hard limit")
        assert await echo(channel) == "OK"


async def test_connections_are_bounded_and_those_that_are_there_go_on(monkeypatch):
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 2)
    server = make_server(HealthService(1))
    address = await served(server)
    first, second, third = (connection(address) for _ in range(3))
    assert [await echo(first), await echo(second)] == ["OK", "OK"]
    assert (await echo(third)).startswith("UNAVAILABLE: failed to connect")
    assert await echo(first) == "OK"
    for channel in (first, second, third):
        await channel.close()
    await server.stop(None)


@pytest.mark.parametrize(
    ("files", "connections"), [(1024, 512), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)]
)
def test_connections_leave_files_for_others(monkeypatch, files, connections):
    monkeypatch.setattr(listener.resource, "getrlimit", lambda _: (files, files))
    assert listener._max_connections() == connections


async def test_calls_of_a_connection_are_bounded_and_the_others_wait(monkeypatch):
    bound = ("grpc.max_concurrent_streams", 2)
    options = [bound if name == bound[0] else (name, value) for name, value in listener.OPTIONS]
    assert options != listener.OPTIONS
    monkeypatch.setattr(listener, "OPTIONS", options)
    running, go_on = asyncio.Queue(), asyncio.Event()

    async def wait(request: bytes, _: object) -> bytes:
        running.put_nowait(request)
        await go_on.wait()
        return request

    server = make_server(HealthService(1))
    address = await served(server, grpc.unary_unary_rpc_method_handler(wait))
    async with connection(address) as channel, connection(address) as other:
        calls = [asyncio.create_task(echo(channel)) for _ in range(2)]
        for _ in calls:
            await running.get()
        calls.append(asyncio.create_task(echo(channel)))
        # Another connection's call comes through, so the third would be here as well.
        calls.append(asyncio.create_task(echo(other)))
        await running.get()
        assert running.empty()
        go_on.set()
        assert await asyncio.gather(*calls) == ["OK"] * 4
    await server.stop(None)


async def test_a_connection_that_says_nothing_is_closed(monkeypatch):
    bound = ("grpc.server_handshake_timeout_ms", 100)
    options = [bound if name == bound[0] else (name, value) for name, value in listener.OPTIONS]
    assert options != listener.OPTIONS
    monkeypatch.setattr(listener, "OPTIONS", options)
    server = make_server(HealthService(1))
    host, port = (await served(server)).rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(60):
        while await reader.read(1024):
            pass
    writer.close()
    await server.stop(None)
