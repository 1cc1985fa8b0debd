"""What the gateway is told, once, at its start."""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from slotwise_client import TlsOptions

# A token on the command line could be read by every user of the machine.
TOKEN_VARIABLE: Final = "SLOTWISE_TOKEN"
_TOKEN: Final = re.compile(r"[\x21-\x7e]{1,4096}")
# gRPC would take a port of its own, and wait there for ever.
_SERVER: Final = re.compile(r"unix(-abstract)?:.+|.+:[0-9]{1,5}", re.DOTALL)
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("text", "json")


class ConfigError(Exception):
    """A setting that cannot be, or that does not work here."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may take."""

    max_body_bytes: int = 64 << 20
    # Of all requests that run, together.
    max_bodies_bytes: int = 256 << 20
    # Seconds for a request's headers; for its body, and for each write of a response.
    headers_s: float = 10.0
    body_s: float = 30.0
    # Seconds that a connection may stay open between requests.
    idle_s: float = 75.0
    max_connections: int = 1024


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that the process is told. ConfigError when a value makes no sense."""

    # The gRPC server as host:port.
    server: str = "127.0.0.1:50051"
    host: str = "127.0.0.1"
    # 0: any free port.
    port: int = 8000
    # It is a load balancer before replicas: what one of them says of itself is not said of all.
    balanced: bool = False
    # How the server is reached; None: without TLS.
    tls: TlsOptions | None = None
    # For calls that bring none.
    token: str | None = field(default=None, repr=False)
    # Tokens may go to the server unencrypted.
    insecure_tokens: bool = False
    # Of the HTTP port.
    https_cert: Path | None = None
    https_key: Path | None = None
    limits: Limits = Limits()
    # How long running requests may go on after SIGTERM.
    grace_s: float = 30.0
    # Seconds of silence until a stream gets a comment line.
    keep_alive_s: float = 15.0
    # More names of the model.
    model_aliases: tuple[str, ...] = ()
    status_page: bool = True
    # Of an OpenTelemetry collector, over gRPC; "": nothing is traced.
    otlp_endpoint: str = ""
    # Share of requests that are traced, of those whose callers do not decide it.
    trace_sample_ratio: float = 1.0
    log_level: str = "info"
    log_format: str = "text"
    # Readiness as JSON lines on standard output.
    events: bool = False

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError(
                "host is empty; 127.0.0.1 is this machine only, 0.0.0.0 every network"
            )
        if not self.server:
            raise ConfigError("server is empty; give the gRPC server as host:port")
        if not _SERVER.fullmatch(self.server):
            raise ConfigError(f"server is {self.server!r}; its port is missing: host:port")
        _check_range("port", self.port, 0, 65535)
        max_body_mb = self.limits.max_body_bytes >> 20
        _check_range("max_body_mb", max_body_mb, 1, 1024)
        _check_range("max_bodies_mb", self.limits.max_bodies_bytes >> 20, max_body_mb, 1 << 20)
        _check_range("max_connections", self.limits.max_connections, 1, 1 << 20)
        _check_seconds("body_timeout", self.limits.body_s, 0.001)
        _check_seconds("headers_timeout", self.limits.headers_s, 0.001)
        _check_seconds("keep_alive", self.keep_alive_s, 0.001)
        _check_seconds("grace", self.grace_s, 0.0)
        _check_tracing(self.otlp_endpoint, self.trace_sample_ratio)
        if (self.https_cert is None) != (self.https_key is None):
            raise ConfigError("--https-cert and --https-key go together; give both or none")
        if self.token is not None and not self.may_send_tokens:
            raise ConfigError(
                f"there is a token, and the way to {self.server} is not encrypted; give --tls-ca, "
                "or --insecure-tokens where the network is trusted"
            )
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise ConfigError("the token has characters besides printable ASCII, or is too long")
        if "" in self.model_aliases:
            raise ConfigError("--model-alias is empty; give the name that clients ask for")

    @property
    def may_send_tokens(self) -> bool:
        """Nobody on the way to the server can read a caller's token."""
        return self.tls is not None or self.insecure_tokens or is_local(self.server)


def is_local(server: str) -> bool:
    """What is sent there never leaves the machine."""
    if server.startswith(("unix:", "unix-abstract:")):
        return True
    address = server.rpartition("/")[2]
    for prefix in ("dns:", "ipv4:", "ipv6:"):
        address = address.removeprefix(prefix)
    return is_loopback(address.rpartition(":")[0] if ":" in address else address)


def is_loopback(host: str) -> bool:
    """Whether what is sent to this host never leaves the machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def parse_arguments(
    arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ
) -> Config:
    """ConfigError on words that are not understood and on values that cannot be."""
    given = _parser().parse_args(arguments)
    return Config(
        server=given.server,
        balanced=given.balanced,
        host=given.host,
        port=given.port,
        tls=_tls(given),
        token=given.token or environment.get(TOKEN_VARIABLE) or None,
        insecure_tokens=given.insecure_tokens,
        https_cert=given.https_cert,
        https_key=given.https_key,
        limits=Limits(
            max_body_bytes=given.max_body_mb << 20,
            max_bodies_bytes=given.max_bodies_mb << 20,
            headers_s=given.headers_timeout,
            body_s=given.body_timeout,
            max_connections=given.max_connections,
        ),
        grace_s=given.grace,
        keep_alive_s=given.keep_alive,
        model_aliases=tuple(given.model_alias),
        status_page=not given.no_status_page,
        otlp_endpoint=given.otlp_endpoint,
        trace_sample_ratio=given.trace_sample_ratio,
        log_level=given.log_level,
        log_format=given.log_format,
        events=given.events,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slotwise_gateway", description="The OpenAI API over HTTP, for a Slotwise server."
    )
    add = parser.add_argument
    add("--server", default="127.0.0.1:50051", help="gRPC server as host:port")
    add("--balanced", action="store_true", help="the server is a load balancer before replicas")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port, 0 takes a free one")
    add("--tls", action="store_true", help="the server speaks TLS; any --tls-... says so too")
    add("--tls-ca", type=Path, help="who signs the server's certificate, in PEM")
    add("--tls-cert", type=Path, help="the gateway's certificate for the server, in PEM")
    add("--tls-key", type=Path, help="its key, in PEM")
    add("--tls-server-name", help="the name in the server's certificate, if another")
    add("--https-cert", type=Path, help="certificate chain of the HTTP port, in PEM")
    add("--https-key", type=Path, help="its key, in PEM")
    add("--token", help=f"token for callers who bring none; better in {TOKEN_VARIABLE}")
    add("--insecure-tokens", action="store_true", help="tokens may go to the server without TLS")
    add("--max-body-mb", type=int, default=64, help="largest request body in MiB")
    add("--max-bodies-mb", type=int, default=256, help="bodies of all running requests in MiB")
    add("--body-timeout", type=float, default=30.0, help="seconds for a request's body")
    add("--headers-timeout", type=float, default=10.0, help="seconds for a request's headers")
    add("--max-connections", type=int, default=1024, help="connections at once")
    add("--keep-alive", type=float, default=15.0, help="seconds until a silent stream says so")
    add("--grace", type=float, default=30.0, help="seconds for running requests after SIGTERM")
    add("--model-alias", action="append", default=[], help="another name of the model")
    add("--no-status-page", action="store_true", help="do not serve /status")
    endpoint = "OpenTelemetry collector of traces, over gRPC: http://host:port; default: none"
    add("--otlp-endpoint", default="", help=endpoint)
    ratio = "share of requests that are traced, where the caller does not say"
    add("--trace-sample-ratio", type=float, default=1.0, help=ratio)
    add("--log-level", choices=LOG_LEVELS, default="info")
    add("--log-format", choices=LOG_FORMATS, default="text")
    add("--events", action="store_true", help="readiness as JSON lines on standard output")
    return parser


def _tls(given: argparse.Namespace) -> TlsOptions | None:
    options = TlsOptions(given.tls_ca, given.tls_cert, given.tls_key, given.tls_server_name)
    return options if given.tls or options != TlsOptions() else None


def _check_tracing(endpoint: str, ratio: float) -> None:
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-endpoint is {endpoint!r}; http://host:port or https://host:port is accepted"
        )
    if not 0 <= ratio <= 1:
        raise ConfigError(f"--trace-sample-ratio is {ratio}; 0 to 1 is accepted")


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} is {value}; {least} to {most} is possible")


def _check_seconds(name: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and least <= value <= 1e6):
        raise ConfigError(f"{name} is {value:g}; {least:g} to 1000000 seconds are possible")
