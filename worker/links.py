"""Connections between ranks on CPUs: one to every peer, and no wait that cannot be broken off."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
from collections.abc import Callable

from worker.errors import PeerLostError

# A message goes in pieces, one each way in turn: at most two of them wait in a connection, whose
# buffers hold them, so no two ranks ever wait for each other to read.
_PIECE_BYTES = 64 << 10
_BUFFER_BYTES = 4 * _PIECE_BYTES
# A message's number and length: ranks that do not make the same calls are found out.
_HEAD = struct.Struct("<QQ")
# Who calls: the secret of the rank that listens, and the rank.
_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sI")
_TIMEVAL = struct.Struct("@ll")
_POLL_MS = 100
# Strangers that connect and say nothing hold a rank up for so long.
_HELLO_S = 1.0
_NOTHING = memoryview(b"")


class Links:
    """A rank's connections. Used by one thread; `abort` may be called from any other.

    A peer that has gone ends an exchange at once, one that is silent after timeout_s.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        self._rank = rank
        self._sockets = dict(sorted(sockets.items()))
        self._timeout_s = timeout_s
        self._num_messages = 0
        self._is_aborted = False
        bound = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
        for link in self._sockets.values():
            link.settimeout(None)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)

    def exchange(self, own: memoryview, parts: dict[int, memoryview]) -> None:
        """Sends `own`, bytes, to every peer and fills the peers' parts, which are as long.

        All ranks make the same calls. Raises PeerLostError naming the peer.
        """
        self._num_messages += 1
        head = memoryview(_HEAD.pack(self._num_messages, len(own)))
        heads = {peer: memoryview(bytearray(_HEAD.size)) for peer in self._sockets}
        self._swap(head, own[:_PIECE_BYTES], heads, parts, 0)
        for peer, found in heads.items():
            if found != head:
                raise self._lost(peer, f"sent {_HEAD.unpack(found)}, {_HEAD.unpack(head)} was due")
        for first in range(_PIECE_BYTES, len(own), _PIECE_BYTES):
            self._swap(_NOTHING, own[first : first + _PIECE_BYTES], {}, parts, first)

    def abort(self) -> None:
        """Breaks every connection: an exchange ends at once, here and at the peers."""
        self._is_aborted = True
        for link in self._sockets.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connections; no exchange may follow."""
        self.abort()
        for link in self._sockets.values():
            link.close()

    def _swap(
        self,
        head: memoryview,
        piece: memoryview,
        heads: dict[int, memoryview],
        parts: dict[int, memoryview],
        first: int,
    ) -> None:
        """One piece to every peer, and the same piece of theirs, `first` bytes into the message."""
        peer = self._rank
        try:
            for peer, link in self._sockets.items():  # noqa: B007 (named when it fails)
                _send(link, head, piece)
            for peer, link in self._sockets.items():
                part = parts[peer][first : first + len(piece)]
                _receive(link, heads.get(peer, _NOTHING), part)
        except BlockingIOError:
            raise self._lost(peer, f"was silent for {self._timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            raise self._lost(peer, f"is gone: {error}") from error

    def _lost(self, peer: int, why: str) -> PeerLostError:
        if self._is_aborted:
            return PeerLostError(f"rank {self._rank} left its group: its stream ended")
        return PeerLostError(f"rank {self._rank} lost its group: rank {peer} {why}")


class Listener:
    """Where the peers of higher rank connect to; `name` tells them, and nobody else, how."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._socket = socket.create_server((host, 0), family=family)
        # Inherited by what it accepts; before, for the window is agreed on at the start.
        _size_buffers(self._socket)
        self.name = f"{host} {self._socket.getsockname()[1]} {self._secret.hex()}"

    def accept(self, stop: Callable[[], None]) -> tuple[int, socket.socket]:
        """The next peer and its connection. `stop` is called again and again, to raise."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        while True:
            stop()
            if not waiting.poll(_POLL_MS):
                continue
            link, _ = self._socket.accept()
            link.settimeout(_HELLO_S)
            hello = memoryview(bytearray(_HELLO.size))
            with contextlib.suppress(OSError, EOFError):
                _receive(link, hello, _NOTHING)
                secret, peer = _HELLO.unpack(hello)
                if hmac.compare_digest(secret, self._secret):
                    return peer, link
            link.close()

    def close(self) -> None:
        """Nobody can connect any more; connections stay."""
        self._socket.close()


def connect(rank: int, name: str) -> socket.socket:
    """Connects `rank` to the Listener of this name. Raises OSError."""
    host, port, secret = name.split()
    link = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        _size_buffers(link)
        link.settimeout(_HELLO_S)
        link.connect((host, int(port)))
        link.sendall(_HELLO.pack(bytes.fromhex(secret), rank))
    except OSError:
        link.close()
        raise
    return link


def _size_buffers(link: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        link.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def _send(link: socket.socket, *buffers: memoryview) -> None:
    left = [buffer for buffer in buffers if buffer]
    while left:
        left = _after(left, link.sendmsg(left))


def _receive(link: socket.socket, *buffers: memoryview) -> None:
    """Fills the buffers. EOFError when the peer sends no more."""
    left = [buffer for buffer in buffers if buffer]
    while left:
        count = link.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
        if count == 0:
            raise EOFError("its connection is closed")
        left = _after(left, count)


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
