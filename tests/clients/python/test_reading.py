"""When a reader gives up, in simulated time."""

from __future__ import annotations

import grpc
import pytest

from slotwise.v1 import inference_pb2 as pb
from slotwise_client import UnavailableError
from slotwise_client._connection import Connection
from slotwise_client._reading import Reading


class LostError(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "Socket closed"

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

    def lost(self, after_s: float) -> None:
        self.now_s += after_s
        self.reading.lost(LostError())


def test_it_gives_up_when_there_was_no_server_for_too_long():
    life = Life(60)
    life.accepted()
    life.lost(10)
    life.lost(50)
    with pytest.raises(UnavailableError):
        life.lost(20)


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
