from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from scheduler_service import errors
from scheduler_service.status import DETAILS_KEY, to_status

CODE = grpc.StatusCode


def details(error):
    """The error's details by their type."""
    _, message, ((key, data),) = to_status(error)
    assert key == DETAILS_KEY
    status = status_pb2.Status.FromString(data)
    assert status.message == message
    found = {}
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.TypeName().rsplit(".", 1)[1])
        found[kind.__name__] = kind.FromString(packed.value)
    return found


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (errors.InvalidArgumentError("a.b", "is 3"), CODE.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (errors.DuplicateRequestError("x"), CODE.ALREADY_EXISTS, "DUPLICATE_REQUEST"),
        (errors.UnknownRequestError("x"), CODE.NOT_FOUND, "UNKNOWN_REQUEST"),
        (errors.QueueFullError("x", 1.5), CODE.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
        (errors.UnavailableError("x"), CODE.UNAVAILABLE, "UNAVAILABLE"),
        (errors.DeadlineError("x"), CODE.DEADLINE_EXCEEDED, "DEADLINE"),
        (errors.CorruptedError("x"), CODE.INTERNAL, "CORRUPTED"),
    ],
)
def test_each_error_has_its_status(error, code, reason):
    assert to_status(error)[0] is code
    info = details(error)["ErrorInfo"]
    assert (info.reason, info.domain) == (reason, "slotwise.v1")


def test_bad_input_names_the_field():
    error = errors.InvalidArgumentError("sampling.top_p", "2 is out of range")
    (violation,) = details(error)["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("sampling.top_p", "2 is out of range")


def test_a_full_queue_says_when_to_come_back():
    delay = details(errors.QueueFullError("full", 1.5))["RetryInfo"].retry_delay
    assert (delay.seconds, delay.nanos) == (1, 500_000_000)


def test_long_messages_keep_their_ends():
    error = errors.InvalidArgumentError("field", "x" * 100_000 + " at most 3 fit")
    _, message, ((_, data),) = to_status(error)
    assert message.startswith("field: xx")
    assert message.endswith("at most 3 fit")
    assert len(message) + len(data) < 4000
