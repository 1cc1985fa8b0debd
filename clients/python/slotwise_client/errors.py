"""Errors of the client: one class per way a call can fail, made from gRPC statuses."""

from dataclasses import dataclass
from typing import Final

import grpc
from google.rpc import error_details_pb2, status_pb2


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of the request that was refused, and why."""

    field: str
    description: str


class SlotwiseError(Exception):
    """A call failed. `message` is the server's sentence, `code` the gRPC status code."""

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class InvalidArgumentError(SlotwiseError):
    """The request was refused; `violations` names the fields. Do not retry it unchanged."""

    def __init__(self, message: str, violations: tuple[FieldViolation, ...] = ()) -> None:
        super().__init__(message, grpc.StatusCode.INVALID_ARGUMENT)
        self.violations = violations

    @property
    def field(self) -> str | None:
        """The first refused field, when the server named one."""
        return self.violations[0].field if self.violations else None


class QueueFullError(SlotwiseError):
    """The queue is full; try again after `retry_after` seconds, when the server gave a time."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message, grpc.StatusCode.RESOURCE_EXHAUSTED)
        self.retry_after = retry_after


class MessageTooLargeError(SlotwiseError):
    """A message was larger than the transport allows (64 MiB)."""


class UnavailableError(SlotwiseError):
    """No server there, or it drains, or its workers are down. Another server may answer."""


class DeadlineError(SlotwiseError):
    """The timeout of the call passed; the server has stopped working on it."""


class CancelledError(SlotwiseError):
    """The call was cancelled on its way."""


class FailedPreconditionError(SlotwiseError):
    """No token could continue the output under its constraint; another seed may do better.

    Of replay: the request still runs.
    """


class ExpiredError(FailedPreconditionError):
    """The request ended too long ago; its tokens are forgotten."""


class SetupDiffersError(FailedPreconditionError):
    """A request cannot be replayed: the server is not set up as it was then."""


class NotFoundError(SlotwiseError):
    """No request of that id waits or runs, or is kept."""


class OutOfRangeError(SlotwiseError):
    """The request has not as many tokens."""


class SupersededError(SlotwiseError):
    """Another connection reads the request now."""


class SlowReaderError(SlotwiseError):
    """The events were not read for so long that the server stopped sending them."""


class UnauthenticatedError(SlotwiseError):
    """The call brought no token, or none that the server knows."""


class PermissionDeniedError(SlotwiseError):
    """The token is not good for this: the request is another caller's, the call an operator's."""


class AlreadyExistsError(SlotwiseError):
    """Another request of that id waits or runs."""


class InternalError(SlotwiseError):
    """The server failed."""


class AnswerChangedError(SlotwiseError):
    """An answer that was computed anew is not the one that had begun.

    The servers behind the name are not set up alike (`ServerInfo.setup`).
    """


_DETAILS_KEY: Final = "grpc-status-details-bin"

BY_CODE: dict[grpc.StatusCode, type[SlotwiseError]] = {
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRangeError,
    grpc.StatusCode.ABORTED: SupersededError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.INTERNAL: InternalError,
}

# Of google.rpc.ErrorInfo, where the code alone does not tell.
BY_REASON: dict[str, type[SlotwiseError]] = {
    "EXPIRED_REQUEST": ExpiredError,
    "SETUP_DIFFERS": SetupDiffersError,
    "SLOW_READER": SlowReaderError,
}


# What gRPC says, by codes that a server has too, of a connection that broke.
_LOST_WORDS: Final = ("RST_STREAM", "Stream removed", "Socket closed", "GOAWAY", "http2", "EOF")


def is_loss(error: grpc.RpcError | None) -> bool:
    """The stream broke off (None: it ended early) without a word of the server, or on the way."""
    if error is None:
        return True
    code: grpc.StatusCode = error.code()
    if any(key == _DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
        return False
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return True
    message: str = error.details() or ""
    unclear = code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    return unclear and any(words in message for words in _LOST_WORDS)


def from_rpc_error(error: grpc.RpcError, target: str) -> SlotwiseError:
    """The typed error for a failed call to `target`; accepts the errors of grpc and of grpc.aio."""
    code: grpc.StatusCode = error.code()
    message: str = error.details() or code.name
    details = _details(error)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgumentError(message, _violations(details))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # gRPC itself uses this code for messages over the size limit; it never sends details.
        if not details and "larger than max" in message:
            return MessageTooLargeError(message, code)
        return QueueFullError(message, _retry_after(details))
    if code is grpc.StatusCode.UNAVAILABLE and not details:
        message = f"no answer from {target}: {message}"
    kind = BY_REASON.get(_reason(details)) or BY_CODE.get(code, SlotwiseError)
    return kind(message, code)


def _details(error: grpc.RpcError) -> list[object]:
    """The google.rpc details in the trailing metadata, as far as this client knows them."""
    known = (error_details_pb2.BadRequest, error_details_pb2.RetryInfo, error_details_pb2.ErrorInfo)
    found: list[object] = []
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY:
            continue
        for packed in status_pb2.Status.FromString(value).details:
            for kind in known:
                detail = kind()
                if packed.Unpack(detail):
                    found.append(detail)
    return found


def _violations(details: list[object]) -> tuple[FieldViolation, ...]:
    return tuple(
        FieldViolation(violation.field, violation.description)
        for detail in details
        if isinstance(detail, error_details_pb2.BadRequest)
        for violation in detail.field_violations
    )


def _reason(details: list[object]) -> str:
    infos = (detail for detail in details if isinstance(detail, error_details_pb2.ErrorInfo))
    return next((info.reason for info in infos), "")


def _retry_after(details: list[object]) -> float | None:
    for detail in details:
        if isinstance(detail, error_details_pb2.RetryInfo):
            seconds: float = detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9
            return seconds
    return None
