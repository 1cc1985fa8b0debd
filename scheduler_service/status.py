"""The one table from our errors to gRPC statuses with google.rpc details, and a call's end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from .errors import InvalidArgumentError, QueueFullError, SlotwiseError

DOMAIN = "slotwise.v1"
# Statuses travel in headers, which peers commonly limit to 8 KiB in all.
MAX_MESSAGE_CHARS = 700

DETAILS_KEY = "grpc-status-details-bin"

Metadata = tuple[tuple[str, bytes], ...]


class CallContext(Protocol):
    """One RPC, as the server sees it. The handler is cancelled when the client goes away."""

    async def write(self, message: Any) -> None:
        """Sends one message of a stream; waits while the client is slow."""

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Metadata = (),
    ) -> NoReturn:
        """Ends the call with a status."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None: it set none."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """What the client sent before its message; names are in lower case."""


def to_status(error: SlotwiseError) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, message and trailing metadata for an error of a call."""
    code = grpc.StatusCode[error.status]
    message = shortened(str(error))
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in _details(error):
        status.details.add().Pack(detail)
    return code, message, ((DETAILS_KEY, status.SerializeToString()),)


def shortened(message: str) -> str:
    """Long values are cut in the middle: the limit and the advice stand at the end."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    half = MAX_MESSAGE_CHARS // 2
    return f"{message[:half]} ... {message[-half:]}"


def _details(error: SlotwiseError) -> list[Message]:
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=_reason(error), domain=DOMAIN),
    ]
    if isinstance(error, InvalidArgumentError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=shortened(error.description)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, QueueFullError):
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def _reason(error: SlotwiseError) -> str:
    """QueueFullError -> QUEUE_FULL."""
    name = type(error).__name__.removesuffix("Error")
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()
