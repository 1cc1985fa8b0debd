"""Errors as the OpenAI API tells them, and how those of gRPC become such."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from slotwise_client import (
    AlreadyExistsError,
    DeadlineError,
    FailedPreconditionError,
    InvalidArgumentError,
    MessageTooLargeError,
    PermissionDeniedError,
    QueueFullError,
    SlotwiseError,
    UnauthenticatedError,
    UnavailableError,
)

# When to try again, where the server gave no time.
RETRY_AFTER_S: Final = 1
# Not among http's: the client, or somebody on its behalf, ended the request.
CLIENT_CLOSED_REQUEST: Final = 499


class ApiError(Exception):
    """What a response says in place of an answer; `param` is the OpenAI name of a field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON of a response."""
        return json.dumps({"error": self._fields()}, ensure_ascii=False).encode()

    def event(self) -> bytes:
        """The last event of a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"

    def _fields(self) -> dict[str, Any]:
        return {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }


def invalid(param: str, reason: str, code: str | None = None) -> ApiError:
    """A field of the body that cannot be; `reason` goes on from its name."""
    message = f"{param}: {reason}"
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def unavailable(
    message: str, retry_after_s: float = RETRY_AFTER_S, *, headers: Mapping[str, str] | None = None
) -> ApiError:
    """Another try may go well."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        message,
        kind="service_unavailable",
        code="service_unavailable",
        headers={**_retry_after(retry_after_s), **(headers or {})},
    )


def server_error(message: str) -> ApiError:
    """A fault that is not the caller's."""
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR, message, kind="server_error", code="server_error"
    )


def model_not_found(model: str, known: str) -> ApiError:
    """Another model is served."""
    return ApiError(
        HTTPStatus.NOT_FOUND,
        f"model: {model[:200]!r} is not served here; {known!r} is",
        param="model",
        code="model_not_found",
    )


def cancelled() -> ApiError:
    """Somebody called Cancel."""
    return ApiError(
        CLIENT_CLOSED_REQUEST,
        "the request was cancelled by its id",
        kind="request_cancelled",
        code="request_cancelled",
    )


@dataclass(frozen=True, slots=True)
class Names:
    """What the fields of a GenerateRequest are called in the body that it was made of.

    `renamed`: the longest matching start of a gRPC name, such as "token_ids", by its OpenAI name.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)

    def of(self, path: str) -> str:
        """`chat.messages[0].content` as `messages.0.content`."""
        path = re.sub(r"\[(\w+)\]", r".\1", path)
        for pattern, replacement in _PARTS:
            path = pattern.sub(replacement, path)
        for start in sorted({**_NAMES, **self.renamed}, key=len, reverse=True):
            if path == start or path.startswith(start + "."):
                name = self.renamed.get(start, _NAMES.get(start, start))
                return (name + path[len(start) :]).strip(".")
        return path

    def in_text(self, text: str) -> str:
        """The server's sentence with the names of the body."""
        for name in _IN_SENTENCES:
            text = re.sub(rf"\b{name}\b", self.of(name), text)
        return text


_PARTS: Final = (
    (re.compile(r"(\.tool_calls\.\d+)\.(?=name|arguments)"), r"\1.function."),
    (re.compile(r"(\.tools\.\d+)\.(?=name|description|parameters)"), r"\1.function."),
    (re.compile(r"\b(arguments|parameters)_json"), r"\1"),
)
_NAMES: Final = {
    "chat.template_kwargs_json": "chat_template_kwargs",
    "chat": "",
    "choice.texts": "structured_outputs.choice",
    "grammar": "structured_outputs.grammar",
    "include_stop_in_output": "include_stop_str_in_output",
    "json_object": "response_format",
    "json_schema": "response_format.json_schema.schema",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "regex": "structured_outputs.regex",
    "request_id": "x-request-id",
    "sampling": "",
    "text": "prompt",
    "token_ids.ids": "prompt",
    "token_ids": "prompt",
}
_IN_SENTENCES: Final = ("max_new_tokens", "min_new_tokens", "chat.tools")


def from_grpc(error: SlotwiseError, names: Names) -> ApiError:
    """The HTTP error for a failed call."""
    match error:
        case InvalidArgumentError():
            return _from_violation(error, names)
        case QueueFullError():
            return ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                error.message,
                kind="rate_limit_error",
                code="queue_full",
                headers=_retry_after(error.retry_after or RETRY_AFTER_S),
            )
        case UnavailableError():
            return unavailable(error.message)
        case UnauthenticatedError():
            return ApiError(
                HTTPStatus.UNAUTHORIZED,
                f"{error.message}; over HTTP it is the header Authorization: Bearer TOKEN (the "
                "api_key of OpenAI's clients)",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        case PermissionDeniedError():
            return ApiError(HTTPStatus.FORBIDDEN, error.message, kind="permission_error")
        case AlreadyExistsError():
            return ApiError(
                HTTPStatus.CONFLICT,
                f"x-request-id: {error.message}",
                param="x-request-id",
                code="request_exists",
            )
        case MessageTooLargeError():
            return ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, error.message, code="request_too_large"
            )
        case DeadlineError():
            return ApiError(
                HTTPStatus.GATEWAY_TIMEOUT, error.message, kind="timeout_error", code="timeout"
            )
        case FailedPreconditionError():
            return ApiError(
                HTTPStatus.UNPROCESSABLE_ENTITY, error.message, code="constraint_failed"
            )
    return server_error(error.message)


def _from_violation(error: InvalidArgumentError, names: Names) -> ApiError:
    if not error.violations:
        return ApiError(HTTPStatus.BAD_REQUEST, names.in_text(error.message))
    first = error.violations[0]
    return invalid(names.of(first.field), names.in_text(first.description))


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
