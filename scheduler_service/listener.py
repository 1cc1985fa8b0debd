"""The gRPC server of the process: services, limits and the port."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from .auth import Gate
from .config import MAX_MESSAGE_BYTES, ConfigError, join_address
from .health import READINESS, HealthService
from .readable import Readable

MAX_METADATA_BYTES = 16 << 10
# Calls of one connection at once; the client's further ones wait on its side.
MAX_CALLS_PER_CONNECTION = 1024
MAX_CONNECTIONS = 4096
# For TLS and the first frame of HTTP/2.
HANDSHAKE_TIMEOUT_S = 20

OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Below the first, the second would refuse some calls and not others.
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_TIMEOUT_S),
    # A second server on the same port is an error, not a partner.
    ("grpc.so_reuseport", 0),
    # A client that vanished, or stands still, is noticed within 40 s, and its slots are freed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without it an unanswered ping is waited for a minute, whatever the keepalive says.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Clients may ping every 10 s, also when no call is open.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
]


def make_server(
    health: HealthService, gate: Gate | None = None, *, with_reflection: bool = True
) -> grpc.aio.Server:
    """A server with health and reflection; the API's servicer is added by the caller."""
    interceptors = [gate, Readable()] if gate else [Readable()]
    options = [*OPTIONS, ("grpc.max_allowed_incoming_connections", _max_connections())]
    server = grpc.aio.server(options=options, interceptors=interceptors)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if with_reflection:
        _add_reflection(server)
    return server


def _max_connections() -> int:
    """Half of the files that the process may open at most: the rest is for the workers, the journal
    and the model."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = max_files == resource.RLIM_INFINITY
    return MAX_CONNECTIONS if unlimited else min(MAX_CONNECTIONS, max_files // 2)


def _add_reflection(server: grpc.aio.Server) -> None:
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection([READINESS, health_name, reflection.SERVICE_NAME], server)


async def bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None = None,
) -> str:
    """Opens the port and gives host:port as clients can dial it. ConfigError says why not.

    credentials None: without TLS.
    """
    await _check_port(host, port)
    address = join_address(host, port)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    return join_address(host, bound)


async def _check_port(host: str, port: int) -> None:
    """Tries the port with a plain socket, whose errors say what is wrong; gRPC's do not."""
    address = join_address(host, port)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason += "; choose another --port (0 is any free one)"
        raise ConfigError(f"cannot listen on {address}: {reason}") from error
