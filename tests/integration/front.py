"""The whole front over real gRPC, with a fake worker behind it that the test can hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from fakes import FakeWorkerServer, Script
from integration.streams import Generation
from scheduler_service.auth import Callers, Gate
from scheduler_service.config import Config
from scheduler_service.engine import Engine
from scheduler_service.engine_types import EngineConfig
from scheduler_service.health import HealthService
from scheduler_service.listener import bind, make_server
from scheduler_service.metrics import Metrics
from scheduler_service.server import add_inference
from scheduler_service.service import InferenceService, Model
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

# Ends what hangs; a slow machine takes a minute for the longest of the calls.
WAIT_S = 300
VOCAB_SIZE = 512
OPTIONS = [
    ("grpc.max_send_message_length", 1 << 30),
    ("grpc.max_receive_message_length", 64 << 20),
]


class StepMeter(asyncio.Event):
    """Stands at a fake worker's gate and lets a counted number of commands pass."""

    def __init__(self) -> None:
        super().__init__()
        self._allowed = asyncio.Semaphore(0)

    async def wait(self) -> bool:
        await self._allowed.acquire()
        return True

    def allow(self, count: int = 1) -> None:
        for _ in range(count):
            self._allowed.release()


@dataclass
class Front:
    """A running server, its parts, and a client."""

    address: str
    engine: Engine
    worker: FakeWorkerServer
    channel: grpc.aio.Channel
    stub: rpc.InferenceStub
    metrics: Metrics

    def hold(self) -> StepMeter:
        """From here on, the worker takes only the commands that the meter allows."""
        self.worker.step_gate = StepMeter()
        return self.worker.step_gate

    def release(self) -> None:
        """The worker runs freely again, the held command too."""
        held, self.worker.step_gate = self.worker.step_gate, asyncio.Event()
        self.worker.step_gate.set()
        if isinstance(held, StepMeter):
            held.allow(1000)

    async def collect(self, request: pb.GenerateRequest, **options: Any) -> Generation:
        """Runs a request to its end and checks the shape of its stream."""
        got = Generation()
        async for response in self.stub.Generate(request, timeout=WAIT_S, **options):
            if request.HasField("request_id"):
                assert response.request_id == request.request_id
            got.add(response)
        got.check_ended()
        return got

    async def load(self) -> pb.GetLoadResponse:
        return await self.stub.GetLoad(pb.GetLoadRequest(), timeout=WAIT_S)

    async def until(self, condition: Callable[[pb.GetLoadResponse], bool]) -> pb.GetLoadResponse:
        """Waits until the server's load is as wanted."""
        async with asyncio.timeout(WAIT_S):
            while not condition(load := await self.load()):  # noqa: ASYNC110
                await asyncio.sleep(0)
            return load

    async def error(self, call: Any) -> grpc.aio.AioRpcError:
        """The error that a call ends with; a stream is read to its end."""
        try:
            if isinstance(call, grpc.aio.UnaryStreamCall):
                await rest(call)
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("the call ended well")


async def rest(call: Any) -> list[Any]:
    """The messages of a stream that are still to come."""
    messages: list[Any] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


@contextlib.asynccontextmanager
async def running_front(
    model: Model,
    folder: Path,
    script: Script | None = None,
    start: bool = True,
    callers: Callers | None = None,
    **engine: Any,
) -> AsyncIterator[Front]:
    """start False: the engine is left STARTING, its workers are never dialled."""
    address = f"unix:{folder}/worker.sock"
    max_seq_len = engine.setdefault("max_seq_len", 256)
    worker = FakeWorkerServer(address, script, VOCAB_SIZE, max_seq_len)
    await worker.start()
    settings = EngineConfig(worker_addresses=(address,), **engine)
    config = Config(model_dir=folder, port=0, engine=settings)
    health = HealthService(1)
    shell = Engine(config.engine, health.on_state, lambda progress: None)
    server = make_server(health, Gate(callers) if callers else None)
    metrics = Metrics()
    add_inference(server, InferenceService(model, shell), config.engine, callers, metrics)
    dialled = await bind(server, config.host, config.port)
    await server.start()
    try:
        if start:
            await asyncio.wait_for(shell.start(), WAIT_S)
        async with grpc.aio.insecure_channel(dialled, options=OPTIONS) as channel:
            yield Front(dialled, shell, worker, channel, rpc.InferenceStub(channel), metrics)
    finally:
        await shell.stop()
        health.close()
        await server.stop(None)
        await worker.die()
