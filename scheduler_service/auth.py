"""Who calls: bearer tokens from a file, and which calls they are good for."""

from __future__ import annotations

import hashlib
import hmac
import json
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from .config import ConfigError
from .errors import PermissionDeniedError, SlotwiseError, UnauthenticatedError
from .request import ClientLimits
from .secret_files import Reloaded, read_file
from .status import CallContext, to_status

MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 4096
MAX_NAME_CHARS = 64
MAX_LIMIT = 1 << 20
_KEYS = frozenset({"name", "token", "token_sha256", "max_running", "max_waiting", "operator"})

# Probes have no token, and learn nothing but whether the server serves.
_OPEN = "/grpc.health.v1.Health/"
_INFERENCE = "/slotwise.v1.Inference/"
# They show or change what is every client's.
OPERATOR_CALLS = frozenset({"ListSlots", "FlushCache"})

Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call. Without a token file everybody is the same, and an operator."""

    # "" where callers are not told apart.
    name: str = ""
    is_operator: bool = True
    limits: ClientLimits = field(default_factory=ClientLimits)

    def check_owner(self, client: str, *, or_operator: bool = False) -> None:
        """PermissionDeniedError unless a request of this client is the caller's own."""
        if client != self.name and not (or_operator and self.is_operator):
            raise PermissionDeniedError(
                "the request is another caller's; use the token that it was sent with"
            )


@dataclass(frozen=True, slots=True)
class Token:
    """A token by its SHA-256; the text is kept nowhere."""

    digest: bytes
    caller: Caller


class Callers:
    """Tells the caller of a call from its metadata."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the token file; None: nobody is asked for a token. ConfigError."""
        self._tokens = None if path is None else Reloaded([path], lambda: read_tokens(path))

    @property
    def wants_tokens(self) -> bool:
        return self._tokens is not None

    def of(self, context: CallContext) -> Caller:
        """The caller of a call in progress. UnauthenticatedError."""
        return self.find(context.invocation_metadata())

    def find(self, metadata: Metadata) -> Caller:
        """UnauthenticatedError without a token that is in the file as it is now."""
        if self._tokens is None:
            return Caller()
        sent = _bearer(metadata)
        digest = hashlib.sha256(sent).digest()
        found = None
        # All of them, whatever was found: the time tells nothing of the place.
        for token in self._tokens.get():
            if hmac.compare_digest(token.digest, digest):
                found = token.caller
        if not sent or found is None:
            raise UnauthenticatedError(
                "the call needs a good token: send authorization: Bearer TOKEN in its metadata"
            )
        return found


def _bearer(metadata: Metadata) -> bytes:
    """The token that was sent; empty when there is not exactly one."""
    values = [value for key, value in metadata if key == "authorization"]
    if len(values) != 1:
        return b""
    value = values[0].encode() if isinstance(values[0], str) else values[0]
    scheme, _, token = value.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" and len(token) <= MAX_TOKEN_CHARS else b""


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # untyped package
    """Ends a call that its caller may not make before its first message is read."""

    def __init__(self, callers: Callers, *, operator_calls: bool = True) -> None:
        """operator_calls False: nobody may make them."""
        self._callers = callers
        self._operator_calls = operator_calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if method.startswith(_OPEN):
            return await continuation(handler_call_details)
        try:
            caller = self._callers.find(handler_call_details.invocation_metadata)
            if method.removeprefix(_INFERENCE) in OPERATOR_CALLS:
                if not self._operator_calls:
                    return _refusal(
                        grpc.StatusCode.UNIMPLEMENTED, "this server serves no calls of operators"
                    )
                _check_operator(caller, method)
        except SlotwiseError as error:
            return _refusal(*to_status(error))
        return await continuation(handler_call_details)


def _check_operator(caller: Caller, method: str) -> None:
    if not caller.is_operator:
        raise PermissionDeniedError(
            f"{method.removeprefix(_INFERENCE)} is for operators, and the token of "
            f"{caller.name!r} is not one's"
        )


def _refusal(*status: Any) -> grpc.RpcMethodHandler:
    """Answers any kind of call with this status, without a look at its messages."""

    async def refuse(_: object, context: CallContext) -> None:
        await context.abort(*status)

    return grpc.stream_stream_rpc_method_handler(refuse)


def read_tokens(path: Path) -> tuple[Token, ...]:
    """ConfigError, which shows no token, when the file is not as it must be."""
    content = read_file(path, is_secret=True)
    try:
        is_toml = path.suffix == ".toml"
        found = tomllib.loads(content.decode()) if is_toml else json.loads(content)
    except (ValueError, RecursionError):
        # The error's own words may hold a piece of the file.
        form = "TOML" if path.suffix == ".toml" else "JSON"
        raise ConfigError(f"{path} is not valid {form} in UTF-8") from None
    entries = found.get("tokens") if isinstance(found, dict) else found
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} holds no list of tokens; one entry at least is needed")
    tokens = tuple(_token(f"{path}: entry {i}", entry) for i, entry in enumerate(entries, 1))
    if len({token.caller.name for token in tokens}) < len(tokens):
        raise ConfigError(f"{path}: two entries have the same name")
    if len({token.digest for token in tokens}) < len(tokens):
        raise ConfigError(f"{path}: two entries have the same token")
    return tokens


def _token(where: str, entry: object) -> Token:
    if not isinstance(entry, dict) or not entry.keys() <= _KEYS:
        raise ConfigError(f"{where} is not an object with keys among {', '.join(sorted(_KEYS))}")
    name, operator = entry.get("name"), entry.get("operator", False)
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS or not _is_plain(name):
        raise ConfigError(f"{where}: name must be 1 to {MAX_NAME_CHARS} printable ASCII characters")
    if not isinstance(operator, bool):
        raise ConfigError(f"{where}: operator must be true or false")
    limits = ClientLimits(_limit(where, entry, "max_running"), _limit(where, entry, "max_waiting"))
    return Token(_digest(where, entry), Caller(name, operator, limits))


def _digest(where: str, entry: dict[str, Any]) -> bytes:
    token, digest = entry.get("token"), entry.get("token_sha256")
    if (token is None) == (digest is None):
        raise ConfigError(f"{where} needs either token or token_sha256")
    if digest is not None:
        if not isinstance(digest, str) or len(digest) != 64 or not _is_hex(digest):
            raise ConfigError(f"{where}: token_sha256 must be 64 hexadecimal digits")
        return bytes.fromhex(digest)
    if (
        not isinstance(token, str)
        or not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS
        or not _is_plain(token)
        or " " in token
    ):
        raise ConfigError(
            f"{where}: token must be {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} printable ASCII "
            "characters without spaces; openssl rand -hex 32 makes a good one"
        )
    return hashlib.sha256(token.encode()).digest()


def _limit(where: str, entry: dict[str, Any], key: str) -> int:
    """0, no limit, where none is given."""
    value = entry.get(key)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LIMIT:
        raise ConfigError(f"{where}: {key} must be an integer from 1 to {MAX_LIMIT}, or left out")
    return value


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _is_hex(text: str) -> bool:
    return set(text) <= set("0123456789abcdefABCDEF")
