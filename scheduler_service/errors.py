"""Errors of the scheduler, each with the gRPC status that the public API answers.

Messages are for people: what was wrong, the value, the limit, what to do.
"""

from __future__ import annotations


class SlotwiseError(Exception):
    """Base of the errors a caller of the API can get."""

    status = "INTERNAL"


class InvalidArgumentError(SlotwiseError):
    """A request asks for something that cannot be; `field` is its path in the message."""

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class DuplicateRequestError(SlotwiseError):
    """A request of the same id waits or runs."""

    status = "ALREADY_EXISTS"


class UnknownRequestError(SlotwiseError):
    """No request of this id waits or runs."""

    status = "NOT_FOUND"


class QueueFullError(SlotwiseError):
    """The queue is at its bound; `retry_after_s` is a guess at when it is worth another try."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(SlotwiseError):
    """The server drains, starts, or has no working workers."""

    status = "UNAVAILABLE"


class DeadlineError(SlotwiseError):
    """The request's deadline passed."""

    status = "DEADLINE_EXCEEDED"


class ConstraintError(SlotwiseError):
    """No token can continue the output as its constraint wants it."""

    status = "FAILED_PRECONDITION"


class CorruptedError(SlotwiseError):
    """The model gave NaN logits for this request."""

    status = "INTERNAL"


class UnauthenticatedError(SlotwiseError):
    """The call brings no token, or none that is known."""

    status = "UNAUTHENTICATED"


class PermissionDeniedError(SlotwiseError):
    """The caller may not do this: the request is another caller's, or the call an operator's."""

    status = "PERMISSION_DENIED"


class ExpiredRequestError(SlotwiseError):
    """The request ended too long ago; its tokens are forgotten."""

    status = "FAILED_PRECONDITION"


class NotEndedError(SlotwiseError):
    """The request still waits or runs."""

    status = "FAILED_PRECONDITION"


class SetupDiffersError(SlotwiseError):
    """The server is set up in another way than when the request ran: its bits may differ."""

    status = "FAILED_PRECONDITION"


class OutOfRangeError(SlotwiseError):
    """An index beyond the request's tokens."""

    status = "OUT_OF_RANGE"


class SlowReaderError(SlotwiseError):
    """The client does not read what is sent to it."""

    status = "ABORTED"


class SupersededError(SlotwiseError):
    """Another connection reads the request now."""

    status = "ABORTED"


class GroupError(Exception):
    """The group cannot go on as it is; a new one, under a new epoch, may."""


class WorkerLostError(GroupError):
    """A rank is gone, silent, or cannot be reached; or its stream ended though it can go on, with
    its weights, in a new group."""

    def __init__(self, rank: int, reason: str, can_go_on: bool = False) -> None:
        super().__init__(f"worker {rank}: {reason}")
        self.rank = rank
        self.can_go_on = can_go_on


class DigestMismatchError(GroupError):
    """Two ranks ran a step differently: their state no longer agrees."""


class SetupError(GroupError):
    """The set-up cannot work, and will not when tried again unchanged."""
