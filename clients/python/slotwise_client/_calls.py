"""The calls of the service, described once for both clients: path, message types, reader."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import grpc
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2

from slotwise.v1 import inference_pb2 as pb

from . import _responses as responses
from .info import Health, Load, ModelInfo, ServerInfo, Slot
from .types import Completion, Event, RenderedChat

SERVICE: Final = "slotwise.v1.Inference"
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024

# Pings find a dead peer behind a silent connection; reconnecting starts fast, so that waiting for a
# server that is just starting does not overshoot by a long back-off.
CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

Q = TypeVar("Q", bound=ProtoMessage)
R = TypeVar("R", bound=ProtoMessage)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[Q, R, T]):
    """One method: its path, the type of its responses, and what a response means."""

    path: str
    response: type[R]
    read: Callable[[R], T]

    def serialize(self, request: Q) -> bytes:
        """The request on the wire."""
        return request.SerializeToString()


def _inference(name: str) -> str:
    return f"/{SERVICE}/{name}"


def _health(response: health_pb2.HealthCheckResponse) -> Health:
    serving = response.status == health_pb2.HealthCheckResponse.SERVING
    unknown = response.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    if serving:
        return Health.SERVING
    return Health.UNKNOWN_SERVICE if unknown else Health.NOT_SERVING


def _nothing(response: pb.CancelResponse) -> None:
    return None


GENERATE: Call[pb.GenerateRequest, pb.GenerateResponse, Event | None] = Call(
    _inference("Generate"), pb.GenerateResponse, responses.event
)
COMPLETE: Call[pb.GenerateRequest, pb.CompleteResponse, Completion] = Call(
    _inference("Complete"), pb.CompleteResponse, responses.completion
)
CANCEL: Call[pb.CancelRequest, pb.CancelResponse, None] = Call(
    _inference("Cancel"), pb.CancelResponse, _nothing
)
TOKENIZE: Call[pb.TokenizeRequest, pb.TokenizeResponse, list[int]] = Call(
    _inference("Tokenize"), pb.TokenizeResponse, lambda response: list(response.token_ids)
)
DETOKENIZE: Call[pb.DetokenizeRequest, pb.DetokenizeResponse, str] = Call(
    _inference("Detokenize"), pb.DetokenizeResponse, lambda response: response.text
)
RENDER_CHAT: Call[pb.RenderChatRequest, pb.RenderChatResponse, RenderedChat] = Call(
    _inference("RenderChat"),
    pb.RenderChatResponse,
    lambda response: RenderedChat(response.text, tuple(response.token_ids)),
)
MODEL_INFO: Call[pb.GetModelInfoRequest, pb.GetModelInfoResponse, ModelInfo] = Call(
    _inference("GetModelInfo"),
    pb.GetModelInfoResponse,
    lambda response: responses.mirror(ModelInfo, response),
)
SERVER_INFO: Call[pb.GetServerInfoRequest, pb.GetServerInfoResponse, ServerInfo] = Call(
    _inference("GetServerInfo"),
    pb.GetServerInfoResponse,
    lambda response: responses.mirror(ServerInfo, response),
)
LOAD: Call[pb.GetLoadRequest, pb.GetLoadResponse, Load] = Call(
    _inference("GetLoad"), pb.GetLoadResponse, lambda response: responses.mirror(Load, response)
)
SLOTS: Call[pb.ListSlotsRequest, pb.ListSlotsResponse, list[Slot]] = Call(
    _inference("ListSlots"),
    pb.ListSlotsResponse,
    lambda response: [responses.mirror(Slot, slot) for slot in response.slots],
)
HEALTH_CHECK: Call[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, Health] = Call(
    "/grpc.health.v1.Health/Check", health_pb2.HealthCheckResponse, _health
)
HEALTH_WATCH: Call[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, Health] = Call(
    "/grpc.health.v1.Health/Watch", health_pb2.HealthCheckResponse, _health
)


def is_transient(error: grpc.RpcError) -> bool:
    """Whether a health watch that ended this way should be opened again."""
    return error.code() is grpc.StatusCode.UNAVAILABLE
