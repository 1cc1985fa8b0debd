"""Run streams to a worker process: a message that is none, or not what is due, ends a stream."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
from fuzz.report import Report, resident_bytes
from fuzz.worker_commands import BEGIN, MAX_SEQ_LEN, command_bytes

from checkpoints import make_checkpoint
from slotwise.worker.v1 import worker_pb2 as pb

RUN = "/slotwise.worker.v1.Worker/Run"
START_TIMEOUT_S = 600.0
# A fuzzed set-up may wait for peers that never come; then the stream is left.
STREAM_TIMEOUT_S = 5.0
PROPER = {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "left"}
CONFIGURE = pb.RunRequest(
    configure=pb.Configure(epoch=1, world_size=1, num_slots=4, max_seq_len=MAX_SEQ_LEN)
)


def run_over_streams(seed: int, numbers: range) -> Report:
    """Blocks until each of these streams has ended."""
    report, started = Report("streams to a worker process", seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        make_checkpoint(folder / "model", "llama")
        address, log = f"unix:{folder}/worker.sock", folder / "log"
        command = [sys.executable, "-m", "worker", "--model", str(folder / "model")]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--listen", address, "--threads", "1"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(os.environ),
            )
            try:
                asyncio.run(_run(address, process.pid, numbers, report))
            finally:
                alive = process.poll() is None
                process.terminate()
                process.wait(START_TIMEOUT_S)
        lines = log.read_text().splitlines()
        report.faults += [f"log: {line}" for line in lines if "Traceback" in line or "bug" in line]
        if not alive or process.returncode:
            report.faults.append(f"the worker ended with {process.returncode}: {lines[-3:]}")
    report.count, report.seconds = len(numbers), time.monotonic() - started
    return report


async def _run(address: str, pid: int, numbers: range, report: Report) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), START_TIMEOUT_S)
        before = 0
        for number in numbers:
            code = await _stream(channel, report.seed, number)
            report.outcomes[code] += 1
            if code not in PROPER:
                report.faults.append(f"stream {number}: {code}")
            if number == numbers[len(numbers) // 4]:
                before = resident_bytes(pid)
        report.growth_bytes = resident_bytes(pid) - before


async def _stream(channel: grpc.aio.Channel, seed: int, number: int) -> str:
    """How it ends."""
    rng = random.Random(f"{seed}/stream/{number}")
    call = channel.stream_stream(RUN)(timeout=STREAM_TIMEOUT_S)
    try:
        if rng.random() < 0.7:
            await call.write(CONFIGURE.SerializeToString())
            while not pb.RunResponse.FromString(await call.read()).HasField("configured"):
                pass
            await call.write(BEGIN.SerializeToString())
            await call.read()
        await call.write(command_bytes(seed, number))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    code = await call.code()
    return "left" if code is grpc.StatusCode.DEADLINE_EXCEEDED else code.name
