"""How a client reaches its server: the address, TLS, a token, and what it does after a loss."""

import copy
import ipaddress
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
# Within what a server allows by default; a request that nobody reads for longer ends.
ATTACH_WINDOW_MS: Final = 30_000
# Of a call: requests of one key go to one replica, as long as it is there. The server ignores it.
ROUTING_KEY: Final = "slotwise-routing-key"
MAX_ROUTING_KEY_CHARS: Final = 256
# W3C Trace Context, as HTTP has it too.
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE: Final = re.compile(r"[\x20-\x7e]{1,2048}")
# For how long the end of a stream waits until the server knows of it.
CANCEL_TIMEOUT_S: Final = 1.0

# Pings find a dead peer behind a silent connection, also when only the other side sends; dialling
# again starts fast, so that waiting for a server that is just starting does not overshoot by a long
# back-off.
CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This is how long one attempt may take, handshakes included.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """PEM files. `ca`: who may sign the server's certificate; None: whom gRPC trusts.

    `cert` and `key`: what this client shows to a server that wants to see a certificate.
    `server_name`: the name in the server's certificate, where the address has another one.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """ValueError, with the file's name, for one that cannot be used."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("TLS: a certificate of the client needs its key, and a key its one")
        if self.ca is not None:
            _check(str(self.ca), lambda context: context.load_verify_locations(str(self.ca)))
        if self.cert is not None:
            pair = str(self.cert), str(self.key)
            both = " with ".join(pair)
            _check(both, lambda context: context.load_cert_chain(*pair, _no_password))
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))

    @property
    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """What gRPC needs besides the credentials."""
        if self.server_name is None:
            return ()
        return (("grpc.ssl_target_name_override", self.server_name),)


@dataclass(slots=True)
class _Life:
    """What all who share a channel see of it."""

    # It has answered once: what is lost now may come back.
    was_reached: bool = False
    is_closed: bool = False


class Connection:
    """What both clients know of their server."""

    def __init__(
        self,
        target: str,
        *,
        tls: TlsOptions | bool,
        token: str | None,
        insecure_token: bool,
        reconnect: bool,
        reconnect_timeout: float,
    ) -> None:
        """ValueError for a token that cannot be sent, or that everybody on the way could read."""
        self.target = target
        # Whether lost streams go on, and for how many seconds without news that is tried.
        self.reconnect = reconnect
        self.reconnect_timeout = reconnect_timeout
        self.life = _Life()
        options = TlsOptions() if tls is True else tls or None
        self._may_send_tokens = options is not None or insecure_token or _is_local(target)
        self._trace: tuple[tuple[str, str], ...] = ()
        self.metadata = self._metadata(token)
        self.credentials = options and options.credentials()
        self.options = (*CHANNEL_OPTIONS, *(options.channel_options if options else ()))

    def with_token(self, token: str | None) -> "Connection":
        """The same one for another caller. ValueError as above."""
        other = copy.copy(self)
        other.metadata = self._metadata(token) + self._trace
        return other

    def with_trace(self, traceparent: str, tracestate: str | None) -> "Connection":
        """The same one, for calls of a trace. ValueError for what is no W3C Trace Context."""
        other = copy.copy(self)
        other._trace = _trace(traceparent, tracestate)
        own = tuple(pair for pair in self.metadata if pair not in self._trace)
        other.metadata = own + other._trace
        return other

    def metadata_for(self, routing_key: str | None) -> tuple[tuple[str, str], ...]:
        """Of a call that goes where its key leads; None: anywhere."""
        if routing_key is None:
            return self.metadata
        return (*self.metadata, (ROUTING_KEY, routing_key))

    def _metadata(self, token: str | None) -> tuple[tuple[str, str], ...]:
        if token is not None and not self._may_send_tokens:
            raise ValueError(
                f"the token would go to {self.target} unencrypted; use TLS, or allow it "
                "(insecure_token=True) where the network is trusted"
            )
        return _metadata(token)


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    if token is None:
        return ()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        # The token itself is never shown.
        raise ValueError("the token is empty, or has characters besides printable ASCII")
    return (("authorization", f"Bearer {token}"),)


def _trace(traceparent: str, tracestate: str | None) -> tuple[tuple[str, str], ...]:
    if not _TRACEPARENT.fullmatch(traceparent):
        raise ValueError(f"traceparent is {traceparent[:80]!r}; 00-TRACE-SPAN-FLAGS in hex is one")
    if tracestate is None:
        return (("traceparent", traceparent),)
    if not _TRACESTATE.fullmatch(tracestate):
        raise ValueError("tracestate has characters besides printable ASCII, or is too long")
    return (("traceparent", traceparent), ("tracestate", tracestate))


def _is_local(target: str) -> bool:
    """The address stays on this machine. What is not understood does not."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    address = target.rpartition("/")[2]
    for prefix in ("dns:", "ipv4:", "ipv6:"):
        address = address.removeprefix(prefix)
    host = address.rpartition(":")[0].strip("[]") if ":" in address else address
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check(files: str, load: Callable[[ssl.SSLContext], object]) -> None:
    """gRPC itself would only say, at the first call, that there is no connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        load(context)
    except OSError as error:
        raise ValueError(f"TLS: {files} cannot be used: {error}") from error


def _no_password() -> str:
    """In place of a question on the terminal."""
    return ""


def _read(path: Path | str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
