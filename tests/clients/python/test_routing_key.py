"""By which key a call finds its replica, and that all calls of a request have the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc
from slotwise_client import Client, InvalidArgumentError, SlotwiseError
from slotwise_client import _protocol as protocol
from slotwise_client.aio import AsyncClient


class Notes(rpc.InferenceServicer):
    """Notes the keys of the calls. Breaks each stream after a token, and forgets the request."""

    def __init__(self) -> None:
        self.keys: list[tuple[str, str | None]] = []

    def _note(self, name, context):
        given = dict(context.invocation_metadata())
        self.keys.append((name, given.get("slotwise-routing-key")))

    def Generate(self, request, context):  # noqa: N802
        self._note("Generate", context)
        accepted = pb.Accepted(seed=request.sampling.seed, num_choices=1)
        yield pb.GenerateResponse(request_id=request.request_id, accepted=accepted)
        yield pb.GenerateResponse(request_id=request.request_id, delta=pb.Delta(token_ids=[5]))
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def Attach(self, request, context):  # noqa: N802
        self._note("Attach", context)
        yield pb.GenerateResponse(request_id=request.request_id, accepted=pb.Accepted())
        context.abort(grpc.StatusCode.NOT_FOUND, "gone")

    def Cancel(self, request, context):  # noqa: N802
        self._note("Cancel", context)
        return pb.CancelResponse()

    def GetLoad(self, request, context):  # noqa: N802
        self._note("GetLoad", context)
        return pb.GetLoadResponse()


@pytest.fixture
def notes() -> Iterator[tuple[Notes, str]]:
    servicer = Notes()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    rpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_all_calls_of_a_request_have_its_key(notes):
    servicer, address = notes
    with Client(address) as client:
        with client.generate([1], routing_key="chat 7") as stream:
            next(stream)
        client.load()
    calls = dict(servicer.keys)
    assert calls["Generate"] == calls["Cancel"] == "chat 7"
    assert calls["GetLoad"] is None


def test_a_lost_stream_attaches_with_its_key(notes):
    servicer, address = notes
    with Client(address, reconnect_timeout=1.0) as client, pytest.raises(SlotwiseError):
        list(client.generate([1], routing_key="chat 7"))
    assert ("Attach", "chat 7") in servicer.keys
    assert {key for _, key in servicer.keys} == {"chat 7"}


async def test_the_same_of_the_client_for_asyncio(notes):
    servicer, address = notes
    async with AsyncClient(address) as client:
        async with client.generate([1], routing_key="chat 7") as stream:
            await anext(stream)
        await client.cancel("some id")
    assert ("Generate", "chat 7") in servicer.keys
    assert ("Cancel", "chat 7") in servicer.keys
    assert ("Cancel", "some id") in servicer.keys


@pytest.mark.parametrize(
    ("request_", "given", "key"),
    [
        (pb.GenerateRequest(request_id="a"), None, "a"),
        (pb.GenerateRequest(request_id="a"), "b", "b"),
        (pb.AttachRequest(request_id="a"), None, "a"),
        (pb.CancelRequest(request_id="a"), None, "a"),
        (pb.ReplayRequest(request_id="a"), None, "a"),
        (pb.GenerateRequest(), None, None),
        # Not to be sent as metadata.
        (pb.GenerateRequest(request_id="ä"), None, None),
    ],
)
def test_the_key_of_a_call(request_, given, key):
    assert protocol.key_of(request_, given) == key


def test_the_salt_decides_and_is_not_shown():
    one = protocol.key_of(pb.GenerateRequest(request_id="a", cache_salt="geheim ä"), None)
    two = protocol.key_of(pb.GenerateRequest(request_id="b", cache_salt="geheim ä"), None)
    other = protocol.key_of(pb.GenerateRequest(request_id="b", cache_salt="other"), None)
    assert one == two != other
    assert one is not None
    assert one.isascii()
    assert "geheim" not in one


@pytest.mark.parametrize("key", ["", "ä", "a\nb", " a", "a" * 257])
def test_a_key_that_cannot_be_sent_is_refused_by_its_name(key):
    with pytest.raises(InvalidArgumentError) as raised:
        protocol.key_of(pb.GenerateRequest(), key)
    assert raised.value.field == "routing_key"
