"""The client for asyncio."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2

from slotwise.v1 import inference_pb2 as pb

from . import _protocol as protocol
from .errors import DeadlineError, NotFoundError, from_rpc_error
from .info import Health, Load, ModelInfo, ServerInfo, Slot
from .types import Chat, Completion, Event, GenerateOptions, Message, Prompt, RenderedChat, Tool

Q = TypeVar("Q", bound=ProtoMessage)
R = TypeVar("R", bound=ProtoMessage)
T = TypeVar("T")


class AsyncStream(AsyncIterator[Event]):
    """The events of one request as they come.

    Accepted, PromptLogprobs if asked for, any number of Delta, one Finished per choice.

    Dropping the stream (leaving a `with` block, `close`, garbage collection) cancels the request
    when it still runs. Iteration raises the typed errors of `slotwise_client.errors`.
    """

    def __init__(self, call: Any, target: str) -> None:
        self._call = call
        self._target = target
        self._closed = False

    async def __anext__(self) -> Event:
        while True:
            try:
                response = await self._call.read()
            except grpc.RpcError as error:
                raise from_rpc_error(error, self._target) from error
            except asyncio.CancelledError:
                # grpc.aio answers our own close() the way asyncio answers a cancelled task.
                task = asyncio.current_task()
                if self._closed and not (task and task.cancelling()):
                    raise StopAsyncIteration from None
                raise
            if response is grpc.aio.EOF:
                raise StopAsyncIteration
            event = protocol.event(response)
            if event is not None:
                return event

    def close(self) -> None:
        """Cancel what still runs; iteration then ends. Safe to call twice."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A stream that outlives its event loop has no call left to cancel.
        with contextlib.suppress(RuntimeError):
            self.close()


class AsyncClient:
    """A connection to one server, for use from one event loop.

    Make it inside a coroutine.

    `timeout` is in seconds and becomes the deadline of the call, which the server keeps too. Every
    method raises a subclass of `SlotwiseError` when the call fails.
    """

    def __init__(self, target: str = "127.0.0.1:50051") -> None:
        self.target = target
        self._channel = grpc.aio.insecure_channel(target, options=protocol.CHANNEL_OPTIONS)

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """Start a request and return its events as they come."""
        request = protocol.generate_request(prompt, options)
        method = self._channel.unary_stream(
            protocol.GENERATE.path,
            request_serializer=protocol.GENERATE.serialize,
            response_deserializer=protocol.GENERATE.response.FromString,
        )
        return AsyncStream(method(request, timeout=timeout), self.target)

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        system: str | None = None,
        tools: Sequence[Tool] = (),
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """`generate` for a question, or for a conversation so far; `system` is put before it."""
        chat = Chat.of(messages, system=system, tools=tools)
        return self.generate(chat, timeout=timeout, **options)

    async def complete(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """The whole answer at once."""
        return await self._unary(
            protocol.COMPLETE, protocol.generate_request(prompt, options), timeout
        )

    async def cancel(self, request_id: str, *, timeout: float | None = None) -> None:
        """Stop a request of any client by its id; its stream ends with reason CANCELLED."""
        await self._unary(protocol.CANCEL, pb.CancelRequest(request_id=request_id), timeout)

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
        method = self._channel.unary_stream(
            protocol.HEALTH_WATCH.path,
            request_serializer=protocol.HEALTH_WATCH.serialize,
            response_deserializer=protocol.HEALTH_WATCH.response.FromString,
        )
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

    async def _unary(self, call: protocol.Call[Q, R, T], request: Q, timeout: float | None) -> T:
        method = self._channel.unary_unary(
            call.path,
            request_serializer=call.serialize,
            response_deserializer=call.response.FromString,
        )
        try:
            return call.read(await method(request, timeout=timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error
