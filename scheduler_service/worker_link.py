"""The stream to one rank."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import grpc.aio

from slotwise.worker.v1 import worker_pb2 as pb
from slotwise.worker.v1 import worker_pb2_grpc as pb_grpc

from .config import MAX_MESSAGE_BYTES
from .engine_types import LoadProgress, WorkerConfigured
from .errors import GroupError, SetupError, WorkerLostError
from .step import StepResult
from .worker_messages import Response, read_response

# Statuses of a rank that has lost its peers, met another stream or been told nonsense.
_CAN_GO_ON = {
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.INVALID_ARGUMENT,
}
# Of a call that nobody answered.
_NO_ANSWER = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}

Deliver = Callable[[int, StepResult | GroupError], None]
# In gRPC's words for a connection that failed: TLS did it, not a worker that is not there yet.
_NO_TRUST = ("handshake failed", "verification check failed")
_CLOSED = ("socket closed", "secure read failed", "connection reset")
Credentials = Callable[[], grpc.ChannelCredentials]


def _channel_options(address: str) -> list[tuple[str, int]]:
    options = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A channel of its own for each stream: no back-off is inherited from a worker's last life.
        ("grpc.use_local_subchannel_pool", 1),
        # For a handshake, not between tries.
        ("grpc.min_reconnect_backoff_ms", 5_000),
    ]
    if address.startswith("unix:"):
        # A worker that starts is dialled as soon as it listens.
        options += [("grpc.initial_reconnect_backoff_ms", 20)]
        options.append(("grpc.max_reconnect_backoff_ms", 100))
    else:
        options += [("grpc.initial_reconnect_backoff_ms", 100)]
        options.append(("grpc.max_reconnect_backoff_ms", 500))
        # A host that vanishes closes nothing; pings find out.
        options += [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000)]
        options.append(("grpc.http2.ping_timeout_ms", 5_000))
    return options


async def answers(address: str, timeout_s: float) -> bool:
    """Whether the worker at a Unix socket answers a question of its health, whatever it says."""
    async with grpc.aio.insecure_channel(address, options=_channel_options(address)) as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            await call(b"", timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code() not in _NO_ANSWER
    return True


class WorkerLink:
    """One rank's Run stream. After `configure`, results and the stream's end go to `deliver`."""

    def __init__(
        self,
        rank: int,
        address: str,
        deliver: Deliver,
        credentials: Credentials | None = None,
    ) -> None:
        """credentials: of a connection over TCP; None: it is plain, as Unix sockets always are."""
        self.rank = rank
        self.address = address
        self._deliver = deliver
        self._requests: asyncio.Queue[pb.RunRequest] = asyncio.Queue()
        self._is_secure = credentials is not None and not address.startswith("unix:")
        options = _channel_options(address)
        if credentials is not None and self._is_secure:
            self._channel = grpc.aio.secure_channel(address, credentials(), options=options)
        else:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        self._call: grpc.aio.StreamStreamCall | None = None
        self._writer: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None

    async def configure(
        self,
        message: pb.RunRequest,
        on_progress: Callable[[LoadProgress], None],
        connect_timeout_s: float,
        silence_timeout_s: float,
    ) -> WorkerConfigured:
        """Connects and configures the rank, and begins to read its results.

        WorkerLostError when it cannot be reached, breaks off or says nothing for too long;
        SetupError, with its words, when the set-up cannot work.
        """
        try:
            async with asyncio.timeout(connect_timeout_s):
                await self._connect()
        except TimeoutError:
            raise self._lost(
                f"cannot be reached at {self.address} within {connect_timeout_s:g} s"
            ) from None
        stub = pb_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        self._call = stub.Run()
        self.send(message)
        self._writer = asyncio.create_task(
            self._write(self._call), name=f"worker {self.rank} writer"
        )
        configured = await self._read_until_configured(on_progress, silence_timeout_s)
        self._reader = asyncio.create_task(self._read_results(), name=f"worker {self.rank} reader")
        return configured

    def send(self, message: pb.RunRequest) -> None:
        """Queues a message for the rank; never waits. A broken stream shows in `deliver`."""
        self._requests.put_nowait(message)

    async def close(self) -> None:
        """Ends the stream; the worker then leaves its group. Nothing is delivered after this."""
        tasks = [task for task in (self._writer, self._reader) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()

    async def _connect(self) -> None:
        """Waits until the worker listens. A handshake that fails is no matter of waiting."""
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                return
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and self._is_secure:
                await self._check_handshake()
            await self._channel.wait_for_state_change(state)

    async def _check_handshake(self) -> None:
        """WorkerLostError, with the words of a call, when TLS is why there is no connection."""
        call = self._channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            await call(b"", wait_for_ready=False)
        except grpc.aio.AioRpcError as error:
            details = (error.details() or "").lower()
            if any(words in details for words in _NO_TRUST):
                raise self._error_of_status(error) from error
            if any(words in details for words in _CLOSED):
                raise self._lost(
                    f"{self.address} closes the connection: it may want a certificate that "
                    "its tls-client-ca has signed"
                ) from error

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        # A stream that broke raises on write; the reader learns of it too, and tells why.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await self._requests.get())

    async def _read_until_configured(
        self, on_progress: Callable[[LoadProgress], None], silence_timeout_s: float
    ) -> WorkerConfigured:
        while True:
            try:
                async with asyncio.timeout(silence_timeout_s):
                    response = await self._read()
            except TimeoutError:
                raise self._lost(f"said nothing for {silence_timeout_s:g} s of its start") from None
            if isinstance(response, WorkerConfigured):
                return response
            if isinstance(response, StepResult):
                raise self._lost("sent a step result before it was configured")
            on_progress(response)

    async def _read_results(self) -> None:
        try:
            while True:
                response = await self._read()
                if not isinstance(response, StepResult):
                    raise self._lost(f"sent {type(response).__name__} where a result was due")
                self._deliver(self.rank, response)
        except GroupError as error:
            self._deliver(self.rank, error)

    async def _read(self) -> Response:
        """The rank's next message; GroupError when there is none."""
        assert self._call is not None
        try:
            message = await self._call.read()
            if message is grpc.aio.EOF:
                raise self._lost("ended its stream")
            return read_response(message, self.rank, self.address)
        except grpc.aio.AioRpcError as error:
            raise self._error_of_status(error) from error
        except ValueError as error:
            raise self._lost(f"sent {error}") from error

    def _error_of_status(self, error: grpc.aio.AioRpcError) -> GroupError:
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            return SetupError(f"worker {self.rank}: {error.details()}")
        return self._lost(f"{error.code().name}: {error.details()}", error.code() in _CAN_GO_ON)

    def _lost(self, reason: str, can_go_on: bool = False) -> WorkerLostError:
        return WorkerLostError(self.rank, reason, can_go_on)
