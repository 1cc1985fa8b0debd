"""Errors of the worker, each with the gRPC status its stream ends with."""

from __future__ import annotations

_MAX_CHARS = 1500


class WorkerError(Exception):
    """Base of what a worker can report; `status` is the name of a gRPC status code."""

    status = "INTERNAL"


class SetupError(WorkerError):
    """The rank cannot be set up like this; the same again would fail the same way."""

    status = "FAILED_PRECONDITION"


class CheckpointError(SetupError):
    """The model folder is incomplete, damaged or not supported.

    Names and values in the message come from files that nobody has checked: it is cut in the middle
    to what a status can carry, and what UTF-8 cannot spell is escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_shown(message))


class MemoryPlanError(SetupError):
    """The asked slots and lengths do not fit the memory."""


class ProtocolError(WorkerError):
    """A command breaks the step protocol; nothing was touched."""

    status = "INVALID_ARGUMENT"


class StepError(WorkerError):
    """A step or collective failed on the way, by this rank's own fault."""


class PeerLostError(StepError):
    """A peer is gone or silent: the group is no more, but this rank can join another."""

    status = "ABORTED"


class SetupCancelledError(WorkerError):
    """The stream ended while the rank was being set up."""

    status = "CANCELLED"


def _shown(message: str) -> str:
    if len(message) > _MAX_CHARS:
        half = _MAX_CHARS // 2
        message = f"{message[:half]} ... {message[-half:]}"
    return message.encode(errors="backslashreplace").decode()
