"""Hosts of our own: network namespaces, each on a wire to one bridge, whose wires can be pulled."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_NAMED = Path("/run/netns")


@dataclass(frozen=True)
class Host:
    """A namespace with an address that only our other hosts reach."""

    name: str
    address: str
    _bridge: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """A command line behind it runs there, in its own process."""
        return ("ip", "netns", "exec", self.name)

    def pull(self) -> None:
        """Its wire is cut: nothing arrives, nothing is refused."""
        self._set_wire("down")

    def plug(self) -> None:
        self._set_wire("up")

    def socket(self) -> socket.socket:
        """A TCP socket, not blocking, of this host. A socket stays where it was made."""
        made: list[socket.socket] = []

        def make() -> None:
            with (_NAMED / self.name).open() as there:
                if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
            link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            link.setblocking(False)
            made.append(link)

        # The namespace is the thread's: it ends with it.
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return made[0]

    def _set_wire(self, state: str) -> None:
        # The bridge's end, so that the host itself sees a silence and not a network that is gone.
        _run("ip", "-n", self._bridge, "link", "set", f"{self.name}-b", state)


def why_not() -> str | None:
    """Why there can be no namespaces here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with hosts(1):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", "") or str(error)
        return f"no network namespaces: {words.strip()}"


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """That many hosts on one switch, which is a namespace too: this machine has no part in it."""
    mark = f"sw{os.getpid() % 100_000}"
    bridge = f"{mark}x"
    names = [f"{mark}{place}" for place in range(count)]
    with contextlib.ExitStack() as at_end:
        for name in (bridge, *names):
            _run("ip", "netns", "add", name)
            at_end.callback(_run, "ip", "netns", "del", name)
        _run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "bridge", "up")
        yield [_wire(bridge, name, place) for place, name in enumerate(names)]


def _wire(bridge: str, name: str, place: int) -> Host:
    # From the block that is set aside for tests of networks.
    address = f"198.18.0.{place + 1}"
    wire = f"{name}-b"
    _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", wire)
    _run("ip", "-n", name, "link", "set", wire, "netns", bridge)
    _run("ip", "-n", bridge, "link", "set", wire, "master", "bridge", "up")
    _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    _run("ip", "-n", name, "link", "set", "eth0", "up")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    return Host(name, address, bridge)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
