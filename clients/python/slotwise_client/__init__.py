"""Client library of Slotwise: `Client` for threads, `AsyncClient` for asyncio.

from slotwise_client import Client, Delta

with Client("127.0.0.1:50051") as client:
    for event in client.chat("What is the capital of France?", max_new_tokens=32):
        if isinstance(event, Delta):
            print(event.text, end="", flush=True)
"""

from .aio import AsyncClient, AsyncStream
from .client import Client, Stream
from .errors import (
    AlreadyExistsError,
    CancelledError,
    DeadlineError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    MessageTooLargeError,
    NotFoundError,
    QueueFullError,
    SlotwiseError,
    UnavailableError,
)
from .info import (
    Counters,
    Health,
    Load,
    ModelInfo,
    Sampling,
    SelfTest,
    ServerInfo,
    Slot,
    SlotState,
    Worker,
)
from .types import (
    Accepted,
    Chat,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateOptions,
    Message,
    Prompt,
    RenderedChat,
    Timings,
    Usage,
)

__all__ = [
    "Accepted",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncStream",
    "CancelledError",
    "Chat",
    "Client",
    "Completion",
    "Counters",
    "DeadlineError",
    "Delta",
    "Event",
    "FieldViolation",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Health",
    "InternalError",
    "InvalidArgumentError",
    "Load",
    "Message",
    "MessageTooLargeError",
    "ModelInfo",
    "NotFoundError",
    "Prompt",
    "QueueFullError",
    "RenderedChat",
    "Sampling",
    "SelfTest",
    "ServerInfo",
    "Slot",
    "SlotState",
    "SlotwiseError",
    "Stream",
    "Timings",
    "UnavailableError",
    "Usage",
    "Worker",
]
