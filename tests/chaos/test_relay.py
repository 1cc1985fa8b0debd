"""The relay does what the faults need of it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from chaos.relay import Relay

WAIT_S = 30


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(link: socket.socket) -> None:
            with link, contextlib.suppress(OSError):
                while piece := link.recv(1000):
                    link.sendall(piece)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    link, _ = listener.accept()
                    threading.Thread(target=serve, args=(link,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(echo) -> Iterator[Relay]:
    relay = Relay(echo)
    yield relay
    relay.close()


def ask(link: socket.socket, words: bytes) -> bytes:
    link.sendall(words)
    got = b""
    while len(got) < len(words):
        piece = link.recv(1000)
        if not piece:
            raise ConnectionError("ended")
        got += piece
    return got


def test_what_goes_in_comes_out(relay):
    with socket.create_connection(("127.0.0.1", relay.port), WAIT_S) as link:
        assert ask(link, b"one") == b"one"
        relay.delay(0.1)
        began = time.monotonic()
        assert ask(link, b"two") == b"two"
        # There and back.
        assert time.monotonic() - began >= 0.2


def test_what_was_held_arrives(relay):
    with socket.create_connection(("127.0.0.1", relay.port), WAIT_S) as link:
        assert ask(link, b"one") == b"one"
        relay.hold()
        link.sendall(b"two")
        link.settimeout(0.3)
        with pytest.raises(TimeoutError):
            link.recv(10)
        link.settimeout(WAIT_S)
        relay.release()
        assert link.recv(10) == b"two"


def test_a_cut_resets_both_ends(relay):
    with socket.create_connection(("127.0.0.1", relay.port), WAIT_S) as link:
        assert ask(link, b"one") == b"one"
        assert relay.cut() == 1
        with pytest.raises(ConnectionError):
            ask(link, b"two")
    with socket.create_connection(("127.0.0.1", relay.port), WAIT_S) as again:
        assert ask(again, b"three") == b"three"
