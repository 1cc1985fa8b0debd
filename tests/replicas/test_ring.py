"""Which replica a key leads to, by the product's HAProxy file; servers only tell who they are."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from replicas.balanced import CONFIG, balanced, need_haproxy

from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

pytestmark = pytest.mark.replicas
ROOT = CONFIG.parents[3]
SERVICE = "slotwise.v1.Inference"
KEYS = [f"conversation {number}" for number in range(300)]


class Named(rpc.InferenceServicer):
    """Tells its port in place of a count."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.health = health.HealthServicer()
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        rpc.add_InferenceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.set(True)
        self._server.start()

    def set(self, serves: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self.health.set(SERVICE, status.SERVING if serves else status.NOT_SERVING)

    def stop(self) -> None:
        self._server.stop(0).wait()

    def Tokenize(self, request, context):  # noqa: N802
        return pb.TokenizeResponse(token_ids=[self.port])

    def Generate(self, request, context):  # noqa: N802
        """A message at once, and one when the stream may end."""
        yield pb.GenerateResponse(request_id=str(self.port))
        while context.is_active() and not self.may_end.wait(0.05):
            pass
        yield pb.GenerateResponse(request_id=str(self.port))


@contextlib.contextmanager
def named(number: int) -> Iterator[list[Named]]:
    servers = [Named() for _ in range(number)]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()


class Asked:
    """A client of the balancer: one connection, plain gRPC."""

    def __init__(self, address: str, servers: list[Named]) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self.stub = rpc.InferenceStub(self._channel)
        self._index = {server.port: index for index, server in enumerate(servers)}

    def where(self, key: str | None) -> int:
        metadata = () if key is None else (("slotwise-routing-key", key),)
        answer = self.stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=metadata, timeout=60)
        return self._index[answer.token_ids[0]]

    def all(self) -> dict[str, int]:
        return {key: self.where(key) for key in KEYS}

    def close(self) -> None:
        self._channel.close()


@contextlib.contextmanager
def asking(address: str, servers: list[Named]) -> Iterator[Asked]:
    client = Asked(address, servers)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(autouse=True)
def _haproxy():
    need_haproxy()


def test_keys_move_with_their_replica_and_no_others(tmp_path):
    with named(4) as servers, balanced([one.port for one in servers], tmp_path) as balancer:
        servers[3].set(False)
        balancer.wait_up("replica-0", "replica-1", "replica-2")
        with asking(balancer.address, servers) as client:
            before = client.all()
            assert client.all() == before
            counts = Counter(before.values())
            assert set(counts) == {0, 1, 2}
            # Even shares are 100.
            assert min(counts.values()) > 40, counts

            servers[3].set(True)
            balancer.wait_up("replica-0", "replica-1", "replica-2", "replica-3")
            added = client.all()
            moved = {key for key in KEYS if added[key] != before[key]}
            assert {added[key] for key in moved} == {3}
            # A share is 75.
            assert 30 < len(moved) < 130, len(moved)

            servers[0].set(False)
            balancer.wait_up("replica-1", "replica-2", "replica-3")
            lost = client.all()
            changed = {key for key in KEYS if lost[key] != added[key]}
            assert changed == {key for key in KEYS if added[key] == 0}

            servers[0].set(True)
            balancer.wait_up("replica-0", "replica-1", "replica-2", "replica-3")
            assert client.all() == added


def test_without_a_key_all_replicas_are_used(tmp_path):
    with named(3) as servers, balanced([one.port for one in servers], tmp_path) as balancer:
        balancer.wait_up("replica-0", "replica-1", "replica-2")
        with asking(balancer.address, servers) as client:
            assert {client.where(None) for _ in range(100)} == {0, 1, 2}


def test_one_key_of_many_does_not_overload_its_replica(tmp_path):
    """Bounded load: streams of one key spill over; the others of its streams stay."""
    with named(3) as servers, balanced([one.port for one in servers], tmp_path) as balancer:
        balancer.wait_up("replica-0", "replica-1", "replica-2")
        with asking(balancer.address, servers) as client:
            streams = []
            for _ in range(6):
                request = pb.GenerateRequest()
                metadata = (("slotwise-routing-key", "popular"),)
                streams.append(client.stub.Generate(request, metadata=metadata, timeout=60))
            ports = Counter(next(stream).request_id for stream in streams)
            for stream in streams:
                stream.cancel()
            # The mean of six is 2, and half as much again 3.
            assert len(ports) >= 2
            assert max(ports.values()) <= 4


def test_a_draining_replica_keeps_its_streams(tmp_path):
    with named(2) as servers, balanced([one.port for one in servers], tmp_path) as balancer:
        balancer.wait_up("replica-0", "replica-1")
        with asking(balancer.address, servers) as client:
            key = next(key for key in KEYS if client.where(key) == 0)
            metadata = (("slotwise-routing-key", key),)
            stream = client.stub.Generate(pb.GenerateRequest(), metadata=metadata, timeout=60)
            assert next(stream).request_id == str(servers[0].port)
            servers[0].set(False)
            balancer.wait_up("replica-1")
            assert client.where(key) == 1
            servers[0].may_end.set()
            assert [one.request_id for one in stream] == [str(servers[0].port)]


def test_the_file_as_it_stands_and_is_started():
    """docs/replicas.md has this command."""
    command = "haproxy -W -db -f docs/deploy/haproxy/haproxy.cfg"
    assert command in (ROOT / "docs" / "replicas.md").read_text()
    words = command.replace("-W -db", "-c").split()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
