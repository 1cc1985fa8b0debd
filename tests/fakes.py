"""The fakes of the suite: a worker without a model, and a gRPC server around it."""

from __future__ import annotations

from fake_server import FakeWorkerServer
from fake_worker import (
    CORRUPTED,
    FakeConstraint,
    FakeWorker,
    ProtocolViolation,
    Script,
    logprobs_alone,
    tokens_alone,
)

__all__ = [
    "CORRUPTED",
    "FakeConstraint",
    "FakeWorker",
    "FakeWorkerServer",
    "ProtocolViolation",
    "Script",
    "logprobs_alone",
    "tokens_alone",
]
