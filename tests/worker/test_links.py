"""Connections between ranks: what is sent arrives, and every wait can be broken off."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from worker_driver import on_ranks

from worker.errors import PeerLostError
from worker.links import Links, Listener, connect

LONG_S = 60.0
# More than any buffer of a connection holds.
MANY_BYTES = 5 << 20


def go_on() -> None:
    """Never stops a wait."""


def pair(timeout_s: float = LONG_S) -> list[Links]:
    """Ranks 0 and 1, joined."""
    listener = Listener("127.0.0.1")
    mine = connect(1, listener.name)
    peer, theirs = listener.accept(go_on)
    assert peer == 1
    listener.close()
    return [Links(0, {1: theirs}, timeout_s), Links(1, {0: mine}, timeout_s)]


@pytest.fixture
def ranks() -> Iterator[list[Links]]:
    both = pair()
    yield both
    for links in both:
        links.close()


def swap(links: Links, own: bytes, peer: int) -> bytes:
    theirs = bytearray(len(own))
    links.exchange(memoryview(own), {peer: memoryview(theirs)})
    return bytes(theirs)


def test_messages_of_any_size_arrive(ranks: list[Links]) -> None:
    rng = random.Random(1)
    sizes = [1, 4, 1 << 16, (1 << 16) + 1, 200_003, MANY_BYTES]
    messages = [[rng.randbytes(size) for size in sizes] for _ in ranks]

    def run(rank: int) -> list[bytes]:
        return [swap(ranks[rank], message, 1 - rank) for message in messages[rank]]

    assert on_ranks(2, run) == [messages[1], messages[0]]


def test_ranks_that_do_not_make_the_same_calls_are_found_out(ranks: list[Links]) -> None:
    def run(rank: int) -> str:
        with pytest.raises(PeerLostError) as caught:
            swap(ranks[rank], b"." * (3 + rank), 1 - rank)
        ranks[rank].close()
        return str(caught.value)

    assert on_ranks(2, run)[0] == "rank 0 lost its group: rank 1 sent (1, 4), (1, 3) was due"


def test_a_wait_for_a_peer_is_broken_off(ranks: list[Links]) -> None:
    ended = threading.Event()
    errors: list[str] = []

    def wait() -> None:
        try:
            swap(ranks[0], bytes(4), 1)
        except PeerLostError as error:
            errors.append(str(error))
        ended.set()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    # The first bytes are there: it has begun, and waits from now on or soon.
    assert ranks[1]._sockets[0].recv(1, socket.MSG_PEEK)
    assert not ended.is_set()
    ranks[0].abort()
    assert ended.wait(LONG_S)
    assert errors == ["rank 0 left its group: its stream ended"]
    # What was sent before is there; no more comes.
    swap(ranks[1], bytes(4), 0)
    with pytest.raises(PeerLostError, match="rank 1 lost its group: rank 0 is gone"):
        swap(ranks[1], bytes(4), 0)


def test_a_silent_peer_is_named() -> None:
    ranks = pair(timeout_s=0.2)
    with pytest.raises(PeerLostError, match=r"rank 0 lost its group: rank 1 was silent for 0.2 s"):
        swap(ranks[0], b"....", 1)
    for links in ranks:
        links.close()


def test_a_peer_whose_process_ends_is_noticed_at_once() -> None:
    listener = Listener("127.0.0.1")
    code = (
        "import sys, time; from worker.links import connect; "
        "link = connect(1, sys.argv[1]); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code, listener.name]) as process:
        peer, link = listener.accept(go_on)
        links = Links(0, {peer: link}, LONG_S)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            swap(links, b"....", 1)
    links.close()
    listener.close()


def wrong_secret(name: str) -> None:
    host, port, _ = name.split()
    connect(7, f"{host} {port} {'00' * 16}")


def no_hello(name: str) -> None:
    host, port, _ = name.split()
    socket.create_connection((host, int(port))).close()


@pytest.mark.parametrize("stranger", [wrong_secret, no_hello])
def test_strangers_are_not_let_in(stranger: Callable[[str], None]) -> None:
    listener = Listener("127.0.0.1")
    stranger(listener.name)
    link = connect(3, listener.name)
    peer, accepted = listener.accept(go_on)
    assert peer == 3
    for one in (link, accepted):
        one.close()
    listener.close()


def test_waiting_for_peers_can_be_stopped() -> None:
    listener = Listener("127.0.0.1")

    def stop() -> None:
        raise PeerLostError("enough")

    with pytest.raises(PeerLostError, match="enough"):
        listener.accept(stop)
    listener.close()


def test_a_stranger_that_says_nothing_holds_nobody_up_for_long() -> None:
    listener = Listener("127.0.0.1")
    host, port, _ = listener.name.split()
    stranger = socket.create_connection((host, int(port)))
    # A rank that waited for ever would wait for this.
    end = threading.Timer(LONG_S, stranger.shutdown, [socket.SHUT_RDWR])
    end.start()
    link = connect(3, listener.name)
    peer, accepted = listener.accept(go_on)
    assert peer == 3
    assert not end.finished.is_set()
    end.cancel()
    for one in (stranger, link, accepted):
        one.close()
    listener.close()
