"""HAProxy in front of replicas: HTTP/2 all the way, and health by grpc.health.v1."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from free_ports import fixed_port

from chaos.service import poll

# One request of Check for the readiness name, as bytes of HTTP/2: preface, SETTINGS, HEADERS, DATA.
# HAProxy 2.6 can only send them as they are.
_SERVICE = b"slotwise.v1.Inference"
_HEADERS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/grpc.health.v1.Health/Check"),
    (b":authority", b"health"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)
# The answer's message, length before: {status: SERVING}.
_SERVING = bytes((0, 0, 0, 0, 2, 0x08, 1))
_CONFIG = """
global
  maxconn 2000
defaults
  mode http
  timeout connect 2s
  timeout client 1h
  timeout server 1h
  timeout check 2s
  retries 3
  option redispatch
frontend clients
  bind 127.0.0.1:{port} proto h2
  default_backend replicas
backend replicas
  balance roundrobin
  option tcp-check
  tcp-check connect
  tcp-check send-binary {check}
  tcp-check expect binary {serving}
  default-server proto h2 check inter 200ms fall 1 rise 1 on-marked-down shutdown-sessions
{servers}
"""


def health_check() -> bytes:
    """What a gRPC client would send; literal headers, so that no table is needed."""
    block = b"".join(
        bytes((0, len(name))) + name + bytes((len(value),)) + value for name, value in _HEADERS
    )
    message = bytes((0x0A, len(_SERVICE))) + _SERVICE
    body = b"\0" + len(message).to_bytes(4, "big") + message
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    return preface + _frame(4, 0, 0, b"") + _frame(1, 4, 1, block) + _frame(0, 1, 1, body)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


def is_there() -> bool:
    return shutil.which("haproxy") is not None


@contextlib.contextmanager
def balancer(ports: Sequence[int], folder: Path) -> Iterator[tuple[str, int]]:
    """Where clients dial; requests go to the replicas that are SERVING, in turn."""
    port = fixed_port()
    servers = "\n".join(f"  server replica{i} 127.0.0.1:{one}" for i, one in enumerate(ports))
    config = folder / "haproxy.cfg"
    config.write_text(
        _CONFIG.format(
            port=port, check=health_check().hex(), serving=_SERVING.hex(), servers=servers
        )
    )
    with (folder / "haproxy.log").open("w") as log:
        process = subprocess.Popen(
            ["haproxy", "-db", "-f", str(config)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        poll(lambda: _listens(port) or process.poll() is not None, 60, "haproxy listens")
        assert process.poll() is None, (folder / "haproxy.log").read_text()
        yield "127.0.0.1", port
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
