"""From response messages to plain values."""

import re
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message as ProtoMessage

from slotwise.v1 import inference_pb2 as pb

from .types import (
    Accepted,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Timings,
    Usage,
)

T = TypeVar("T")
K = TypeVar("K", bound=StrEnum)


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
            delta = response.delta
            return Delta(
                request_id=response.request_id,
                index=delta.index,
                first_token_index=delta.first_token_index,
                token_ids=tuple(delta.token_ids),
                text=delta.text,
            )
        case "finished":
            return finished(response.request_id, response.finished)
        case _:
            return None


def completion(response: pb.CompleteResponse) -> Completion:
    """The answer of Complete."""
    return Completion(
        request_id=response.request_id,
        text=response.text,
        token_ids=tuple(response.token_ids),
        accepted=accepted(response.request_id, response.accepted),
        finished=finished(response.request_id, response.finished),
    )


def accepted(request_id: str, message: pb.Accepted) -> Accepted:
    """The first event of a stream."""
    return Accepted(request_id, message.prompt_tokens, message.seed, message.queue_position)


def finished(request_id: str, message: pb.Finished) -> Finished:
    """The last event of a stream."""
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
    """Field `name` of `message` as `hint`: a scalar, `X | None`, tuple, enum or dataclass."""
    if NoneType in get_args(hint):
        if not message.HasField(name):
            return None
        (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
    value = getattr(message, name)
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
