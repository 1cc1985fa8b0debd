"""Connections to workers over TCP, with and without TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from certificates import Authority, Pair
from free_ports import fixed_port

from fakes import FakeWorkerServer
from scheduler_service.engine_types import EngineConfig, WorkersTls
from scheduler_service.errors import WorkerLostError
from scheduler_service.tls import worker_credentials
from scheduler_service.worker_link import WorkerLink
from scheduler_service.worker_pool import WorkerPool

# Far more than anything here takes: whoever waits for it fails.
LONG_S = 60


@pytest.fixture
def ca(tmp_path) -> Authority:
    return Authority(tmp_path, "ca")


def free_address() -> str:
    return f"127.0.0.1:{fixed_port()}"


@asynccontextmanager
async def worker(pair: Pair | None, client_ca: Authority | None = None) -> AsyncIterator[str]:
    server = FakeWorkerServer(free_address())
    if pair is not None:
        roots = client_ca.content if client_ca else None
        server.credentials = grpc.ssl_server_credentials([pair.content], roots, bool(client_ca))
    await server.start()
    yield server.address
    await server.die()


async def connect(address: str, tls: WorkersTls | None, timeout_s: float = LONG_S) -> None:
    config = EngineConfig(num_slots=1, max_seq_len=16)
    pool = WorkerPool(config, [address], 1, worker_credentials(tls) if tls else None)
    try:
        async with asyncio.timeout(LONG_S / 2):
            info = await pool.connect(lambda progress: None, timeout_s)
        assert info.geometry.num_slots == 1
    finally:
        await pool.close()


async def test_tls_with_a_trusted_worker(ca):
    async with worker(ca.pair("worker")) as address:
        await connect(address, WorkersTls(str(ca.path)))


async def test_both_sides_show_certificates(ca):
    own = ca.client("scheduler")
    async with worker(ca.pair("worker"), ca) as address:
        await connect(address, WorkersTls(str(ca.path), str(own.cert), str(own.key)))


async def test_a_worker_of_another_authority_is_told_at_once(ca, tmp_path):
    stranger = Authority(tmp_path, "stranger")
    async with worker(stranger.pair("worker")) as address:
        with pytest.raises(WorkerLostError, match=r"worker 0: UNAVAILABLE.*CERTIFICATE_VERIFY"):
            await connect(address, WorkersTls(str(ca.path)))


async def test_a_worker_of_another_name_is_told_at_once(ca):
    async with worker(ca.pair("worker", hosts=("elsewhere.example",))) as address:
        with pytest.raises(WorkerLostError, match="Hostname Verification Check failed"):
            await connect(address, WorkersTls(str(ca.path)))


async def test_a_plain_worker_is_told_at_once(ca):
    async with worker(None) as address:
        with pytest.raises(WorkerLostError, match="WRONG_VERSION_NUMBER"):
            await connect(address, WorkersTls(str(ca.path)))


@pytest.mark.parametrize("who", ["nobody", "stranger", "expired"])
async def test_a_worker_that_wants_another_certificate(ca, tmp_path, who):
    tls = WorkersTls(str(ca.path))
    if who != "nobody":
        signs = Authority(tmp_path, "stranger") if who == "stranger" else ca
        own = signs.client("scheduler")
        tls = WorkersTls(str(ca.path), str(own.cert), str(own.key))
    trusted = ca if who != "expired" else Authority(tmp_path, "other")
    async with worker(ca.pair("worker"), trusted) as address:
        with pytest.raises(WorkerLostError, match=r"worker 0: 127.*it may want a certificate"):
            await connect(address, tls)


async def test_a_worker_that_comes_late_is_waited_for(ca, monkeypatch):
    looked = asyncio.Event()

    async def look(link: WorkerLink) -> None:
        await really(link)
        looked.set()

    really = WorkerLink._check_handshake
    monkeypatch.setattr(WorkerLink, "_check_handshake", look)
    address = free_address()
    server = FakeWorkerServer(address)
    server.credentials = grpc.ssl_server_credentials([ca.pair("worker").content])
    connecting = asyncio.create_task(connect(address, WorkersTls(str(ca.path))))
    await asyncio.wait(
        {connecting, asyncio.create_task(looked.wait())}, return_when="FIRST_COMPLETED"
    )
    assert not connecting.done()
    await server.start()
    await connecting
    await server.die()


async def test_a_worker_that_wants_tls_is_not_reached_without(ca):
    async with worker(ca.pair("worker")) as address:
        with pytest.raises(WorkerLostError, match=r"cannot be reached at .* within 0.2 s"):
            await connect(address, None, timeout_s=0.2)


async def test_a_unix_socket_is_plain_beside_tls(ca, tmp_path):
    server = FakeWorkerServer(f"unix:{tmp_path}/w.sock")
    await server.start()
    await connect(server.address, WorkersTls(str(ca.path)))
    await server.die()


async def test_a_new_connection_has_the_new_authority(ca, tmp_path):
    stranger = Authority(tmp_path, "stranger")
    credentials = worker_credentials(WorkersTls(str(ca.path)))
    config = EngineConfig(num_slots=1, max_seq_len=16)
    async with worker(stranger.pair("worker")) as address:
        ca.path.write_bytes(stranger.content)
        pool = WorkerPool(config, [address], 1, credentials)
        await pool.connect(lambda progress: None, LONG_S)
        await pool.close()
