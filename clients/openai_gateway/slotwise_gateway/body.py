"""Request bodies: read within bounds of size and time, and parsed as strict JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, Final, NoReturn

from starlette.types import Receive, Scope

from .config import Limits
from .errors import ApiError, unavailable

# A value takes some 60 bytes once parsed, and the parser, which lets nobody else run, 50 ns.
MAX_VALUES: Final = 1 << 20
MAX_DEPTH: Final = 128
# Above this a body is parsed beside the event loop.
SMALL_BYTES: Final = 1 << 16

_CLOSE: Final = {"Connection": "close"}
# One that does not end goes to the end: looking for it again from each quote would take for ever.
_STRINGS: Final = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


class ClientGoneError(Exception):
    """Nobody waits for a response."""


class Room:
    """Memory for the bodies of all requests together: one limit for each would bound nothing."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._num_free = num_bytes

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Takes so many bytes more, until the end of the request; ApiError without room."""
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            if num_bytes > self._num_free:
                raise unavailable(
                    "the bodies of all requests that run have more than "
                    f"{self._num_bytes >> 20} MiB (--max-bodies-mb); try again later",
                    headers=_CLOSE,
                )
            self._num_free -= num_bytes
            taken += num_bytes

        try:
            yield take
        finally:
            self._num_free += taken


async def read_json(
    scope: Scope, receive: Receive, limits: Limits, take: Callable[[int], None]
) -> dict[str, Any]:
    """The body as a JSON object; `take` is told of its bytes as they come.

    ApiError: what `take` raises, 408 when it is too slow, 413 when it is too large, 415 for another
    type, 400 for what is no JSON object. ClientGoneError.
    """
    _check_type(_header(scope, b"content-type"))
    _check_encoding(_header(scope, b"content-encoding"))
    body = await _read(scope, receive, limits, take)
    if len(body) > SMALL_BYTES:
        return await asyncio.to_thread(parse_object, body)
    return parse_object(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Strict JSON in UTF-8: no key twice, no NaN, no half of a surrogate pair. ApiError."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _refusal(f"byte {error.start} of the body is not UTF-8") from None
    if not text.strip():
        raise _refusal("the body is empty; a JSON object is needed")
    _check_size(text)
    value = _parse(text)
    if not isinstance(value, dict):
        raise _refusal(f"the body is {kind_of(value)}; a JSON object is needed")
    if _SURROGATE.search(text):
        _check_unicode(value)
    return value


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


async def _read(
    scope: Scope, receive: Receive, limits: Limits, take: Callable[[int], None]
) -> bytes:
    length = _header(scope, b"content-length")
    if length.isdigit() and int(length) > limits.max_body_bytes:
        raise _too_large(f"{int(length)} bytes", limits)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limits.max_body_bytes:
                    raise _too_large("more", limits)
                take(len(chunk))
                chunks.append(chunk)
                if not message.get("more_body"):
                    return b"".join(chunks)
    except TimeoutError:
        raise ApiError(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the body did not come within {limits.body_s:g} s; {size} bytes did",
            code="request_timeout",
            headers=_CLOSE,
        ) from None


def _too_large(what: str, limits: Limits) -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body has {what}; at most {limits.max_body_bytes} bytes are accepted (--max-body-mb)",
        code="request_too_large",
        headers=_CLOSE,
    )


def _check_type(value: str) -> None:
    kind, _, parameters = value.partition(";")
    kind = kind.strip().lower()
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if kind != "application/json" or (parameters.strip() and charset not in ("utf-8", "utf8")):
        raise _unsupported("content-type", value, "application/json in UTF-8 is needed")


def _check_encoding(value: str) -> None:
    if value.strip().lower() not in ("", "identity"):
        raise _unsupported("content-encoding", value, "send the body as it is")


def _unsupported(header: str, value: str, advice: str) -> ApiError:
    return ApiError(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        f"{header} is {value[:100]!r}; {advice}",
        param=header,
        code="unsupported_media_type",
    )


def _header(scope: Scope, name: bytes) -> str:
    """ "" when it is not there."""
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    return next((value.decode("latin-1") for key, value in headers if key == name), "")


def _check_size(text: str) -> None:
    """Before anything is made of it: values take many times the room of their text."""
    if _num_values(text) > MAX_VALUES:
        num_values = _num_values(_STRINGS.sub("", text))
        if num_values > MAX_VALUES:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has {num_values} values; at most {MAX_VALUES} are accepted",
                code="request_too_large",
            )


def _num_values(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


def _parse(text: str) -> Any:
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except json.JSONDecodeError as error:
        raise _refusal(
            f"the body is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise _refusal("the body is nested too deeply") from None
    except ValueError:
        # Python reads no number of more than some thousand digits.
        raise _refusal("the body has a number of too many digits") from None
    _check_depth(value, MAX_DEPTH)
    return value


def _check_depth(value: Any, room: int) -> None:
    if isinstance(value, (dict, list)):
        if room == 0:
            raise _refusal(f"the body is nested too deeply; {MAX_DEPTH} levels are accepted")
        items = value.values() if isinstance(value, dict) else value
        for item in items:
            if isinstance(item, (dict, list)):
                _check_depth(item, room - 1)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _refusal(f"the key {name[:200]!r} is there twice", param=name[:200])
            seen.add(name)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise _refusal(f"the body is no JSON: {name} is not a number there")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _refusal(f"the number {text[:60]} is too large")
    return value


def _check_unicode(value: Any) -> None:
    """An escaped half of a surrogate pair is no character."""
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise _refusal(
                    "the body has half of a surrogate pair (\\ud800 to \\udfff)"
                ) from None
        case dict():
            for key, item in value.items():
                _check_unicode(key)
                _check_unicode(item)
        case list():
            for item in value:
                _check_unicode(item)


def _refusal(message: str, param: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code="invalid_json")
