"""The synchronous client."""

import atexit
import contextlib
import copy
import functools
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar, Unpack

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


class Stream(Iterator[T], Generic[T]):
    """The events of one request as they come.

    Accepted, PromptLogprobs if asked for, any number of Delta, one Finished per choice.

    A lost connection, a server that was restarted and one that sends its clients elsewhere go by
    unseen: every token and every piece of text comes exactly once.

    Dropping the stream (leaving a `with` block, `close`, garbage collection) cancels the request
    when it still runs; `detach` leaves it. Iteration raises the typed errors of
    `slotwise_client.errors`.
    """

    def __init__(
        self, client: "Client", source: Source[T], timeout: float | None, delay: float = 0.0
    ) -> None:
        """`delay`: the request was lost already; seconds until it is read on."""
        self._call: Any = None
        self._client = client
        self._source = source
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._closed = threading.Event()
        self._delay = delay
        client._streams.add(self)
        if not delay:
            self._open()

    @property
    def request_id(self) -> str | None:
        """The request's name. None: it was left to the server, which tells it in each event."""
        return self._source.request_id

    def __next__(self) -> T:
        while True:
            try:
                if self._call is None:
                    self._reopen()
                response = next(self._call)
            except StopIteration:
                if self._closed.is_set() or self._source.ended():
                    raise
                self._lose(None)
                continue
            except grpc.RpcError as error:
                if self._closed.is_set() or self._source.is_over:
                    raise StopIteration from None
                self._lose(error)
                continue
            event = self._take(response)
            if event is not None:
                return event

    def close(self) -> None:
        """Cancel what still runs; iteration then ends. Safe to call twice and from any thread.

        Returns when the server knows of it, or after a second.
        """
        self._drop(CANCEL_TIMEOUT_S)

    def detach(self) -> None:
        """Stop reading and let the request run, for its attach window, for `Client.attach`."""
        self._closed.set()
        if self._call is not None:
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
        self._drop(0.0)

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

    def _reopen(self) -> None:
        """StopIteration when the stream is closed meanwhile."""
        if self._closed.wait(min(self._delay, self._remaining(self._delay))):
            raise StopIteration
        self._open()

    def _open(self) -> None:
        call, request = self._source.next_call()
        method = self._client._stream_method(call, self._source.routing_key)
        timeout = None if self._deadline is None else self._remaining(0.0)
        self._call = method(request, timeout=timeout)
        # Closed by another thread just now, which saw no call.
        if self._closed.is_set():
            self._call.cancel()

    def _remaining(self, without_deadline: float) -> float:
        if self._deadline is None:
            return without_deadline
        return max(0.0, self._deadline - time.monotonic())

    def _drop(self, wait_s: float) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        if self._call is not None:
            self._call.cancel()
        request_id = self._source.request_id
        if request_id is not None and not self._source.is_over:
            self._client._ender.end(request_id, self._source.routing_key, wait_s)


# A request, its routing key, and what is set when it is cancelled.
_End: TypeAlias = tuple[str, str | None, threading.Event]


class _Ender:
    """Cancels requests that nobody reads any more, from a thread of its own.

    Who drops a stream may be the garbage collector, in the middle of gRPC's own code: it must not
    call gRPC.
    """

    def __init__(
        self, channel: Any, connection: Connection, streams: "Iterable[Stream[Any]]"
    ) -> None:
        """`streams`: those whose requests end with the program."""
        self._streams = streams
        self._cancel = channel.unary_unary(
            protocol.CANCEL.path,
            request_serializer=protocol.CANCEL.serialize,
            response_deserializer=protocol.CANCEL.response.FromString,
        )
        self._connection = connection
        # None: the last one.
        self._queue: queue.SimpleQueue[_End | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Before the first request that it may have to end."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def end(self, request_id: str, routing_key: str | None, wait_s: float) -> None:
        """Cancel a request, if it is there; wait so long for the answer."""
        done = threading.Event()
        self._queue.put((request_id, routing_key, done))
        if wait_s:
            done.wait(wait_s)

    def close(self) -> None:
        """End the requests of all streams, and wait a second for that."""
        for stream in list(self._streams):
            stream._drop(0.0)
        self.stop(CANCEL_TIMEOUT_S)

    def stop(self, wait_s: float) -> None:
        """When all before it are cancelled; wait so long for that."""
        self._queue.put(None)
        if wait_s and self._thread is not None:
            self._thread.join(wait_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            request_id, routing_key, done = item
            metadata = self._connection.metadata_for(routing_key)
            request = pb.CancelRequest(request_id=request_id)
            # Best effort: what is not heard of is ended by its attach window.
            with contextlib.suppress(grpc.RpcError, ValueError):
                self._cancel(request, timeout=CANCEL_TIMEOUT_S, metadata=metadata)
            done.set()
        atexit.unregister(self.close)


class Client:
    """A connection to one server, for use from any number of threads.

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
        """`tls`: True trusts whom gRPC trusts. `token` goes with every call; without TLS only to
        this machine, or anywhere with `insecure_token`.

        `reconnect`: requests go on when their connection is lost, for `reconnect_timeout` seconds
        without any. A server that never answered is reported at once.

        ValueError for a token or a file that cannot be used.
        """
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
            self._channel = grpc.insecure_channel(target, connection.options)
        else:
            self._channel = grpc.secure_channel(target, connection.credentials, connection.options)
        self._streams: weakref.WeakSet[Stream[Any]] = weakref.WeakSet()
        self._ender = _Ender(self._channel, connection, self._streams)

    def with_trace(self, traceparent: str, tracestate: str | None = None) -> "Client":
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
    ) -> Stream[Event]:
        """Start a request and return its events as they come.

        `routing_key`: among replicas, requests of one key go to one of them, which then has their
        beginnings in its cache; unset: one of `cache_salt`, else of the request's id.
        """
        request = protocol.generate_request(prompt, options)
        return Stream(self, self._source(request, routing_key), timeout)

    def attach(
        self,
        request_id: str,
        next_token_index: int = 0,
        other_next_token_indices: Sequence[int] = (),
        next_prompt_token_index: int = 0,
        *,
        timeout: float | None = None,
        routing_key: str | None = None,
    ) -> Stream[Event]:
        """Read a request on, from any connection: one that runs, or ended not long ago.

        The indices are those of the first tokens to come, of each choice and of prompt logprobs.
        `routing_key` is that of the request, if it was given one.
        NotFoundError, ExpiredError, OutOfRangeError or PermissionDeniedError where there is none.
        """
        request = attach_request(
            request_id, next_token_index, other_next_token_indices, next_prompt_token_index
        )
        return Stream(self, self._source(request, routing_key), timeout)

    def replay(
        self, request_id: str, *, timeout: float | None = None, routing_key: str | None = None
    ) -> Stream[RequestRecord | Event]:
        """Run an ended request again: first its record, then the events of the new run.

        NotFoundError, PermissionDeniedError; FailedPreconditionError while it runs, and
        SetupDiffersError when the server is not set up as it was then.
        """
        request = pb.ReplayRequest(request_id=request_id)
        source: Once[RequestRecord | Event] = Once(
            self._connection, protocol.REPLAY, request, routing_key
        )
        return Stream(self, source, timeout)

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        system: str | None = None,
        tools: Sequence[Tool] = (),
        timeout: float | None = None,
        routing_key: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream[Event]:
        """`generate` for a question, or for a conversation so far; `system` is put before it."""
        chat = Chat.of(messages, system=system, tools=tools)
        return self.generate(chat, timeout=timeout, routing_key=routing_key, **options)

    def complete(
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
            return self._call(protocol.COMPLETE, source.first, timeout, source.routing_key)
        except grpc.RpcError as error:
            delay = source.lost(error)
        except BaseException:
            if source.request_id is not None:
                self._ender.end(source.request_id, source.routing_key, CANCEL_TIMEOUT_S)
            raise
        gathering = Gathering()
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        with Stream(self, source, remaining, delay) as stream:
            for event in stream:
                gathering.take(event)
        return gathering.completion()

    def cancel(
        self, request_id: str, *, timeout: float | None = None, routing_key: str | None = None
    ) -> None:
        """Stop a request of any client by its id; its stream ends with reason CANCELLED.

        `routing_key` is that of the request, if it was given one.
        """
        request = pb.CancelRequest(request_id=request_id)
        key = protocol.key_of(request, routing_key)
        self._unary(protocol.CANCEL, request, timeout, key)

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

    def metrics(self, *, timeout: float | None = None) -> bytes:
        """All of the server's metrics in the text format of Prometheus."""
        return self._unary(protocol.METRICS, pb.GetMetricsRequest(), timeout)

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
        method = self._stream_method(protocol.HEALTH_WATCH)
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
        self._connection.life.is_closed = True
        self._ender.close()
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

    def __del__(self) -> None:
        # Not there when the constructor has raised.
        if ender := getattr(self, "_ender", None):
            ender.stop(0.0)

    def _source(
        self, request: pb.GenerateRequest | pb.AttachRequest, routing_key: str | None
    ) -> Once[Event] | Reading:
        if self._connection.reconnect:
            self._ender.start()
            return Reading(self._connection, request, routing_key=routing_key)
        sends = isinstance(request, pb.GenerateRequest)
        call = protocol.GENERATE if sends else protocol.ATTACH
        return Once(self._connection, call, request, routing_key)

    def _stream_method(self, call: Any, routing_key: str | None = None) -> Any:
        method = self._channel.unary_stream(
            call.path,
            request_serializer=call.serialize,
            response_deserializer=call.response.FromString,
        )
        return functools.partial(method, metadata=self._connection.metadata_for(routing_key))

    def _unary(
        self,
        call: protocol.Call[Q, R, T],
        request: Q,
        timeout: float | None,
        routing_key: str | None = None,
    ) -> T:
        try:
            return self._call(call, request, timeout, routing_key)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error

    def _call(
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
        response = method(request, timeout=timeout, metadata=metadata)
        self._connection.life.was_reached = True
        return call.read(response)
