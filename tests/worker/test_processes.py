"""Two ranks as real processes: the tokens of one rank; a peer that dies is noticed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from worker_driver import Driver, free_address

from checkpoints import make_checkpoint
from slotwise.worker.v1 import worker_pb2, worker_pb2_grpc

PROMPT = tuple(range(20, 40))
NUM_NEW = 12
TIMEOUT_S = 90


def start(folder: Path, path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "worker", "--listen", f"unix:{path}", "--model", str(folder)]
    return subprocess.Popen([*command, "--threads", "1", "--exit-with-parent"])


@pytest.fixture
async def ranks(tmp_path: Path) -> AsyncIterator[list[tuple[subprocess.Popen[bytes], Any]]]:
    """(process, Run stream) of two configured ranks."""
    shape = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
    folder = make_checkpoint(tmp_path / "model", "llama", **shape)
    sockets = [tmp_path / f"{rank}.sock" for rank in range(2)]
    processes = [start(folder, path) for path in sockets]
    channels = [grpc.aio.insecure_channel(f"unix:{path}") for path in sockets]
    try:
        streams = [
            worker_pb2_grpc.WorkerStub(channel).Run(wait_for_ready=True) for channel in channels
        ]
        address = free_address()
        for rank, stream in enumerate(streams):
            setup = worker_pb2.Configure(
                epoch=1,
                rank=rank,
                world_size=2,
                rendezvous_address=address,
                num_slots=2,
                max_seq_len=64,
                max_step_tokens=32,
            )
            await stream.write(worker_pb2.RunRequest(configure=setup))
        for stream in streams:
            while not (await asyncio.wait_for(stream.read(), TIMEOUT_S)).HasField("configured"):
                pass
        yield list(zip(processes, streams, strict=True))
    finally:
        for channel in channels:
            await channel.close()
        for process in processes:
            process.kill()
            process.wait()


def prefill() -> worker_pb2.Row:
    setup = worker_pb2.SlotSetup(top_p=1.0, temperature=0.9, seed=5, max_len=len(PROMPT) + NUM_NEW)
    chunk = worker_pb2.PrefillChunk(token_ids=PROMPT, sample=True, setup=setup)
    return worker_pb2.Row(slot=1, generation=1, prefill=chunk)


async def send(stream: Any, step_id: int, row: worker_pb2.Row, num_steps: int = 1) -> None:
    command = worker_pb2.StepCommand(epoch=1, step_id=step_id, num_steps=num_steps, rows=[row])
    await stream.write(worker_pb2.RunRequest(step=command))


async def test_two_processes(
    ranks: list[tuple[subprocess.Popen[bytes], Any]], tmp_path: Path
) -> None:
    expected = Driver(tmp_path / "model", max_seq_len=64).generate(
        PROMPT, NUM_NEW, temperature=0.9, seed=5
    )
    decode = worker_pb2.Row(slot=1, generation=1, decode=worker_pb2.DecodeRow())
    streams = [stream for _, stream in ranks]
    for stream in streams:
        await send(stream, 1, prefill())
        await send(stream, 2, decode, num_steps=NUM_NEW - 1)
    tokens: list[int] = []
    for _ in range(2):
        first, second = [
            (await asyncio.wait_for(stream.read(), TIMEOUT_S)).step_result for stream in streams
        ]
        assert first.digest == second.digest
        assert not second.rows, "only rank 0 sends tokens"
        tokens += first.rows[0].token_ids
    assert tokens == expected

    # A peer that is gone fails the step, and does not hang it.
    process, _ = ranks[1]
    process.kill()
    process.wait()
    row = prefill()
    row.generation = 2
    await send(streams[0], 3, row)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(streams[0].read(), TIMEOUT_S)
    assert caught.value.code() == grpc.StatusCode.ABORTED
    assert "step 3 failed" in (caught.value.details() or "")
