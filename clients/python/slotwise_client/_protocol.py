"""The protocol, described once for both clients: requests, responses, calls."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from types import NoneType
from typing import Any, Final, Generic, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2

from slotwise.v1 import inference_pb2 as pb

from ._connection import MAX_ROUTING_KEY_CHARS
from .errors import FieldViolation, InvalidArgumentError
from .info import Health, Load, ModelInfo, ServerInfo, Setup, Slot
from .types import (
    Accepted,
    Chat,
    Choice,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateOptions,
    Message,
    Prompt,
    PromptLogprobs,
    RecordedAnswer,
    RenderedChat,
    RequestRecord,
    Timings,
    TokenLogprob,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)

SERVICE: Final = "slotwise.v1.Inference"
SAMPLING: Final = frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name)
CONSTRAINTS: Final = ("json_schema", "json_object", "regex", "grammar", "choice")

Q = TypeVar("Q", bound=ProtoMessage)
R = TypeVar("R", bound=ProtoMessage)
T = TypeVar("T")
K = TypeVar("K", bound=StrEnum)


# Requests


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The request for one prompt.

    Raises TypeError for an unknown option, InvalidArgumentError for a value that its field cannot
    hold and for two constraints; everything else is the server's to judge.
    """
    unknown = sorted(options.keys() - GenerateOptions.__annotations__.keys())
    if unknown:
        known = ", ".join(GenerateOptions.__annotations__)
        raise TypeError(f"unknown option {unknown[0]!r}; known are {known}")
    request = pb.GenerateRequest()
    _set_prompt(request, prompt)
    for name, value in options.items():
        if name in CONSTRAINTS:
            _set_constraint(request, name, value)
        elif name in SAMPLING:
            set_field(request.sampling, name, value, "sampling.")
        else:
            set_field(request, name, value)
    return request


def chat_message(chat: Chat) -> pb.Chat:
    """A chat as the protocol has it; TypeError for what should be JSON and is not."""
    message = pb.Chat(omit_generation_prompt=chat.omit_generation_prompt)
    if chat.template_kwargs is not None:
        message.template_kwargs_json = json.dumps(dict(chat.template_kwargs))
    for turn in chat.messages:
        _set_turn(message.messages.add(), turn)
    for tool in chat.tools:
        added = message.tools.add()
        set_field(added, "name", tool.name, "chat.tools.")
        if tool.description is not None:
            set_field(added, "description", tool.description, "chat.tools.")
        if tool.parameters is not None:
            added.parameters_json = json.dumps(dict(tool.parameters))
    return message


def _set_turn(message: pb.ChatMessage, turn: Message) -> None:
    for name in ("role", "content", "tool_call_id", "name", "reasoning_content"):
        value = getattr(turn, name)
        if value is not None:
            set_field(message, name, value, "chat.messages.")
    for call in turn.tool_calls:
        added = message.tool_calls.add()
        for name in ("id", "name", "arguments_json"):
            set_field(added, name, getattr(call, name), "chat.messages.tool_calls.")


def _set_constraint(request: pb.GenerateRequest, name: str, value: Any) -> None:
    """A second one would take the place of the first without a word."""
    if name == "json_object" and value is False:
        return
    before = request.WhichOneof("constraint")
    if before is not None:
        reason = f"{before} is set already; a request has at most one constraint"
        raise InvalidArgumentError(f"{name}: {reason}", (FieldViolation(name, reason),))
    if name == "json_object":
        request.json_object.SetInParent()
    elif name == "choice":
        request.choice.SetInParent()
        set_field(request.choice, "texts", value, "choice.")
    else:
        set_field(request, name, json.dumps(dict(value)) if isinstance(value, Mapping) else value)


def key_of(
    request: pb.GenerateRequest | pb.AttachRequest | pb.CancelRequest | pb.ReplayRequest,
    given: str | None,
) -> str | None:
    """By which a load balancer chooses the replica: the given key, else one of the salt or the id.

    What follows a request by its id has the key that the request had by default. None: the request
    has no name yet. InvalidArgumentError for a key that cannot be sent.
    """
    if given is None:
        if isinstance(request, pb.GenerateRequest) and request.cache_salt:
            # A salt may be a secret, and balancers write logs.
            return hashlib.sha256(request.cache_salt.encode()).hexdigest()[:32]
        given = request.request_id
        if not _is_key(given):
            return None
    if not _is_key(given):
        reason = f"1 to {MAX_ROUTING_KEY_CHARS} printable ASCII characters without spaces around"
        raise InvalidArgumentError(
            f"routing_key: {_brief(given)} is not possible; {reason}",
            (FieldViolation("routing_key", reason),),
        )
    return given


def _is_key(text: str) -> bool:
    printable = text.isascii() and text.isprintable() and text == text.strip()
    return printable and 1 <= len(text) <= MAX_ROUTING_KEY_CHARS


def detokenize_request(token_ids: Sequence[int], keep_control_tokens: bool) -> pb.DetokenizeRequest:
    """The request for the text of some ids."""
    request = pb.DetokenizeRequest(keep_control_tokens=keep_control_tokens)
    set_field(request, "token_ids", token_ids)
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        set_field(request, "text", prompt)
    elif isinstance(prompt, Chat):
        request.chat.CopyFrom(chat_message(prompt))
    else:
        # Choosing the member also when there are no ids lets the server name the empty field.
        request.token_ids.SetInParent()
        set_field(request.token_ids, "ids", prompt, "token_ids.")


def set_field(message: Any, name: str, value: Any, prefix: str = "") -> None:
    """InvalidArgumentError, by the name of the field, for what it cannot hold."""
    try:
        if hasattr(getattr(message, name), "extend"):
            _refuse_text(name, value)
            getattr(message, name).extend(value)
        elif hasattr(getattr(message, name), "update"):
            _refuse_other_than_mapping(name, value)
            getattr(message, name).update(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError) as error:
        field = prefix + name
        reason = f"{field}: {_brief(value)} is not possible ({error})"
        raise InvalidArgumentError(reason, (FieldViolation(field, str(error)),)) from error


def _refuse_text(name: str, value: Any) -> None:
    # A string is a sequence of strings: stop="END" would become three stops.
    if isinstance(value, (str, bytes, Mapping)):
        raise TypeError(f"{name} takes a sequence, not {type(value).__name__}")


def _refuse_other_than_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} takes a mapping, not {type(value).__name__}")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Responses


def mirror(cls: type[T], message: ProtoMessage) -> T:
    """The dataclass `cls` filled from the fields of `message` that have the same names."""
    hints = get_type_hints(cls)
    assert is_dataclass(cls)
    values = {field.name: _value(message, field.name, hints[field.name]) for field in fields(cls)}
    return cls(**values)


def event(response: pb.GenerateResponse) -> Event | None:
    """One message of a Generate stream; None for a kind of event that this client does not know."""
    match response.WhichOneof("event"):
        case "accepted":
            return accepted(response.request_id, response.accepted)
        case "delta":
            return delta(response.request_id, response.delta)
        case "prompt_logprobs":
            part = response.prompt_logprobs
            rows = all_logprobs(part.logprobs)
            return PromptLogprobs(response.request_id, part.first_token_index, rows)
        case "finished":
            return finished(response.request_id, response.finished)
        case _:
            return None


def completion(response: pb.CompleteResponse) -> Completion:
    """The answers of Complete."""
    return Completion(
        request_id=response.request_id,
        accepted=accepted(response.request_id, response.accepted),
        choices=tuple(choice(response.request_id, one) for one in response.choices),
        prompt_logprobs=all_logprobs(response.prompt_logprobs),
    )


def choice(request_id: str, message: pb.CompleteChoice) -> Choice:
    """One of the answers of Complete."""
    return Choice(
        index=message.index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        reasoning_text=message.reasoning_text,
        tool_calls=tuple(mirror(ToolCall, call) for call in message.tool_calls),
        logprobs=all_logprobs(message.logprobs),
        finished=finished(request_id, message.finished),
    )


def replayed(response: pb.ReplayResponse) -> RequestRecord | Event | None:
    """One message of a Replay stream; None as of `event`."""
    if response.WhichOneof("event") == "record":
        return record(response.record)
    return event(response.response)


def record(message: pb.RequestRecord) -> RequestRecord:
    """What was kept of a request."""
    return RequestRecord(
        request_id=message.request_id,
        request=MessageToDict(message.request, preserving_proto_field_name=True),
        prompt_token_ids=tuple(message.prompt_token_ids),
        seed=message.seed,
        setup=mirror(Setup, message.setup),
        answers=tuple(
            RecordedAnswer(tuple(one.token_ids), _enum(one, "finish_reason", FinishReason))
            for one in message.answers
        ),
        accepted_unix_ns=message.accepted_unix_ns,
    )


def delta(request_id: str, message: pb.Delta) -> Delta:
    """New tokens of a stream."""
    logprobs, tool_calls = message.logprobs, message.tool_calls
    return Delta(
        request_id,
        message.index,
        message.first_token_index,
        tuple(message.token_ids),
        message.text,
        all_logprobs(logprobs) if logprobs else (),
        message.reasoning_text,
        tuple(mirror(ToolCallDelta, part) for part in tool_calls) if tool_calls else (),
    )


def all_logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Written out, not mirrored: long prompts with many alternatives have millions."""
    return tuple(
        TokenLogprobs(_logprob(one.token), tuple(_logprob(other) for other in one.best))
        for one in messages
    )


def _logprob(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.rank, message.text)


def accepted(request_id: str, message: pb.Accepted) -> Accepted:
    """The first event of a stream."""
    return Accepted(
        request_id,
        message.prompt_tokens,
        message.seed,
        message.queue_position,
        message.is_journaled,
        message.num_choices,
    )


def finished(request_id: str, message: pb.Finished) -> Finished:
    """The last event of a choice."""
    matched = message.WhichOneof("matched_stop")
    return Finished(
        request_id=request_id,
        index=message.index,
        finish_reason=_enum(message, "finish_reason", FinishReason),
        matched_stop=None if matched is None else getattr(message, matched),
        usage=mirror(Usage, message.usage),
        timings=mirror(Timings, message.timings),
    )


def _value(message: Any, name: str, hint: Any) -> Any:
    """A field as `hint`: a scalar, `X | None`, a tuple, mapping, enum or dataclass."""
    if NoneType in get_args(hint):
        if not message.HasField(name):
            return None
        (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
    value = getattr(message, name)
    if get_origin(hint) is Mapping:
        return dict(value)
    if get_origin(hint) is tuple:
        kind: Any = get_args(hint)[0]
        return tuple(_mirror_if_dataclass(kind, item) for item in value)
    if issubclass(hint, StrEnum):
        return _enum(message, name, hint)
    return _mirror_if_dataclass(hint, value)


def _mirror_if_dataclass(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return mirror(kind, value)
    return value


def _enum(message: ProtoMessage, name: str, kind: type[K]) -> K:
    """SLOT_STATE_FREE as `kind("free")`; a number this client does not know is "unspecified"."""
    enum_type = message.DESCRIPTOR.fields_by_name[name].enum_type
    assert enum_type is not None
    known = enum_type.values_by_number.get(getattr(message, name))
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum_type.name).upper() + "_"
    text = known.name.removeprefix(prefix).lower() if known else ""
    return kind(text) if text in set(kind) else kind("unspecified")


# Calls


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
    _inference("Generate"), pb.GenerateResponse, event
)
COMPLETE: Call[pb.GenerateRequest, pb.CompleteResponse, Completion] = Call(
    _inference("Complete"), pb.CompleteResponse, completion
)
ATTACH: Call[pb.AttachRequest, pb.GenerateResponse, Event | None] = Call(
    _inference("Attach"), pb.GenerateResponse, event
)
REPLAY: Call[pb.ReplayRequest, pb.ReplayResponse, RequestRecord | Event | None] = Call(
    _inference("Replay"), pb.ReplayResponse, replayed
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
    lambda response: mirror(ModelInfo, response),
)
SERVER_INFO: Call[pb.GetServerInfoRequest, pb.GetServerInfoResponse, ServerInfo] = Call(
    _inference("GetServerInfo"),
    pb.GetServerInfoResponse,
    lambda response: mirror(ServerInfo, response),
)
LOAD: Call[pb.GetLoadRequest, pb.GetLoadResponse, Load] = Call(
    _inference("GetLoad"), pb.GetLoadResponse, lambda response: mirror(Load, response)
)
METRICS: Call[pb.GetMetricsRequest, pb.GetMetricsResponse, bytes] = Call(
    _inference("GetMetrics"), pb.GetMetricsResponse, lambda response: response.text
)
SLOTS: Call[pb.ListSlotsRequest, pb.ListSlotsResponse, list[Slot]] = Call(
    _inference("ListSlots"),
    pb.ListSlotsResponse,
    lambda response: [mirror(Slot, slot) for slot in response.slots],
)
FLUSH_CACHE: Call[pb.FlushCacheRequest, pb.FlushCacheResponse, int] = Call(
    _inference("FlushCache"), pb.FlushCacheResponse, lambda response: response.num_tokens
)
HEALTH_CHECK: Call[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, Health] = Call(
    "/grpc.health.v1.Health/Check", health_pb2.HealthCheckResponse, _health
)
HEALTH_WATCH: Call[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, Health] = Call(
    "/grpc.health.v1.Health/Watch", health_pb2.HealthCheckResponse, _health
)
