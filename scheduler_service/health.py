"""grpc.health.v1: liveness, readiness and one name per rank, pushed to watchers at once."""
# ruff: noqa: N802  methods bear the names of their RPCs

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .engine_types import EngineState
from .status import CallContext

LIVENESS = ""
READINESS = "slotwise.v1.Inference"


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped package
    """Answers from memory, so it never waits for the engine. One event loop only."""

    def __init__(self, world_size: int) -> None:
        """Every name but liveness begins as NOT_SERVING."""
        self._ranks = [f"slotwise.worker/{rank}" for rank in range(world_size)]
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        self._status = dict.fromkeys([READINESS, *self._ranks], not_serving)
        self._status[LIVENESS] = health_pb2.HealthCheckResponse.SERVING
        self._changed = asyncio.Event()
        self._closed = False

    def on_state(self, state: EngineState) -> None:
        """Ready means that a step has passed on all ranks; in any other state none serves."""
        ready = state is EngineState.READY
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if ready else response.NOT_SERVING
        for name in (READINESS, *self._ranks):
            self._status[name] = status
        self._wake()

    def close(self) -> None:
        """Ends all Watch streams, so that the server can stop."""
        self._closed = True
        self._wake()

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: CallContext,
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._status:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no service {request.service[:200]!r}; known are {sorted(self._status)}",
            )
        return health_pb2.HealthCheckResponse(status=self._status[request.service])

    async def List(
        self,
        request: health_pb2.HealthListRequest,
        context: CallContext,
    ) -> health_pb2.HealthListResponse:
        return health_pb2.HealthListResponse(
            statuses={
                name: health_pb2.HealthCheckResponse(status=status)
                for name, status in self._status.items()
            }
        )

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: CallContext,
    ) -> None:
        """Sends the present status, then each change, until the client or the server ends."""
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        sent = None
        while not self._closed:
            changed = self._changed
            status = self._status.get(request.service, unknown)
            if status != sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            await changed.wait()

    def _wake(self) -> None:
        # Each change has its own event: a watcher that writes at the time misses none.
        self._changed.set()
        self._changed = asyncio.Event()
