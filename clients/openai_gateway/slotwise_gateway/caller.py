"""Who calls: the bearer token and the request's id, as they stand in the headers."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from starlette.types import Scope

from .errors import ApiError

_TOKEN: Final = re.compile(rb"[\x21-\x7e]{1,4096}")
# As the server takes them; fewer characters than it would, so that several prompts can be numbered.
# W3C Trace Context; of version 00, or as that begins.
_TRACEPARENT: Final = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_TRACESTATE: Final = re.compile(rb"[\x20-\x7e]{1,2048}")
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e][\x20-\x7e]{0,119}")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The trace that a request belongs to, as the headers and the server's metadata have it."""

    traceparent: str
    tracestate: str | None = None


def caller_token(scope: Scope) -> str | None:
    """The bearer token; None without one. ApiError for what is none."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if not values:
        return None
    scheme, _, token = values[0].partition(b" ")
    token = token.strip()
    if len(values) > 1 or scheme.lower() != b"bearer" or (token and not _TOKEN.fullmatch(token)):
        raise ApiError(
            HTTPStatus.UNAUTHORIZED,
            "the Authorization header is not one Bearer TOKEN of printable ASCII",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return token.decode() or None


def request_id(scope: Scope) -> str:
    """The caller's x-request-id if it is a good one, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            value = value.strip()
            return value.decode() if _REQUEST_ID.fullmatch(value) else new_request_id()
    return new_request_id()


def trace_context(scope: Scope) -> TraceContext | None:
    """None without one; one that is malformed counts as none."""
    found = {
        name: value.strip()
        for name, value in scope["headers"]
        if name in (b"traceparent", b"tracestate")
    }
    match = _TRACEPARENT.fullmatch(found.get(b"traceparent", b""))
    if match is None or not all(map(_is_id, match.groups())):
        return None
    state = found.get(b"tracestate", b"")
    return TraceContext(match[0].decode(), state.decode() if _TRACESTATE.fullmatch(state) else None)


def _is_id(text: bytes) -> bool:
    return text.strip(b"0") != b""


def new_request_id() -> str:
    """For a request that brings none."""
    return uuid.uuid4().hex
