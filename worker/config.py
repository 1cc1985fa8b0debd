"""Configuration of a worker process, built once in `__main__`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

MAX_MESSAGE_BYTES = 64 << 20
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    # A scheduler whose machine vanished closes nothing; its stream ends within 40 s, and another
    # scheduler is let in. Without the last, an unanswered ping is waited for a minute.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)
# How long a rank waits for its peers: to come, and to load. One that dies is noticed at once.
GROUP_TIMEOUT_S = 300.0
# How long a step may still run after its stream has ended: up to the next sum between the ranks.
RELEASE_TIMEOUT_S = 5.0
# For the scheduler to end its stream after SIGTERM: more than it gives its requests by itself.
GRACE_S = 40.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Of a port that speaks TLS, in PEM. With `client_ca`, schedulers must bring a certificate."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What does not come with Configure: where to listen, what to serve, on which threads."""

    listen: str
    model_dir: Path
    num_threads: int
    device: str = "auto"
    # The process that this one ends with; 0: whichever started it. None: it outlives that one.
    parent_pid: int | None = None
    grace_s: float = GRACE_S
    # None: plain TCP. A Unix socket has none.
    tls: TlsFiles | None = None
    log_format: str = "text"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise ValueError(
                f"--device {self.device!r} is not supported; supported: auto, cpu, cuda, cuda:N"
            )
        if self.num_threads < 1:
            raise ValueError(f"--threads must be at least 1, not {self.num_threads}")
        if not self.grace_s >= 0:
            raise ValueError(f"--grace must be at least 0, not {self.grace_s:g}")
        check_listen(self.listen)
        if self.tls and self.listen.startswith("unix:"):
            raise ValueError(f"--tls-cert is given and --listen is {self.listen}; it needs no TLS")

    @property
    def is_exposed(self) -> bool:
        """Whoever reaches the port over a network may take this worker over."""
        if self.listen.startswith("unix:") or (self.tls and self.tls.client_ca):
            return False
        host = self.listen.rpartition(":")[0].strip("[]")
        try:
            return not ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host != "localhost"


def check_listen(address: str) -> None:
    """Raises ValueError unless `address` is "unix:/path" or "host:port"."""
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        if not path.parent.is_dir():
            raise ValueError(f"--listen {address}: the folder {path.parent} does not exist")
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--listen {address!r} is neither unix:/path nor host:port")
