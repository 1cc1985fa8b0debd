from __future__ import annotations

import asyncio

import pytest

from fakes import FakeWorkerServer
from scheduler_service.engine import EngineConfig
from scheduler_service.group_errors import SetupError, WorkerLostError
from scheduler_service.warm_up import warm_up_commands
from scheduler_service.worker_pool import WorkerPool, choose_rendezvous, is_local

LOCAL = ("unix:/a.sock", "unix:/b.sock")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/x.sock", True),
        ("localhost:1", True),
        ("127.0.0.1:1", True),
        ("[::1]:1", True),
        ("10.0.0.1:1", False),
        ("worker-0:1", False),
    ],
)
def test_is_local(address, local):
    assert is_local(address) is local


def test_rendezvous():
    config = EngineConfig()
    assert choose_rendezvous(config, LOCAL[:1]) == ""
    host, port = choose_rendezvous(config, LOCAL).split(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 65536
    given = EngineConfig(rendezvous_address="node0:29500")
    assert choose_rendezvous(given, ("node0:1", "node1:1")) == "node0:29500"
    with pytest.raises(SetupError, match="worker at node1:1 is on another host"):
        choose_rendezvous(config, ("localhost:1", "node1:1"))


async def test_a_lost_rank_is_named_at_once_and_ever_after(tmp_path):
    servers = [FakeWorkerServer(f"unix:{tmp_path}/{rank}.sock") for rank in range(2)]
    for server in servers:
        await server.start()
    config = EngineConfig(world_size=2, num_slots=1, max_seq_len=16)
    pool = WorkerPool(config, [server.address for server in servers], epoch=3)
    try:
        await pool.connect(lambda progress: None, connect_timeout_s=20)
        servers[0].hang()
        pool.send(warm_up_commands(3, 16)[0])
        await servers[1].die()
        for _ in range(2):
            async with asyncio.timeout(20):
                with pytest.raises(WorkerLostError, match=r"^worker 1: ") as caught:
                    await pool.receive()
        assert caught.value.rank == 1
    finally:
        servers[0].resume()
        await pool.close()
        await servers[0].die()


async def test_a_rank_that_says_nothing_while_it_starts(tmp_path):
    server = FakeWorkerServer(f"unix:{tmp_path}/0.sock")
    server.load_gate.clear()
    await server.start()
    pool = WorkerPool(EngineConfig(worker_timeout_s=0.05), [server.address], epoch=1)
    try:
        with pytest.raises(WorkerLostError, match=r"said nothing for 0.05 s of its start"):
            await pool.connect(lambda progress: None, connect_timeout_s=20)
    finally:
        server.load_gate.set()
        await pool.close()
        await server.die()


async def test_a_rank_that_cannot_be_reached(tmp_path):
    address = f"unix:{tmp_path}/none.sock"
    pool = WorkerPool(EngineConfig(), [address], epoch=1)
    with pytest.raises(WorkerLostError, match=r"cannot be reached at unix:.* within 0.05 s"):
        await pool.connect(lambda progress: None, connect_timeout_s=0.05)
    await pool.close()


async def test_a_second_stream_is_refused_with_the_workers_words(tmp_path):
    server = FakeWorkerServer(f"unix:{tmp_path}/0.sock")
    await server.start()
    pools = [WorkerPool(EngineConfig(), [server.address], epoch) for epoch in (1, 2)]
    try:
        await pools[0].connect(lambda progress: None, 20)
        with pytest.raises(WorkerLostError, match="ALREADY_EXISTS: a stream is open"):
            await pools[1].connect(lambda progress: None, 20)
    finally:
        for pool in pools:
            await pool.close()
        await server.die()
