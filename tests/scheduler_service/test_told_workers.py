"""Workers whose addresses are told, and change."""

from __future__ import annotations

import asyncio
import json
import os

import pytest
from scheduler_driver import make_request

from fakes import FakeWorkerServer, tokens_alone
from scheduler_service.engine import Engine
from scheduler_service.engine_types import EngineConfig
from scheduler_service.errors import SetupError
from scheduler_service.request import TokenEvent
from scheduler_service.told_workers import Places, ToldWorkers
from scheduler_service.worker_group import WorkerGroup


def line(*workers: str | None, rendezvous: str = "") -> bytes:
    return json.dumps({"workers": workers, "rendezvous": rendezvous}).encode() + b"\n"


async def test_waits_until_every_address_is_known():
    told = ToldWorkers(2)
    known = asyncio.create_task(told.all_known())
    told.tell(line("a:1", None))
    await asyncio.sleep(0)
    assert not known.done()
    told.tell(line("a:1", "b:2", rendezvous="a:3"))
    assert await known == Places(("a:1", "b:2"), "a:3")


@pytest.mark.parametrize(
    ("news", "words"),
    [
        (("a:1", "b:9"), "worker 1: is at b:9 now"),
        ((None, "b:2"), "worker 0: has lost its address"),
    ],
)
async def test_tells_which_worker_moved(news, words):
    told = ToldWorkers(2)
    told.tell(line("a:1", "b:2"))
    moved = asyncio.create_task(told.moved(await told.all_known()))
    told.tell(line("a:1", "b:2"))
    await asyncio.sleep(0)
    assert not moved.done()
    told.tell(line(*news))
    assert str(await moved) == words


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"{",
        b"[]",
        b'{"workers": "a:1"}',
        line("a:1"),
        line("a:1", 7),
        b'{"workers": [{}, ""]}',
    ],
)
async def test_a_line_that_cannot_be_read_changes_nothing(bad, caplog):
    told = ToldWorkers(2)
    told.tell(line("a:1", "b:2"))
    told.tell(bad)
    assert (await told.all_known()).known() == ("a:1", "b:2")
    assert "standard input" in caplog.text


async def test_reads_a_pipe_and_keeps_what_it_said_last():
    told = ToldWorkers(1)
    reader, writer = os.pipe()
    os.write(writer, line("a:1") + line("b:2"))
    os.close(writer)
    with os.fdopen(reader) as pipe:
        await told.read(pipe)
    assert (await told.all_known()).known() == ("b:2",)


async def test_an_end_before_all_is_known_is_a_fault_that_stays():
    told = ToldWorkers(2)
    known = asyncio.create_task(told.all_known())
    reader, writer = os.pipe()
    os.write(writer, line("a:1", None))
    os.close(writer)
    with os.fdopen(reader) as pipe:
        await told.read(pipe)
    with pytest.raises(SetupError, match="no address of worker 1: standard input has ended"):
        await known


async def test_a_file_is_no_pipe(tmp_path):
    told = ToldWorkers(1)
    (tmp_path / "file").write_bytes(line("a:1"))
    with (tmp_path / "file").open() as file:
        await told.read(file)
    with pytest.raises(SetupError, match="standard input cannot be read"):
        await told.all_known()


@pytest.mark.parametrize("closes", [True, False])
async def test_a_worker_that_moves_is_followed_and_no_token_is_lost(tmp_path, closes):
    """Its first place is never connected to again: the stream goes on from the second, also when
    the first one stands still and closes nothing."""
    first, second = (FakeWorkerServer(f"unix:{tmp_path}/worker-{n}.sock") for n in range(2))
    told = ToldWorkers(1)
    config = EngineConfig(workers_are_told=True, num_slots=2, max_seq_len=256, max_step_tokens=16)
    group = WorkerGroup(config, lambda progress: None, told=told)
    engine = Engine(config, lambda state: None, lambda progress: None, group)
    await first.start()
    await second.start()
    try:
        async with asyncio.timeout(60):
            told.tell(line(first.address))
            await engine.start()
            first.hang()
            request = make_request("r", (1, 2, 3), 40)
            stream = engine.submit([request])
            if closes:
                await first.die()
            # Where nobody listens, so that a try is under way when the news comes.
            told.tell(line(f"unix:{tmp_path}/nobody.sock"))
            await asyncio.sleep(0.1)
            told.tell(line(second.address))
            tokens = []
            async for event in stream:
                if isinstance(event, TokenEvent):
                    tokens += event.token_ids
        assert tuple(tokens) == tuple(tokens_alone(request))
        assert engine.load().num_recoveries == 1
    finally:
        await engine.stop()
        first.resume()
        await first.die()
        await second.die()
