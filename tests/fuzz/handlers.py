"""The front in this process: bodies go to the server's handlers as gRPC hands them over.

Behind them is a real engine with a fake worker. What a call may not do is collected as faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from fuzz.bodies import Body
from grpc_health.v1 import health_pb2_grpc

from fakes import FakeWorkerServer
from scheduler_service.engine import Engine
from scheduler_service.engine_types import EngineConfig
from scheduler_service.health import HealthService
from scheduler_service.readable import readable
from scheduler_service.server import add_inference
from scheduler_service.service import InferenceService, Model, Survival

VOCAB_SIZE, MAX_SEQ_LEN, NUM_SLOTS = 512, 128, 16
# Of ended calls, for Attach: little, or it would look like a leak.
MAX_KEPT_BYTES = 1 << 20
# Far beyond what any takes, on a busy machine too.
CALL_TIMEOUT_S = 60.0
# What a caller can bring about. DEADLINE_EXCEEDED and UNAVAILABLE need more than a body.
PROPER = {
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
    "OUT_OF_RANGE",
    "ABORTED",
    "RESOURCE_EXHAUSTED",
}


class Handlers:
    """Stands where a grpc.aio.Server does, and only keeps what is added to it."""

    def __init__(self) -> None:
        self._generic: list[grpc.GenericRpcHandler] = []
        self._found: dict[str, grpc.RpcMethodHandler] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """The same ones again."""

    def find(self, method: str) -> grpc.RpcMethodHandler:
        if method not in self._found:
            details = SimpleNamespace(method=method, invocation_metadata=())
            found = [handler.service(details) for handler in self._generic]
            self._found[method] = readable(next(one for one in found if one is not None))
        return self._found[method]


class Ended(Exception):  # noqa: N818
    """The call's status."""


class Call:
    """One call's context. Whoever made it reads nothing, and keeps it open to its end."""

    def __init__(self) -> None:
        self.num_written = 0
        self.first_written = asyncio.Event()

    async def write(self, message: Any) -> None:
        message.SerializeToString()
        self.num_written += 1
        self.first_written.set()

    async def abort(self, code: grpc.StatusCode, details: str = "", metadata: Any = ()) -> None:
        raise Ended(code, details, metadata)

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "unix:"


class Watched(logging.Handler):
    """Faults that were logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.faults.append(f"logged: {self.format(record)}")


class Front:
    """Handlers, and how the calls to them ended."""

    def __init__(self, handlers: Handlers, engine: Engine) -> None:
        self.engine = engine
        self._handlers = handlers
        self.codes: Counter[str] = Counter()
        self.faults: list[str] = []
        self.slowest = (0.0, "")

    async def take(self, body: Body) -> None:
        """Makes the call, to its end."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                code = await self._code(body)
        except TimeoutError:
            code = "HANGS"
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
        self.slowest = max(self.slowest, (time.monotonic() - started, describe(body)))
        self.codes[code if code in PROPER else "improper"] += 1
        if code not in PROPER:
            self.faults.append(f"{code[:300]}: {describe(body)}")

    async def _code(self, body: Body) -> str:
        handler, call = self._handlers.find(body.method), Call()
        try:
            if body.method.endswith("/Watch"):
                return await self._first_of_watch(handler, call, body)
            if handler.unary_stream is not None:
                await handler.unary_stream(body.data, call)
            else:
                answer = await handler.unary_unary(body.data, call)
                (handler.response_serializer or type(answer).SerializeToString)(answer)
        except Ended as ended:
            code, details, metadata = ended.args
            size = len(details.encode()) + sum(len(value) for _, value in metadata)
            # What a peer takes of headers, less what gRPC itself adds.
            return code.name if size < 7000 else f"a status of {size} bytes"
        return "OK"

    async def _first_of_watch(self, handler: Any, call: Call, body: Body) -> str:
        """Until the first message; the client ends the call."""
        work = asyncio.ensure_future(handler.unary_stream(body.data, call))
        first = asyncio.ensure_future(call.first_written.wait())
        await asyncio.wait({work, first}, return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        return "OK"


def describe(body: Body) -> str:
    """A long one's beginning; it can be made again by its number."""
    return f"body {body.number} ({body.made_by}) {body.method} {body.data[:200]!r}"


@contextlib.asynccontextmanager
async def running_front(model: Model, folder: Path) -> AsyncIterator[Front]:
    """Faults that were logged are among the front's at the end."""
    address = f"unix:{folder}/fuzz-worker.sock"
    worker = FakeWorkerServer(address, None, VOCAB_SIZE, MAX_SEQ_LEN)
    # It would keep them all.
    worker.commands = deque(maxlen=0)
    await worker.start()
    config = EngineConfig(worker_addresses=(address,), num_slots=NUM_SLOTS, max_seq_len=MAX_SEQ_LEN)
    health = HealthService(1)
    engine = Engine(config, health.on_state, lambda progress: None)
    handlers = Handlers()
    health_pb2_grpc.add_HealthServicer_to_server(health, handlers)
    service = InferenceService(model, engine, Survival(max_kept_bytes=MAX_KEPT_BYTES))
    add_inference(handlers, service, config)
    front, watched = Front(handlers, engine), Watched()
    logging.getLogger().addHandler(watched)
    try:
        await asyncio.wait_for(engine.start(), CALL_TIMEOUT_S)
        epoch = engine.info().epoch
        yield front
        front.faults += [fault for fault in watched.faults if fault not in front.faults]
        load = engine.load()
        if load.num_running or load.num_waiting:
            front.faults.append(f"left behind: {load}")
        if engine.info().epoch != epoch:
            front.faults.append("the workers were lost")
    finally:
        logging.getLogger().removeHandler(watched)
        await engine.stop()
        health.close()
        await worker.die()
