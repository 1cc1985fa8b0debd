"""More clients than there is room for, and clients that hold on to what they get: on real processes
and sockets, everybody else is served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from health_probe import probing

from chaos.probes import until_idle
from checkpoints import make_checkpoint
from integration.servers import CHANNEL_OPTIONS, Server, running_server
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

NUM_SLOTS, MAX_QUEUE_LEN, MAX_SEQ_LEN = 8, 64, 640
SLOW_READER_S = 2
# Ends what hangs.
WAIT_S = 600
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY, ACK = 4, 6, 7, 1


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, "llama", tokenizer=True)
    flags = {
        "--num-slots": NUM_SLOTS,
        "--max-queue-len": MAX_QUEUE_LEN,
        "--max-seq-len": MAX_SEQ_LEN,
        "--slow-reader-timeout": SLOW_READER_S,
        "--threads": 1,
    }
    words = [str(word) for flag in flags.items() for word in flag]
    with running_server(folder, *words) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left_behind(server):
    """Whatever a test does, all slots are free behind it, and the log tells of no fault."""
    log_begin = len(server.log)
    yield
    stub = server.stub
    # The server learns a little later than the clients that they have left.
    load = until_idle(stub, WAIT_S)
    assert (load.num_used_tokens, load.requests.error) == (0, 0)
    ended = load.requests
    assert ended.accepted == ended.stop + ended.length + ended.cancelled + ended.deadline
    slots = stub.ListSlots(pb.ListSlotsRequest(), timeout=WAIT_S).slots
    assert [slot.state for slot in slots] == [pb.SLOT_STATE_FREE] * NUM_SLOTS
    assert "Traceback" not in "".join(server.log[log_begin:])


def request(num_tokens: int = 20, **fields) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=range(3, 13))
    return pb.GenerateRequest(token_ids=ids, max_new_tokens=num_tokens, ignore_eos=True, **fields)


def heavy_request() -> pb.GenerateRequest:
    """Its answer has some MB, more than sockets and windows hold."""
    ids = pb.TokenIds(ids=[3 + i % 300 for i in range(300)])
    return pb.GenerateRequest(
        token_ids=ids, max_new_tokens=330, ignore_eos=True, logprobs=20, prompt_logprobs=20
    )


@contextlib.asynccontextmanager
async def channels_to(address: str, count: int, **options: int) -> AsyncIterator[list]:
    """So many channels, each with a connection of its own."""
    async with contextlib.AsyncExitStack() as stack:
        own = [(f"grpc.{name}", value) for name, value in options.items()]
        made = [
            grpc.aio.insecure_channel(address, [*CHANNEL_OPTIONS, *own, ("test.number", number)])
            for number in range(count)
        ]
        for channel in made:
            await stack.enter_async_context(channel)
        yield made


async def generate(channel: grpc.aio.Channel, asked: pb.GenerateRequest, timeout=WAIT_S) -> int:
    """The number of tokens that came, up to the end of the stream."""
    count = 0
    async for response in rpc.InferenceStub(channel).Generate(asked, timeout=timeout):
        count += len(response.delta.token_ids)
    return count


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    """Of the RetryInfo that the error must have."""
    metadata = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    info = error_details_pb2.RetryInfo()
    assert [detail for detail in status.details if detail.Unpack(info)]
    return info.retry_delay.ToNanoseconds() / 1e9


async def test_500_clients_at_once(server: Server):
    outcomes: Counter[str] = Counter()
    delays_s: list[float] = []

    async def client(channel: grpc.aio.Channel) -> None:
        try:
            assert await generate(channel, request(500)) == 500
            outcomes["answered"] += 1
        except grpc.aio.AioRpcError as error:
            outcomes[error.code().name] += 1
            delays_s.append(retry_delay_s(error))

    began = time.monotonic()
    with probing(server.address) as probe:
        async with channels_to(server.address, 20) as channels:
            await asyncio.gather(*(client(channels[i % 20]) for i in range(500)))
    took_ms = (time.monotonic() - began) * 1e3
    print(f"\n500 clients: {dict(outcomes)}; {probe}")
    assert sum(outcomes.values()) == 500
    assert outcomes["answered"] >= NUM_SLOTS + MAX_QUEUE_LEN
    assert outcomes["RESOURCE_EXHAUSTED"] == 500 - outcomes["answered"] > 0
    assert 0 < min(delays_s) <= max(delays_s) <= 60
    assert probe.num_bad == 0
    # It does not wait behind the clients. The promise is 100 ms on a machine of its own; this one
    # is shared, and may be slow.
    assert probe.percentile(99) < took_ms / 4


async def test_who_tries_again_when_told_is_served(server: Server):
    """All 200, with room for 72."""
    num_refused = 0

    async def client(channel: grpc.aio.Channel) -> int:
        nonlocal num_refused
        while True:
            try:
                return await generate(channel, request(300))
            except grpc.aio.AioRpcError as error:
                num_refused += 1
                await asyncio.sleep(retry_delay_s(error))

    async with channels_to(server.address, 10) as channels:
        async with asyncio.timeout(WAIT_S):
            counts = await asyncio.gather(*(client(channels[i % 10]) for i in range(200)))
    assert counts == [300] * 200
    assert num_refused > 0
    print(f"\n200 clients that try again: {num_refused} refusals")


async def test_clients_that_stop_reading_hold_nobody_up_and_are_cut_off(server: Server):
    # Or their libraries would take in some MB for them.
    small = {"http2.bdp_probe": 0, "http2.lookahead_bytes": 1 << 14}
    async with (
        channels_to(server.address, NUM_SLOTS, **small) as silent,
        channels_to(server.address, 1) as (reading,),
    ):
        before = await num_slow(reading)
        calls = [rpc.InferenceStub(one).Generate(heavy_request(), timeout=WAIT_S) for one in silent]
        for call in calls:
            assert (await call.read()).HasField("accepted")
        # They are in all slots, and give them back without having read on.
        assert await generate(reading, request(300)) == 300
        async with asyncio.timeout(WAIT_S):
            while await num_slow(reading) < before + NUM_SLOTS:
                pass
        statuses = [await end_of(call) for call in calls]
    assert {code for code, _ in statuses} == {grpc.StatusCode.ABORTED}
    assert {words[:35] for _, words in statuses} == {"the client has read nothing for 2 s"}


async def num_slow(channel: grpc.aio.Channel) -> int:
    load = await rpc.InferenceStub(channel).GetLoad(pb.GetLoadRequest(), timeout=WAIT_S)
    return load.requests.slow_reader


async def end_of(call) -> tuple[grpc.StatusCode, str]:
    """Of a stream, read as far as it comes."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


class Trickle:
    """A relay that passes so much on from clients, and all that comes back; until it is cut."""

    def __init__(self, address: str, bytes_per_s: int) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._turn = bytes_per_s // 50
        self._pumps: set[asyncio.Task] = set()
        self._listener: asyncio.Server | None = None

    async def start(self) -> str:
        """Its address."""
        self._listener = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return "{}:{}".format(*self._listener.sockets[0].getsockname())

    async def cut(self) -> None:
        """Ends all its connections."""
        assert self._listener is not None
        self._listener.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _relay(self, reader, writer) -> None:
        back_reader, back_writer = await asyncio.open_connection(self._host, int(self._port))
        for pump in (
            self._pump(reader, back_writer, self._turn, 1 / 50),
            self._pump(back_reader, writer, 1 << 16, 0),
        ):
            self._pumps.add(asyncio.create_task(pump))

    async def _pump(self, reader, writer, bytes_in_turn: int, pause_s: float) -> None:
        try:
            while data := await reader.read(bytes_in_turn):
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(pause_s)
        finally:
            writer.transport.abort()


async def test_a_body_that_trickles_in_holds_nobody_up(server: Server):
    """60 MB at 1 MB/s."""
    asked = pb.TokenizeRequest(text="a" * 60_000_000)
    trickle = Trickle(server.address, 1_000_000)
    async with (
        channels_to(await trickle.start(), 1) as (slow,),
        channels_to(server.address, 4) as channels,
    ):
        call = rpc.InferenceStub(slow).Tokenize(asked, timeout=WAIT_S)
        with probing(server.address) as probe:
            for _ in range(3):
                counts = await asyncio.gather(*(generate(one, request()) for one in channels))
                assert counts == [20] * 4
        assert not call.done()
        # The channel waits for its connection when it is closed.
        await trickle.cut()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
    print(f"\nbeside a trickle: {probe}")
    assert probe.num_bad == 0


async def test_connections_that_say_nothing(server: Server):
    """500 that never begin, 500 that have no call."""
    host, _, port = server.address.rpartition(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(500)]
    async with channels_to(server.address, 500) as idle:
        await asyncio.gather(*(asyncio.wait_for(one.channel_ready(), WAIT_S) for one in idle))
        async with channels_to(server.address, 1) as (channel,):
            with probing(server.address) as probe:
                assert await generate(channel, request()) == 20
            assert await generate(idle[250], request()) == 20
    for _, writer in silent:
        writer.close()
    assert probe.num_bad == 0


def frame(kind: int, flags: int = 0, payload: bytes = b"") -> bytes:
    """Of HTTP/2, on stream 0."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + bytes(4) + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    head = await reader.readexactly(9)
    return head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))


async def read_pongs(reader: asyncio.StreamReader, count: int) -> list[int]:
    """What the pings said, in order."""
    answered: list[int] = []
    async with asyncio.timeout(WAIT_S):
        while len(answered) < count:
            kind, flags, payload = await read_frame(reader)
            assert kind != GOAWAY, payload
            if kind == PING and flags & ACK:
                answered.append(struct.unpack(">Q", payload)[0])
    return sorted(answered)


async def test_no_client_trips_over_its_pings(server: Server):
    """Also one that sends 200 of them at once without a call, as no keepalive does."""
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    pings = [frame(PING, payload=struct.pack(">Q", number)) for number in range(200)]
    writer.write(PREFACE + frame(SETTINGS) + b"".join(pings))
    assert await read_pongs(reader, 200) == list(range(200))
    # All of them are answered before the server says what it thinks of them.
    writer.write(frame(PING, payload=struct.pack(">Q", 7)))
    assert await read_pongs(reader, 1) == [7]
    writer.close()


async def test_keepalive_of_an_eager_client(server: Server):
    """One that pings ten times a second all the while."""
    eager = {
        "keepalive_time_ms": 100,
        "keepalive_timeout_ms": 60_000,
        "keepalive_permit_without_calls": 1,
        "http2.max_pings_without_data": 0,
    }
    async with channels_to(server.address, 1, **eager) as (channel,):
        assert await generate(channel, request()) == 20
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        for _ in range(20):
            assert await generate(channel, request(200)) == 200
        # The same connection, or it would have ended.
        assert not watch.done()
        watch.cancel()


async def test_deadlines_of_50_ms_on_everything(server: Server):
    async def client(channel: grpc.aio.Channel) -> str:
        try:
            await generate(channel, request(500), timeout=0.05)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async with channels_to(server.address, 10) as channels:
        codes = Counter(await asyncio.gather(*(client(channels[i % 10]) for i in range(300))))
    print(f"\n300 clients with 50 ms: {dict(codes)}")
    assert set(codes) <= {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "OK"}
    assert codes["DEADLINE_EXCEEDED"] > 0


async def test_1000_watchers_of_health(server: Server):
    """All are told at once that a worker is lost, and that it is back."""
    asked = health_pb2.HealthCheckRequest(service="slotwise.v1.Inference")
    response = health_pb2.HealthCheckResponse
    async with channels_to(server.address, 4) as channels:
        stubs = [health_pb2_grpc.HealthStub(channel) for channel in channels]
        watches = [stubs[i % 4].Watch(asked, timeout=WAIT_S) for i in range(1000)]
        first = await asyncio.gather(*(watch.read() for watch in watches))
        assert {one.status for one in first} == {response.SERVING}
        assert await generate(channels[0], request()) == 20
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        lost = await asyncio.gather(*(watch.read() for watch in watches))
        assert {one.status for one in lost} == {response.NOT_SERVING}
        back = await asyncio.gather(*(watch.read() for watch in watches))
        assert {one.status for one in back} == {response.SERVING}
        for watch in watches:
            watch.cancel()
        assert await generate(channels[0], request()) == 20
