"""One request as its reader sees it: what came, and how to go on when the stream is lost."""

import math
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, Protocol, TypeVar

import grpc

from slotwise.v1 import inference_pb2 as pb

from . import _protocol as protocol
from ._connection import ATTACH_WINDOW_MS, Connection
from ._received import DifferenceError, Received
from .errors import (
    AlreadyExistsError,
    AnswerChangedError,
    DeadlineError,
    ExpiredError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    QueueFullError,
    SlotwiseError,
    SlowReaderError,
    UnavailableError,
    from_rpc_error,
    is_loss,
)
from .types import Event

FIRST_DELAY_S: Final = 0.1
MAX_DELAY_S: Final = 2.0

T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """What a stream reads: which call to make, and what its messages mean."""

    # It has ended, by its last message or by a status: nothing is left to cancel.
    is_over: bool

    @property
    def request_id(self) -> str | None:
        """What is to be cancelled when the reader leaves early; None: it ends with its call."""

    @property
    def routing_key(self) -> str | None:
        """Of all its calls: the request lives where it was sent. None: they go anywhere."""

    def next_call(self) -> tuple[Any, Any]:
        """A `protocol.Call`, and the request for it."""

    def take(self, response: Any) -> T_co | None:
        """What a message says to the reader; None: nothing new."""

    def lost(self, error: grpc.RpcError | None) -> float:
        """The stream ended, with an error or before its last message.

        Seconds to wait before `next_call`; raises the typed error when it is not to be made.
        """

    def ended(self) -> bool:
        """The call ended without an error; whether nothing is missing."""


class Once(Source[T_co]):
    """A call that is made once."""

    request_id = None

    def __init__(
        self, connection: Connection, call: Any, request: Any, routing_key: str | None = None
    ) -> None:
        self.is_over = False
        self._key = protocol.key_of(request, routing_key)
        self._connection = connection
        self._call = call
        self._request = request

    @property
    def routing_key(self) -> str | None:
        return self._key

    @property
    def first(self) -> Any:
        """The request."""
        return self._request

    def next_call(self) -> tuple[Any, Any]:
        return self._call, self._request

    def take(self, response: Any) -> T_co | None:
        self._connection.life.was_reached = True
        event: T_co | None = self._call.read(response)
        return event

    def lost(self, error: grpc.RpcError | None) -> float:
        self.is_over = True
        assert error is not None
        raise from_rpc_error(error, self._connection.target) from error

    def ended(self) -> bool:
        self.is_over = True
        return True


class _Way(Enum):
    """How to go on."""

    SEND = "send"
    ATTACH = "attach"
    # From the first token on, which are compared with those that came.
    ATTACH_TO_ALL = "attach to all"
    # In the place of the first sending: the server takes no attach window.
    SEND_PLAIN = "send plain"


class Reading(Source[Event]):
    """A request that survives its connection, its server, and the move to another server.

    The request has an id and a seed from the start: sent anew, it is the same one. What a new run
    repeats is compared with what came, and not told again.
    """

    def __init__(
        self,
        connection: Connection,
        request: pb.GenerateRequest | pb.AttachRequest,
        clock: Callable[[], float] = time.monotonic,
        routing_key: str | None = None,
    ) -> None:
        self.is_over = False
        self._connection = connection
        self._clock = clock
        self._accepted: pb.Accepted | None = None
        self._delay = FIRST_DELAY_S
        # Since when there is no stream, and for how long there was none since the last news.
        self._lost_at: float | None = None
        self._lost_s = 0.0
        # When the present stream began.
        self._began_at = clock()
        self._last_failure: SlotwiseError | None = None
        # When the server was last heard, or can last have known that somebody reads.
        self._heard_at = clock()
        self._silence_s = 0.0
        self._is_unread = False
        # The present stream has begun.
        self._is_heard = False
        self._num_sent = 0
        self._request: pb.GenerateRequest | None = None
        # By choice, as they come; how many there are of an attached request is told with Accepted.
        self._num_choices: int | None
        self._received: dict[int, Received] = {}
        if isinstance(request, pb.AttachRequest):
            self._id = request.request_id
            firsts = [request.next_token_index, *request.other_next_token_indices]
            self._num_choices = None
            self._received = {index: Received(first) for index, first in enumerate(firsts)}
            self._next_prompt = request.next_prompt_token_index
            self._way = _Way.ATTACH
        else:
            self._own_window = not request.HasField("attach_window_ms")
            self._request = _named(request)
            self._id = self._request.request_id
            self._num_choices = max(request.n, 1)
            self._next_prompt = 0
            self._way = _Way.SEND
        self._key = protocol.key_of(self._request or request, routing_key)

    @property
    def routing_key(self) -> str | None:
        return self._key

    @property
    def request_id(self) -> str | None:
        return self._id

    @property
    def first(self) -> pb.GenerateRequest:
        """The request, for a call other than `next_call` that is made first."""
        self._num_sent += 1
        return self._own

    @property
    def _own(self) -> pb.GenerateRequest:
        assert self._request is not None
        return self._request

    def next_call(self) -> tuple[Any, Any]:
        self._is_heard = False
        attaches = self._way is _Way.ATTACH
        for received in self._received.values():
            received.rewind(to_start=not attaches)
        if self._way is _Way.SEND:
            self._num_sent += 1
            return protocol.GENERATE, self._request
        self._silence_s = self._clock() - self._heard_at
        request = pb.AttachRequest(request_id=self._id)
        if attaches:
            request.next_token_index = self._choice(0).num_tokens
            others = range(1, max(self._received) + 1)
            indices = (self._choice(index).num_tokens for index in others)
            request.other_next_token_indices.extend(indices)
            request.next_prompt_token_index = self._next_prompt
        return protocol.ATTACH, request

    def take(self, response: pb.GenerateResponse) -> Event | None:
        """AnswerChangedError when a new run differs, InternalError for a gap."""
        self._connection.life.was_reached = True
        self._heard_at = self._clock()
        kind = response.WhichOneof("event")
        if kind == "delta":
            # Nearly always so, and written for that: once for each token of each stream.
            delta = response.delta
            if not self._take_delta(delta):
                return None
            self._lost_s, self._delay, self._last_failure = 0.0, FIRST_DELAY_S, None
            return protocol.delta(self._id, delta)
        if kind == "accepted":
            return self._take_accepted(response)
        is_new = False
        if kind == "finished":
            is_new = self._take_finished(response.finished)
        elif kind == "prompt_logprobs":
            is_new = self._take_prompt_logprobs(response.prompt_logprobs)
        if not is_new:
            return None
        self._lost_s, self._delay, self._last_failure = 0.0, FIRST_DELAY_S, None
        return protocol.event(response)

    def lost(self, error: grpc.RpcError | None) -> float:
        now = self._clock()
        if self._lost_at is not None:
            self._lost_s += now - self._lost_at
        else:
            # Time with a server counts back, also where it had no news yet.
            self._lost_s = max(0.0, self._lost_s - (now - self._began_at))
        self._lost_at = now
        failure = self._last_failure = self._failure(error)
        way = self._way_on(failure, is_loss(error))
        delay = max(self._delay, _retry_after(failure)) if way is not _Way.SEND_PLAIN else 0.0
        if way is None or self._lost_s + delay > self._connection.reconnect_timeout:
            self.is_over = True
            self._last_failure = None
            try:
                raise failure from error
            finally:
                # By its traceback it would hold itself, and all that was asked, until a collection.
                del failure
        if way is _Way.SEND_PLAIN:
            self._own.ClearField("attach_window_ms")
            self._num_sent -= 1
            way = _Way.SEND
        self._delay = min(2 * self._delay, MAX_DELAY_S)
        self._way = way
        return delay

    def ended(self) -> bool:
        # How many answers an attached request has is not known here.
        self.is_over = self.is_over or self._request is None
        return self.is_over

    def _failure(self, error: grpc.RpcError | None) -> SlotwiseError:
        if error is not None:
            failure = from_rpc_error(error, self._connection.target)
            if isinstance(failure, DeadlineError) and self._last_failure is not None:
                message = f"the timeout passed; before that: {self._last_failure.message}"
                return DeadlineError(message, failure.code)
            return failure
        message = f"the stream of request {self._id!r} ended before its answer did"
        return InternalError(message, grpc.StatusCode.INTERNAL)

    def _way_on(self, failure: SlotwiseError, is_lost: bool) -> _Way | None:
        """None: there is none."""
        attached = self._way is not _Way.SEND
        again = _Way.SEND if self._accepted is None and self._request else _Way.ATTACH
        if self._connection.life.is_closed:
            return None
        if self._is_unread:
            self._is_unread = False
            return _Way.SEND
        if isinstance(failure, SlowReaderError):
            # Nobody read since long before its last messages were taken here.
            self._heard_at = -math.inf
            return _Way.ATTACH
        if is_lost:
            return again if self._connection.life.was_reached else None
        if self._request is None:
            return _Way.ATTACH if isinstance(failure, UnavailableError) else None
        match failure:
            case UnavailableError():
                # After Accepted it is the request's own end: given up there, but not elsewhere.
                # Else the server starts or drains.
                return _Way.SEND if attached and self._is_heard else again
            case NotFoundError() | ExpiredError() if attached:
                return _Way.SEND
            case OutOfRangeError() if self._way is _Way.ATTACH:
                return _Way.ATTACH_TO_ALL
            case AlreadyExistsError() if self._num_sent > 1 and not attached:
                return _Way.ATTACH
            case QueueFullError() if self._accepted is not None:
                return self._way
            case InvalidArgumentError() if self._own_window and failure.field == "attach_window_ms":
                return _Way.SEND_PLAIN if self._own.HasField("attach_window_ms") else None
        if attached and failure.code is grpc.StatusCode.UNIMPLEMENTED:
            return _Way.SEND
        return None

    def _take_accepted(self, response: pb.GenerateResponse) -> Event | None:
        self._is_heard = True
        self._began_at = self._clock()
        if self._num_choices is None:
            self._num_choices = response.accepted.num_choices or None
        if self._lost_at is not None:
            self._lost_s += self._began_at - self._lost_at
            self._lost_at = None
        if self._request is not None and (self._accepted or self._num_sent > 1):
            self._check_seed(response.accepted)
        if self._accepted is not None:
            return None
        self._accepted = response.accepted
        if self._request is None:
            self._delay = FIRST_DELAY_S
        return protocol.event(response)

    def _check_seed(self, accepted: pb.Accepted) -> None:
        """An id of the caller's may be that of another request of theirs."""
        if accepted.seed != self._own.sampling.seed:
            self.is_over = True
            raise AlreadyExistsError(
                f"a request of id {self._id!r} that is not this one is known to the server",
                grpc.StatusCode.ALREADY_EXISTS,
            )

    def _take_delta(self, delta: pb.Delta) -> bool:
        try:
            return self._choice(delta.index).take(delta)
        except DifferenceError as error:
            raise AnswerChangedError(
                f"request {self._id!r} was computed anew, and answer {delta.index} is not the one "
                f"that had begun: {error}; the servers behind {self._connection.target} are not "
                "set up alike (see server_info().setup)",
                grpc.StatusCode.DATA_LOSS,
            ) from error

    def _take_prompt_logprobs(self, part: pb.PromptLogprobs) -> bool:
        num_known = max(0, self._next_prompt - part.first_token_index)
        del part.logprobs[:num_known]
        part.first_token_index += num_known
        self._next_prompt = max(self._next_prompt, part.first_token_index + len(part.logprobs))
        return bool(part.logprobs)

    def _take_finished(self, finished: pb.Finished) -> bool:
        if self._was_unread(finished):
            self._is_unread = True
            return False
        is_new = self._choice(finished.index).finish()
        num_finished = sum(received.is_finished for received in self._received.values())
        self.is_over = num_finished == self._num_choices
        return is_new

    def _was_unread(self, finished: pb.Finished) -> bool:
        """Its end is that nobody read it for as long as its attach window: to be sent anew."""
        if self._request is None or self._way is _Way.SEND:
            return False
        is_cancelled = finished.finish_reason == pb.FINISH_REASON_CANCELLED
        return is_cancelled and self._silence_s * 1e3 >= self._request.attach_window_ms

    def _choice(self, index: int) -> Received:
        received = self._received.get(index)
        if received is None:
            received = self._received[index] = Received()
        return received


def attach_request(
    request_id: str,
    next_token_index: int,
    other_next_token_indices: Sequence[int],
    next_prompt_token_index: int,
) -> pb.AttachRequest:
    """InvalidArgumentError for a value that its field cannot hold."""
    request = pb.AttachRequest()
    protocol.set_field(request, "request_id", request_id)
    protocol.set_field(request, "next_token_index", next_token_index)
    protocol.set_field(request, "other_next_token_indices", other_next_token_indices)
    protocol.set_field(request, "next_prompt_token_index", next_prompt_token_index)
    return request


def _named(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """With what makes it the same request when it is sent anew."""
    named = pb.GenerateRequest()
    named.CopyFrom(request)
    if not named.HasField("request_id"):
        named.request_id = str(uuid.uuid4())
    if not named.sampling.HasField("seed"):
        named.sampling.seed = secrets.randbits(64)
    if not named.HasField("attach_window_ms"):
        named.attach_window_ms = ATTACH_WINDOW_MS
    return named


def _retry_after(failure: SlotwiseError) -> float:
    return (failure.retry_after or 0.0) if isinstance(failure, QueueFullError) else 0.0
