from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re

import pytest
from grpc import StatusCode

from fakes import FakeWorkerServer
from scheduler_service import worker_pool
from scheduler_service.engine_types import EngineConfig, Geometry, WorkerConfigured, WorkerReport
from scheduler_service.errors import DigestMismatchError, GroupError, SetupError, WorkerLostError
from scheduler_service.prefix_index import PrefixReuse
from scheduler_service.request import TokenLogprobs
from scheduler_service.step import RowResult, StepResult
from scheduler_service.worker_group import warm_up_commands
from scheduler_service.worker_pool import (
    StepAgreement,
    WorkerPool,
    agree_on_setup,
    check_tokens,
    choose_rendezvous,
    is_local,
)

PATIENCE_S = 60
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
        ("localhost.example:1", False),
        ("127.example:1", False),
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
        await pool.connect(lambda progress: None, PATIENCE_S)
        servers[0].hang()
        pool.send(warm_up_commands(3, 16)[0])
        await servers[1].die()
        for _ in range(2):
            async with asyncio.timeout(PATIENCE_S):
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
            await pool.connect(lambda progress: None, PATIENCE_S)
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
        await pools[0].connect(lambda progress: None, PATIENCE_S)
        with pytest.raises(WorkerLostError, match="ALREADY_EXISTS: a stream is open"):
            await pools[1].connect(lambda progress: None, PATIENCE_S)
    finally:
        for pool in pools:
            await pool.close()
        await server.die()


GEOMETRY = Geometry(
    num_slots=3,
    max_seq_len=64,
    num_layers=3,
    vocab_size=100,
    fingerprint="f",
    weight_dtype="float32",
    kv_dtype="float32",
    max_step_tokens=256,
    max_mixed_step_tokens=256,
    run_ahead_window_ns=40_000_000,
    max_running=2,
    max_logprobs_steps=16,
    prefix_reuse=PrefixReuse.ALL,
    device_name="x86_64 avx2",
    build="b",
)
CONFIG = EngineConfig(world_size=2, num_slots=3, max_running=2, max_seq_len=64)


def answers(rank1=GEOMETRY, epoch=5, rank=1):
    return [
        WorkerConfigured(5, GEOMETRY, WorkerReport(0, "a", "cpu", 1, 10, 11, 99, ())),
        WorkerConfigured(epoch, rank1, WorkerReport(rank, "b", "cpu", 1, 10, 12, 99, ())),
    ]


def test_agreement_gives_the_info():
    info = agree_on_setup(CONFIG, 5, answers())
    assert info.geometry == GEOMETRY
    assert [worker.address for worker in info.workers] == ["a", "b"]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Geometry)])
def test_a_differing_field_is_named_with_both_values(field):
    value = getattr(GEOMETRY, field)
    other = value + 1 if isinstance(value, int) else "other"
    changed = dataclasses.replace(GEOMETRY, **{field: other})
    with pytest.raises(SetupError, match=re.escape(f"{field}: {value!r} and {other!r}")):
        agree_on_setup(CONFIG, 5, answers(changed))


@pytest.mark.parametrize(
    ("change", "words"), [({"epoch": 4}, "epoch 4, 5 was"), ({"rank": 0}, "rank 0, 1 was")]
)
def test_wrong_echoes(change, words):
    with pytest.raises(SetupError, match=words):
        agree_on_setup(CONFIG, 5, answers(**change))


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_slots", 4), ("max_running", 3), ("max_seq_len", 65), ("max_step_tokens", 255)],
)
def test_geometry_is_what_was_asked_for(field, value):
    config = dataclasses.replace(CONFIG, **{field: value})
    with pytest.raises(SetupError, match=f"{field} {getattr(GEOMETRY, field)}, {value} was asked"):
        agree_on_setup(config, 5, answers())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_step_tokens", 1),
        ("max_mixed_step_tokens", 0),
        ("run_ahead_window_ns", 0),
        ("max_logprobs_steps", 0),
    ],
)
def test_a_geometry_that_no_scheduler_can_work_with(field, value):
    """As of a worker that does not know the field."""
    config = dataclasses.replace(CONFIG, world_size=1)
    changed = dataclasses.replace(GEOMETRY, **{field: value})
    with pytest.raises(SetupError, match=f"report {field} {value}, at least .* same version"):
        agree_on_setup(config, 5, [dataclasses.replace(answers()[0], geometry=changed)])


def result(step_id, digest=7, epoch=5, rows=()):
    return StepResult(epoch, step_id, digest, rows, 100)


def test_a_step_is_given_when_all_ranks_have_sent_it():
    agreement = StepAgreement(2, 5)
    first = result(1, rows=(RowResult(0, 1, (5,)),))
    assert agreement.add(0, first) is None
    assert agreement.add(0, result(2)) is None
    assert agreement.add(1, result(1)) is first
    assert agreement.add(1, result(2)) == result(2)


@pytest.mark.parametrize("other", [result(1, digest=8), result(2), result(1, epoch=6)])
def test_ranks_that_ran_a_step_differently(other):
    agreement = StepAgreement(2, 5)
    agreement.add(1, other)
    with pytest.raises(DigestMismatchError, match="workers 0 and 1"):
        agreement.add(0, result(1))


def test_old_epochs_are_dropped():
    agreement = StepAgreement(1, 5)
    assert agreement.add(0, result(9, epoch=4)) is None
    assert agreement.add(0, result(1)) == result(1)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (RowResult(0, 1, (3, 100)), "sampled token id 100 in step 1"),
        (
            RowResult(0, 1, (3,), logprobs=(TokenLogprobs(-1.0, 1, (4, 101), (-1.0, -2.0)),)),
            "named token id 101 in step 1",
        ),
        (
            RowResult(0, 1, (), prompt_logprobs=(TokenLogprobs(-1.0, 1, (102,), (-1.0,)),)),
            "named token id 102 in step 1",
        ),
    ],
)
def test_ids_outside_of_the_vocabulary(row, words):
    check_tokens(result(1, rows=(RowResult(1, 1, (99,)),)), 100)
    with pytest.raises(WorkerLostError, match=f"{words}; ids are below 100"):
        check_tokens(result(1, rows=(row,)), 100)


@contextlib.asynccontextmanager
async def pool_of_two(folder):
    """A configured pool, and its two fake ranks."""
    servers = [FakeWorkerServer(f"unix:{folder}/{rank}.sock") for rank in range(2)]
    for server in servers:
        await server.start()
    config = EngineConfig(world_size=2, num_slots=1, max_seq_len=16)
    pool = WorkerPool(config, [server.address for server in servers], epoch=3)
    try:
        await pool.connect(lambda progress: None, PATIENCE_S)
        yield pool, servers
    finally:
        await pool.close()
        for server in servers:
            server.resume()
            await server.die()


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (the condition is in a server)
            await asyncio.sleep(0.002)


async def test_the_rank_that_died_is_blamed_and_not_the_one_that_lost_it(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "_CAUSE_S", PATIENCE_S)
    async with pool_of_two(tmp_path) as (pool, servers):
        servers[0].abort_step = True
        servers[1].hang()
        pool.send(warm_up_commands(3, 16)[0])
        await until(lambda: servers[1].num_waiting and pool._errors)
        dying = asyncio.create_task(servers[1].die())
        with pytest.raises(WorkerLostError, match=r"^worker 1: "):
            await pool.receive()
        await dying
        assert list(pool.ranks_at_fault()) == [1]


async def test_a_rank_that_lost_its_group_may_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "_CAUSE_S", 0)
    async with pool_of_two(tmp_path) as (pool, servers):
        servers[0].abort_step = True
        servers[1].hang()
        pool.send(warm_up_commands(3, 16)[0])
        with pytest.raises(WorkerLostError, match=r"^worker 0: ABORTED"):
            await pool.receive()
        assert pool.ranks_at_fault() == {}


async def test_of_silent_ranks_the_one_that_others_wait_for_is_at_fault(tmp_path):
    async with pool_of_two(tmp_path) as (pool, servers):
        servers[1].hang()
        pool.send(warm_up_commands(3, 16)[0])
        receive = asyncio.create_task(pool.receive())
        await until(lambda: pool._agreement.silent_ranks() == {1})
        pool.fail(WorkerLostError(0, "no result for long"))
        with pytest.raises(WorkerLostError, match="no result for long"):
            await receive
        assert list(pool.ranks_at_fault()) == [1]


async def test_when_all_are_silent_nobody_is_blamed(tmp_path):
    async with pool_of_two(tmp_path) as (pool, servers):
        for server in servers:
            server.hang()
        pool.send(warm_up_commands(3, 16)[0])
        pool.fail(WorkerLostError(0, "no result for long"))
        with pytest.raises(WorkerLostError):
            await pool.receive()
        assert pool.ranks_at_fault() == {}


async def test_of_two_that_differ_none_is_trusted(tmp_path):
    async with pool_of_two(tmp_path) as (pool, servers):
        servers[1].wrong_digest = True
        pool.send(warm_up_commands(3, 16)[0])
        with pytest.raises(DigestMismatchError):
            await pool.receive()
        assert list(pool.ranks_at_fault()) == [0, 1]


@pytest.mark.parametrize(
    ("code", "at_fault"),
    [(StatusCode.INTERNAL, [1]), (StatusCode.ABORTED, []), (StatusCode.FAILED_PRECONDITION, [])],
)
async def test_a_rank_that_fails_to_start_by_its_own_fault_is_blamed(tmp_path, code, at_fault):
    servers = [FakeWorkerServer(f"unix:{tmp_path}/{rank}.sock") for rank in range(2)]
    for server in servers:
        await server.start()
    servers[1].refuse = (code, "so it is")
    config = EngineConfig(world_size=2, num_slots=1, max_seq_len=16)
    pool = WorkerPool(config, [server.address for server in servers], epoch=3)
    with pytest.raises(GroupError, match=r"worker 1: .*so it is"):
        await pool.connect(lambda progress: None, PATIENCE_S)
    assert list(pool.ranks_at_fault()) == at_fault
    await pool.close()
    for server in servers:
        await server.die()
