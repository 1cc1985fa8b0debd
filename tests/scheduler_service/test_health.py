from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_service.engine_types import EngineState
from scheduler_service.health import READINESS, HealthService

Response = health_pb2.HealthCheckResponse
RANKS = ["slotwise.worker/0", "slotwise.worker/1"]
WAIT_S = 60


@pytest.fixture
async def service() -> HealthService:
    return HealthService(world_size=2)


@pytest.fixture
async def stub(service, tmp_path) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    address = f"unix:{tmp_path}/health.sock"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield health_pb2_grpc.HealthStub(channel)
    await server.stop(None)


async def check(stub, name: str) -> int:
    request = health_pb2.HealthCheckRequest(service=name)
    return (await stub.Check(request, timeout=WAIT_S)).status


async def test_alive_from_the_start_ready_only_when_the_engine_is(stub, service):
    """B36."""
    assert await check(stub, "") == Response.SERVING
    for name in [READINESS, *RANKS]:
        assert await check(stub, name) == Response.NOT_SERVING
    service.on_state(EngineState.READY)
    for name in ["", READINESS, *RANKS]:
        assert await check(stub, name) == Response.SERVING


@pytest.mark.parametrize("state", [s for s in EngineState if s is not EngineState.READY])
async def test_no_other_state_is_ready(stub, service, state):
    """B34, B41: alive, and not ready."""
    service.on_state(EngineState.READY)
    service.on_state(state)
    for name in [READINESS, *RANKS]:
        assert await check(stub, name) == Response.NOT_SERVING
    assert await check(stub, "") == Response.SERVING


async def test_unknown_names(stub):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(stub, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert READINESS in caught.value.details()
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=WAIT_S)
    assert (await watch.read()).status == Response.SERVICE_UNKNOWN
    watch.cancel()


async def test_watchers_are_told_at_once(stub, service):
    watches = [
        stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S)
        for name in (READINESS, READINESS, RANKS[1])
    ]
    for watch in watches:
        assert (await watch.read()).status == Response.NOT_SERVING
    service.on_state(EngineState.READY)
    for watch in watches:
        assert (await watch.read()).status == Response.SERVING
    service.on_state(EngineState.RECOVERING)
    for watch in watches:
        assert (await watch.read()).status == Response.NOT_SERVING


async def test_closing_ends_the_watchers(stub, service):
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=WAIT_S)
    assert (await watch.read()).status == Response.SERVING
    service.close()
    assert await watch.read() is grpc.aio.EOF


async def test_the_list(stub, service):
    service.on_state(EngineState.READY)
    listed = await stub.List(health_pb2.HealthListRequest(), timeout=WAIT_S)
    assert set(listed.statuses) == {"", READINESS, *RANKS}
    assert {s.status for s in listed.statuses.values()} == {Response.SERVING}


async def test_many_changes_leave_the_last(stub, service):
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=READINESS), timeout=WAIT_S)
    assert (await watch.read()).status == Response.NOT_SERVING
    for _ in range(50):
        service.on_state(EngineState.READY)
        service.on_state(EngineState.RECOVERING)
        await asyncio.sleep(0)
    service.on_state(EngineState.READY)
    statuses = [(await watch.read()).status]
    while statuses[-1] != Response.SERVING:
        statuses.append((await watch.read()).status)
    watch.cancel()
