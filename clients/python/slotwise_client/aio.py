"""The client for asyncio."""

import asyncio
import contextlib
import copy
import functools
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2

from slotwise.v1 import inference_pb2 as pb

from . import _protocol as protocol
from ._connection import CANCEL_TIMEOUT_S, Connection, TlsOptions
from ._gathering import Gathering
from ._reading import Once, Reading, Source, attach_request
from .errors import DeadlineError, NotFoundError, from_rpc_error
from .info import Health, Load, ModelInfo, ServerInfo, Slot
from .types import (
    Chat,
    Completion,
    Event,
    GenerateOptions,
    Message,
    Prompt,
    RenderedChat,
    RequestRecord,
    Tool,
)

Q = TypeVar("Q", bound=ProtoMessage)
R = TypeVar("R", bound=ProtoMessage)
T = TypeVar("T")


class AsyncStream(AsyncIterator[T], Generic[T]):
    """The events of one request as they come.

    Accepted, PromptLogprobs if asked for, any number of Delta, one Finished per choice.

    A lost connection, a server that was restarted and one that sends its clients elsewhere go by
    unseen: every token and every piece of text comes exactly once.

    Dropping the stream (leaving a `with` block, `close`, garbage collection) cancels the request
    when it still runs; `detach` leaves it. Iteration raises the typed errors of
    `slotwise_client.errors`.
    """

    def __init__(
        self, client: "AsyncClient", source: Source[T], timeout: float | None, delay: float = 0.0
    ) -> None:
        """`delay`: the request was lost already; seconds until it is read on."""
        self._call: Any = None
        self._client = client
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._closed = asyncio.Event()
        self._delay = delay
        client._streams.add(self)
        if not delay:
            self._open()

    @property
    def request_id(self) -> str | None:
        """The request's name. None: it was left to the server, which tells it in each event."""
        return self._source.request_id

    async def __anext__(self) -> T:
        while True:
            try:
                if self._call is None:
                    await self._reopen()
                response = await self._call.read()
            except grpc.RpcError as error:
                if self._closed.is_set() or self._source.is_over:
                    raise StopAsyncIteration from None
                self._lose(error)
                continue
            except asyncio.CancelledError:
                # grpc.aio answers our own close() the way asyncio answers a cancelled task.
                task = asyncio.current_task()
                if self._closed.is_set() and not (task and task.cancelling()):
                    raise StopAsyncIteration from None
                raise
            if response is grpc.aio.EOF:
                if self._closed.is_set() or self._source.ended():
                    raise StopAsyncIteration
                self._lose(None)
                continue
            event = self._take(response)
            if event is not None:
                return event

    def close(self) -> None:
        """Cancel what still runs; iteration then ends. Safe to call twice."""
        if self._leave():
            self._client._end(self._source)

    def detach(self) -> None:
        """Stop reading and let the request run, for its attach window, for `AsyncClient.attach`."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Returns when the server knows that the request ended, or after a second."""
        self.close()
        await self._client._wait_for_ends()

    def __del__(self) -> None:
        # A stream that outlives its event loop has no call left to cancel. The garbage collector
        # may be at work in another thread.
        with contextlib.suppress(RuntimeError):
            if self._leave():
                end = self._client._end
                self._loop.call_soon_threadsafe(end, self._source)

    def _take(self, response: Any) -> T | None:
        try:
            return self._source.take(response)
        except Exception:
            # A new run that is not the same one is nobody's.
            self.close()
            raise

    def _lose(self, error: grpc.RpcError | None) -> None:
        self._call = None
        self._delay = self._source.lost(error)

    async def _reopen(self) -> None:
        """StopAsyncIteration when the stream is closed meanwhile."""
        delay = min(self._delay, self._remaining(self._delay))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), delay)
            raise StopAsyncIteration
        self._open()

    def _open(self) -> None:
        call, request = self._source.next_call()
        timeout = None if self._deadline is None else self._remaining(0.0)
        method = self._client._stream_method(call, self._source.routing_key)
        self._call = method(request, timeout=timeout)

    def _remaining(self, without_deadline: float) -> float:
        if self._deadline is None:
            return without_deadline
        return max(0.0, self._deadline - time.monotonic())

    def _leave(self) -> bool:
        """Stop reading; whether a request is left that has to be cancelled."""
        if self._closed.is_set():
            return False
        self._closed.set()
        if self._call is not None:
            self._call.cancel()
        return self._source.request_id is not None and not self._source.is_over


class AsyncClient:
    """A connection to one server, for use from one event loop.

    Make it inside a coroutine.

    `timeout` is in seconds and becomes the deadline of the call, which the server keeps too. Every
    method raises a subclass of `SlotwiseError` when the call fails.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        tls: TlsOptions | bool = False,
        token: str | None = None,
        insecure_token: bool = False,
        reconnect: bool = True,
        reconnect_timeout: float = 60.0,
    ) -> None:
        """As of `Client`."""
        self.target = target
        self._connection = connection = Connection(
            target,
            tls=tls,
            token=token,
            insecure_token=insecure_token,
            reconnect=reconnect,
            reconnect_timeout=reconnect_timeout,
        )
        if connection.credentials is None:
            self._channel = grpc.aio.insecure_channel(target, connection.options)
        else:
            self._channel = grpc.aio.secure_channel(
                target, connection.credentials, connection.options
            )
        self._streams: weakref.WeakSet[AsyncStream[Any]] = weakref.WeakSet()
        # Requests that are being cancelled.
        self._ends: set[asyncio.Task[None]] = set()

    def with_token(self, token: str | None) -> "AsyncClient":
        """The same connection for another caller; closing either closes both.

        ValueError for a token that cannot be sent, or that everybody on the way could read.
        """
        other = copy.copy(self)
        other._connection = self._connection.with_token(token)
        return other

    def with_trace(self, traceparent: str, tracestate: str | None = None) -> "AsyncClient":
        """The same connection, for calls that belong to a trace: a server that traces adds its
        spans to it. Closing either closes both. ValueError for what is no W3C Trace Context.
        """
        other = copy.copy(self)
        other._connection = self._connection.with_trace(traceparent, tracestate)
        return other

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        routing_key: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream[Event]:
        """Start a request and return its events as they come.

        `routing_key`: among replicas, requests of one key go to one of them, which then has their
        beginnings in its cache; unset: one of `cache_salt`, else of the request's id.
        """
        request = protocol.generate_request(prompt, options)
        return AsyncStream(self, self._source(request, routing_key), timeout)

    def attach(
        self,
        request_id: str,
        next_token_index: int = 0,
        other_next_token_indices: Sequence[int] = (),
        next_prompt_token_index: int = 0,
        *,
        timeout: float | None = None,
        routing_key: str | None = None,
    ) -> AsyncStream[Event]:
        """Read a request on, from any connection: one that runs, or ended not long ago.

        The indices are those of the first tokens to come, of each choice and of prompt logprobs.
        `routing_key` is that of the request, if it was given one.
        NotFoundError, ExpiredError, OutOfRangeError or PermissionDeniedError where there is none.
        """
        request = attach_request(
            request_id, next_token_index, other_next_token_indices, next_prompt_token_index
        )
        return AsyncStream(self, self._source(request, routing_key), timeout)

    def replay(
        self, request_id: str, *, timeout: float | None = None, routing_key: str | None = None
    ) -> AsyncStream[RequestRecord | Event]:
        """Run an ended request again: first its record, then the events of the new run.

        NotFoundError, PermissionDeniedError; FailedPreconditionError while it runs, and
        SetupDiffersError when the server is not set up as it was then.
        """
        request = pb.ReplayRequest(request_id=request_id)
        source: Once[RequestRecord | Event] = Once(
            self._connection, protocol.REPLAY, request, routing_key
        )
        return AsyncStream(self, source, timeout)

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        system: str | None = None,
        tools: Sequence[Tool] = (),
        timeout: float | None = None,
        routing_key: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream[Event]:
        """`generate` for a question, or for a conversation so far; `system` is put before it."""
        chat = Chat.of(messages, system=system, tools=tools)
        return self.generate(chat, timeout=timeout, routing_key=routing_key, **options)

    async def complete(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        routing_key: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """The whole answer at once; what is lost on the way is read on as of `generate`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        source = self._source(protocol.generate_request(prompt, options), routing_key)
        try:
            return await self._call(protocol.COMPLETE, source.first, timeout, source.routing_key)
        except grpc.RpcError as error:
            delay = source.lost(error)
        except BaseException:
            if source.request_id is not None:
                self._end(source)
            raise
        gathering = Gathering()
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        async with AsyncStream(self, source, remaining, delay) as stream:
            async for event in stream:
                gathering.take(event)
        return gathering.completion()

    async def cancel(
        self, request_id: str, *, timeout: float | None = None, routing_key: str | None = None
    ) -> None:
        """Stop a request of any client by its id; its stream ends with reason CANCELLED.

        `routing_key` is that of the request, if it was given one.
        """
        request = pb.CancelRequest(request_id=request_id)
        key = protocol.key_of(request, routing_key)
        await self._unary(protocol.CANCEL, request, timeout, key)

    async def tokenize(
        self, text: str, *, parse_control_tokens: bool = False, timeout: float | None = None
    ) -> list[int]:
        """The ids `generate` would read for a raw prompt."""
        request = pb.TokenizeRequest(text=text, parse_control_tokens=parse_control_tokens)
        return await self._unary(protocol.TOKENIZE, request, timeout)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_control_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = protocol.detokenize_request(token_ids, keep_control_tokens)
        return await self._unary(protocol.DETOKENIZE, request, timeout)

    async def render_chat(self, chat: Chat, *, timeout: float | None = None) -> RenderedChat:
        """The prompt a chat becomes, without generating."""
        request = pb.RenderChatRequest(chat=protocol.chat_message(chat))
        return await self._unary(protocol.RENDER_CHAT, request, timeout)

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """The loaded model and its limits."""
        return await self._unary(protocol.MODEL_INFO, pb.GetModelInfoRequest(), timeout)

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """The server's settings and its workers."""
        return await self._unary(protocol.SERVER_INFO, pb.GetServerInfoRequest(), timeout)

    async def load(self, *, timeout: float | None = None) -> Load:
        """How busy the server is; cheap enough to poll."""
        return await self._unary(protocol.LOAD, pb.GetLoadRequest(), timeout)

    async def metrics(self, *, timeout: float | None = None) -> bytes:
        """All of the server's metrics in the text format of Prometheus."""
        return await self._unary(protocol.METRICS, pb.GetMetricsRequest(), timeout)

    async def slots(self, *, timeout: float | None = None) -> list[Slot]:
        """Who sits in which slot."""
        return await self._unary(protocol.SLOTS, pb.ListSlotsRequest(), timeout)

    async def flush_cache(self, *, timeout: float | None = None) -> int:
        """Forget all cached prefixes; how many tokens of free slots that were."""
        return await self._unary(protocol.FLUSH_CACHE, pb.FlushCacheRequest(), timeout)

    async def health(
        self, service: str = protocol.SERVICE, *, timeout: float | None = None
    ) -> Health:
        """Health of the model's service, of the process (""), or of `slotwise.worker/<rank>`."""
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            return await self._unary(protocol.HEALTH_CHECK, request, timeout)
        except NotFoundError:
            return Health.UNKNOWN_SERVICE

    async def watch_health(self, service: str = protocol.SERVICE) -> AsyncIterator[Health]:
        """Health as of `health`, now and whenever it changes; waits for a server to come.

        UnavailableError when its connection is lost.
        """
        request = health_pb2.HealthCheckRequest(service=service)
        # With wait_for_ready a lost server is dialled with back-off inside this one call.
        call = self._stream_method(protocol.HEALTH_WATCH)(request, wait_for_ready=True)
        try:
            async for response in call:
                yield protocol.HEALTH_WATCH.read(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error
        finally:
            call.cancel()

    async def wait_ready(self, timeout: float) -> None:
        """Return when the server answers requests; DeadlineError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        try:
            while not await self._watch_until_serving(deadline - time.monotonic()):
                pass
        except DeadlineError as error:
            message = f"{self.target} is not ready after {timeout:g} s"
            raise DeadlineError(message, error.code) from error

    async def _watch_until_serving(self, timeout: float) -> bool:
        """False when the connection was lost and the watch must be opened again."""
        method = self._stream_method(protocol.HEALTH_WATCH)
        request = health_pb2.HealthCheckRequest(service=protocol.SERVICE)
        # With wait_for_ready a lost server is dialled with back-off inside this one call.
        call = method(request, timeout=max(timeout, 0.0), wait_for_ready=True)
        try:
            async for response in call:
                if protocol.HEALTH_WATCH.read(response) is Health.SERVING:
                    return True
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise from_rpc_error(error, self.target) from error
        finally:
            call.cancel()
        return False

    async def close(self) -> None:
        """Close the connection; running streams are cancelled."""
        self._connection.life.is_closed = True
        for stream in list(self._streams):
            stream.close()
        await self._wait_for_ends()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _source(
        self, request: pb.GenerateRequest | pb.AttachRequest, routing_key: str | None
    ) -> Once[Event] | Reading:
        if self._connection.reconnect:
            return Reading(self._connection, request, routing_key=routing_key)
        sends = isinstance(request, pb.GenerateRequest)
        call = protocol.GENERATE if sends else protocol.ATTACH
        return Once(self._connection, call, request, routing_key)

    def _end(self, source: Source[Any]) -> None:
        """Cancel a request that nobody reads any more, if it is there."""
        task = asyncio.ensure_future(self._cancel_if_there(source))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _cancel_if_there(self, source: Source[Any]) -> None:
        # Best effort: what is not heard of is ended by its attach window.
        with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError):
            request = pb.CancelRequest(request_id=str(source.request_id))
            await self._call(protocol.CANCEL, request, CANCEL_TIMEOUT_S, source.routing_key)

    async def _wait_for_ends(self) -> None:
        if self._ends:
            await asyncio.wait(self._ends, timeout=CANCEL_TIMEOUT_S)

    def _stream_method(self, call: Any, routing_key: str | None = None) -> Any:
        method = self._channel.unary_stream(
            call.path,
            request_serializer=call.serialize,
            response_deserializer=call.response.FromString,
        )
        return functools.partial(method, metadata=self._connection.metadata_for(routing_key))

    async def _unary(
        self,
        call: protocol.Call[Q, R, T],
        request: Q,
        timeout: float | None,
        routing_key: str | None = None,
    ) -> T:
        try:
            return await self._call(call, request, timeout, routing_key)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error

    async def _call(
        self,
        call: protocol.Call[Q, R, T],
        request: Q,
        timeout: float | None,
        routing_key: str | None = None,
    ) -> T:
        method = self._channel.unary_unary(
            call.path,
            request_serializer=call.serialize,
            response_deserializer=call.response.FromString,
        )
        metadata = self._connection.metadata_for(routing_key)
        response = await method(request, timeout=timeout, metadata=metadata)
        self._connection.life.was_reached = True
        return call.read(response)
