"""When a reader gives up, in simulated time."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref

import grpc
import pytest
from clients.scripted_server import queue_full

from slotwise.v1 import inference_pb2 as pb
from slotwise_client import SlotwiseError, UnavailableError
from slotwise_client._connection import Connection
from slotwise_client._reading import FIRST_DELAY_S, MAX_DELAY_S, Reading


class LostError(grpc.RpcError):
    def __init__(
        self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, details: str = "Socket closed"
    ) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple:
        return ()


class Life:
    """A stream of a request, lost and found again."""

    def __init__(self, reconnect_timeout: float) -> None:
        self.now_s = 100.0
        connection = Connection(
            "localhost:1",
            tls=False,
            token=None,
            insecure_token=False,
            reconnect=True,
            reconnect_timeout=reconnect_timeout,
        )
        self.reading = Reading(connection, pb.GenerateRequest(text="x"), lambda: self.now_s)

    def accepted(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.reading.next_call()
        seed = self.reading.first.sampling.seed
        self.reading.take(pb.GenerateResponse(accepted=pb.Accepted(seed=seed)))

    def lost(self, after_s: float, error: grpc.RpcError | None = None) -> float:
        """How long to wait now."""
        self.now_s += after_s
        return self.reading.lost(error or LostError())

    def told(self, index: int) -> None:
        delta = pb.Delta(first_token_index=index, token_ids=[5])
        assert self.reading.take(pb.GenerateResponse(delta=delta))


def test_it_gives_up_when_there_was_no_server_for_too_long():
    life = Life(60)
    life.accepted()
    life.lost(10)
    life.lost(50)
    with pytest.raises(UnavailableError):
        life.lost(20)


def test_what_failed_stays_in_memory_no_longer_than_its_error():
    """A prompt may be large, and many may be refused before the garbage collector comes."""
    reading = Life(60).reading
    # The other one holds the life, which holds the reading.
    reading._clock = time.monotonic
    is_there = weakref.ref(reading)
    reading.next_call()
    gc.disable()
    try:
        # pytest.raises keeps what it caught.
        with contextlib.suppress(SlotwiseError):
            reading.lost(LostError(grpc.StatusCode.INVALID_ARGUMENT))
        assert reading.is_over
        del reading
        assert is_there() is None
    finally:
        gc.enable()


def test_time_with_a_server_counts_back():
    """One that has no news yet: a recovery may take a while, and again."""
    life = Life(60)
    life.accepted()
    for _ in range(5):
        life.lost(40)
        life.accepted(after_s=40)
    # Lost as soon as found, it is no server to wait for.
    life.lost(0)
    with pytest.raises(UnavailableError):
        life.lost(40)


def test_an_attached_request_is_over_with_its_last_answer():
    """How many there are is told with Accepted."""
    life = Life(60)
    connection = life.reading._connection
    reading = Reading(connection, pb.AttachRequest(request_id="r"), lambda: life.now_s)
    reading.next_call()
    reading.take(pb.GenerateResponse(accepted=pb.Accepted(num_choices=2)))
    for index, is_over in ((1, False), (0, True)):
        reading.take(pb.GenerateResponse(finished=pb.Finished(index=index)))
        assert reading.is_over == is_over


def test_news_end_the_count_and_the_back_off():
    life = Life(60)
    life.accepted()
    delays = [life.lost(5) for _ in range(8)]
    assert delays[:3] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert delays[-1] == MAX_DELAY_S
    life.accepted()
    life.told(0)
    assert life.lost(0) == FIRST_DELAY_S
    life.lost(50)


def test_a_full_queue_says_when_to_come_back():
    """A request that had begun, at a server that forgot it."""
    life = Life(60)
    life.accepted()
    full = LostError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    details = queue_full(7, 0).SerializeToString()
    full.trailing_metadata = lambda: (("grpc-status-details-bin", details),)
    assert life.lost(0, full) == 7.0
    full.trailing_metadata = tuple
    assert life.lost(0, full) == 2 * FIRST_DELAY_S


@pytest.mark.parametrize(
    ("code", "details", "goes_on"),
    [
        (grpc.StatusCode.CANCELLED, "RST_STREAM", True),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", True),
        (grpc.StatusCode.UNKNOWN, "Stream removed", True),
        (grpc.StatusCode.INTERNAL, "a bug", False),
        (grpc.StatusCode.PERMISSION_DENIED, "Socket closed", False),
    ],
)
def test_what_is_a_loss(code, details, goes_on):
    life = Life(60)
    life.accepted()
    if goes_on:
        life.lost(0, LostError(code, details))
        return
    with pytest.raises(SlotwiseError):
        life.lost(0, LostError(code, details))
