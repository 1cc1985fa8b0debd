"""The synchronous client."""

import time
from collections.abc import Iterator, Sequence
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


class Stream(Iterator[Event]):
    """The events of one request as they come.

    Accepted, PromptLogprobs if asked for, any number of Delta, one Finished per choice.

    Dropping the stream (leaving a `with` block, `close`, garbage collection) cancels the request
    when it still runs. Iteration raises the typed errors of `slotwise_client.errors`.
    """

    def __init__(self, call: Any, target: str) -> None:
        self._call = call
        self._target = target
        self._closed = False

    def __next__(self) -> Event:
        while True:
            try:
                response = next(self._call)
            except grpc.RpcError as error:
                if self._closed:
                    raise StopIteration from None
                raise from_rpc_error(error, self._target) from error
            event = protocol.event(response)
            if event is not None:
                return event

    def close(self) -> None:
        """Cancel what still runs; iteration then ends. Safe to call twice and from any thread."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    """A connection to one server, for use from any number of threads.

    `timeout` is in seconds and becomes the deadline of the call, which the server keeps too. Every
    method raises a subclass of `SlotwiseError` when the call fails.
    """

    def __init__(self, target: str = "127.0.0.1:50051") -> None:
        self.target = target
        self._channel = grpc.insecure_channel(target, options=protocol.CHANNEL_OPTIONS)

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Stream:
        """Start a request and return its events as they come."""
        request = protocol.generate_request(prompt, options)
        method = self._channel.unary_stream(
            protocol.GENERATE.path,
            request_serializer=protocol.GENERATE.serialize,
            response_deserializer=protocol.GENERATE.response.FromString,
        )
        return Stream(method(request, timeout=timeout), self.target)

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        system: str | None = None,
        tools: Sequence[Tool] = (),
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """`generate` for a question, or for a conversation so far; `system` is put before it."""
        chat = Chat.of(messages, system=system, tools=tools)
        return self.generate(chat, timeout=timeout, **options)

    def complete(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """The whole answer at once."""
        return self._unary(protocol.COMPLETE, protocol.generate_request(prompt, options), timeout)

    def cancel(self, request_id: str, *, timeout: float | None = None) -> None:
        """Stop a request of any client by its id; its stream ends with reason CANCELLED."""
        self._unary(protocol.CANCEL, pb.CancelRequest(request_id=request_id), timeout)

    def tokenize(
        self, text: str, *, parse_control_tokens: bool = False, timeout: float | None = None
    ) -> list[int]:
        """The ids `generate` would read for a raw prompt."""
        request = pb.TokenizeRequest(text=text, parse_control_tokens=parse_control_tokens)
        return self._unary(protocol.TOKENIZE, request, timeout)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_control_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = protocol.detokenize_request(token_ids, keep_control_tokens)
        return self._unary(protocol.DETOKENIZE, request, timeout)

    def render_chat(self, chat: Chat, *, timeout: float | None = None) -> RenderedChat:
        """The prompt a chat becomes, without generating."""
        request = pb.RenderChatRequest(chat=protocol.chat_message(chat))
        return self._unary(protocol.RENDER_CHAT, request, timeout)

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """The loaded model and its limits."""
        return self._unary(protocol.MODEL_INFO, pb.GetModelInfoRequest(), timeout)

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """The server's settings and its workers."""
        return self._unary(protocol.SERVER_INFO, pb.GetServerInfoRequest(), timeout)

    def load(self, *, timeout: float | None = None) -> Load:
        """How busy the server is; cheap enough to poll."""
        return self._unary(protocol.LOAD, pb.GetLoadRequest(), timeout)

    def slots(self, *, timeout: float | None = None) -> list[Slot]:
        """Who sits in which slot."""
        return self._unary(protocol.SLOTS, pb.ListSlotsRequest(), timeout)

    def flush_cache(self, *, timeout: float | None = None) -> int:
        """Forget all cached prefixes; how many tokens of free slots that were."""
        return self._unary(protocol.FLUSH_CACHE, pb.FlushCacheRequest(), timeout)

    def health(self, service: str = protocol.SERVICE, *, timeout: float | None = None) -> Health:
        """Health of the model's service, of the process (""), or of `slotwise.worker/<rank>`."""
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            return self._unary(protocol.HEALTH_CHECK, request, timeout)
        except NotFoundError:
            return Health.UNKNOWN_SERVICE

    def wait_ready(self, timeout: float) -> None:
        """Return when the server answers requests; DeadlineError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        try:
            while not self._watch_until_serving(deadline - time.monotonic()):
                pass
        except DeadlineError as error:
            message = f"{self.target} is not ready after {timeout:g} s"
            raise DeadlineError(message, error.code) from error

    def _watch_until_serving(self, timeout: float) -> bool:
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
            for response in call:
                if protocol.HEALTH_WATCH.read(response) is Health.SERVING:
                    return True
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise from_rpc_error(error, self.target) from error
        finally:
            call.cancel()
        return False

    def close(self) -> None:
        """Close the connection; running streams are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _unary(self, call: protocol.Call[Q, R, T], request: Q, timeout: float | None) -> T:
        method = self._channel.unary_unary(
            call.path,
            request_serializer=call.serialize,
            response_deserializer=call.response.FromString,
        )
        try:
            return call.read(method(request, timeout=timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error
