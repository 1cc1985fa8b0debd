"""Ports that nobody gets by chance."""

from __future__ import annotations

import contextlib
import random
import socket

# Below those that the kernel gives to whoever asks for any: while nobody listens there no other
# program can get it, and a client that dials it cannot meet itself.
_PORTS = range(20_000, 30_000)


def fixed_port(besides: int | None = None) -> int:
    """A port of 127.0.0.1 that is free now, and not this one."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        if port == besides:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("100 ports were tried, all are in use")
