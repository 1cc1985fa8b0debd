"""Bodies to a real server, workers and all, over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
from fuzz.bodies import Body, BodyMaker
from fuzz.good_calls import good_calls
from fuzz.handlers import CALL_TIMEOUT_S, PROPER, describe
from fuzz.report import Report, resident_bytes
from health_probe import probing

from checkpoints import make_checkpoint
from integration.servers import CHANNEL_OPTIONS, Server, running_server
from slotwise.v1 import inference_pb2 as pb

NUM_CALLERS, NUM_CHANNELS = 24, 4
# Bytes that are no HTTP/2 at all, sent to the port meanwhile: one connection for so many bodies.
BODIES_PER_CONNECTION = 500
STREAMING = ("/Watch", "/Generate", "/Attach", "/Replay")
# In the log, one of these is a fault of the server.
FAULT_MARKS = ("Traceback", " ERROR ", " CRITICAL ", "Unexpected")


def run_over_wire(seed: int, numbers: range) -> Report:
    """Blocks until all bodies of these numbers are answered."""
    report = Report("bodies over sockets", seed)
    with tiny_server() as server, probing(server.address) as probe:
        pids = [server.process.pid, *server.worker_pids()]
        settled = numbers[: len(numbers) // 3]
        report.add(asyncio.run(_run(server.address, seed, settled)))
        before = [resident_bytes(pid) for pid in pids]
        rest = asyncio.run(_run(server.address, seed, numbers[len(settled) :]))
        report.add(rest)
        report.seconds += rest.seconds
        grown = [resident_bytes(pid) - size for pid, size in zip(pids, before, strict=True)]
        report.growth_bytes = max(grown)
        load = server.stub.GetLoad(pb.GetLoadRequest(), timeout=CALL_TIMEOUT_S)
        if load.num_running or load.num_waiting or load.requests.error or load.num_recoveries:
            report.faults.append(f"left behind: {load}")
    log = "".join(server.log)
    report.faults += [f"log: {line}" for line in server.log if any(m in line for m in FAULT_MARKS)]
    if server.process.returncode:
        report.faults.append(f"the server ended with {server.process.returncode}: {log[-2000:]}")
    if probe.num_bad:
        report.faults.append(f"{probe.num_bad} bad answers of health")
    report.notes.append(str(probe))
    return report


@contextlib.contextmanager
def tiny_server(*flags: str) -> Iterator[Server]:
    """Of random weights; a second of start."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        make_checkpoint(Path(folder), "llama", tokenizer=True)
        # What is kept of ended calls would look like a leak.
        sizes = ("--num-slots", "8", "--max-seq-len", "128", "--threads", "1", "--retention", "2")
        with running_server(Path(folder), *sizes, *flags) as server:
            yield server


async def _run(address: str, seed: int, numbers: Iterable[int]) -> Report:
    report, started = Report("", seed), time.monotonic()
    maker = BodyMaker(seed, good_calls())
    host, _, port = address.rpartition(":")
    left = iter(numbers)

    async def caller(channel: grpc.aio.Channel) -> None:
        for number in left:
            if number % BODIES_PER_CONNECTION == 0:
                await _send_noise(host, int(port), random.Random(f"{seed}/noise/{number}"))
            body = maker.body(number)
            code = await _code(channel, body)
            report.count += 1
            report.outcomes[code] += 1
            if code not in PROPER:
                report.faults.append(f"{code}: {describe(body)}")

    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        channels = [
            # Not one connection for all of them.
            grpc.aio.insecure_channel(address, [*CHANNEL_OPTIONS, ("fuzz.channel", number)])
            for number in range(NUM_CHANNELS)
        ]
        for channel in channels:
            await stack.enter_async_context(channel)
        callers = [
            group.create_task(caller(channels[number % NUM_CHANNELS]))
            for number in range(NUM_CALLERS)
        ]
        await asyncio.wait(callers)
    report.seconds = time.monotonic() - started
    return report


async def _code(channel: grpc.aio.Channel, body: Body) -> str:
    """How the call ends; of a stream without an end, how it begins."""
    try:
        if not body.method.endswith(STREAMING):
            await channel.unary_unary(body.method)(body.data, timeout=CALL_TIMEOUT_S)
            return "OK"
        call = channel.unary_stream(body.method)(body.data, timeout=CALL_TIMEOUT_S)
        while await call.read() is not grpc.aio.EOF:
            if body.method.endswith("/Watch"):
                call.cancel()
                return "OK"
        return "OK"
    except grpc.aio.AioRpcError as error:
        return error.code().name


async def _send_noise(host: str, port: int, rng: random.Random) -> None:
    """A connection that is none of gRPC's, or breaks off within a frame."""
    begin = rng.choice(
        [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"]
    )
    reader, writer = await asyncio.open_connection(host, port)
    with contextlib.suppress(OSError):
        writer.write(begin + rng.randbytes(rng.choice([0, 9, 100, 20_000])))
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(100), 0.05)
    writer.close()
