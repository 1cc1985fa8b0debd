"""`slotwise bench gateway`: what the OpenAI gateway costs, beside gRPC on the same server."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, TypeAlias
from urllib.parse import urlsplit

import grpc
import psutil
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from slotwise.v1 import inference_pb2 as pb
from slotwise_client import AsyncClient, Client, ModelInfo

from .bench_files import JsonFileOption, ModelOption, check_files, write_json_file
from .latency import Timeline
from .measure import Run, Spread, Work, summary
from .output import CliError, Output, Report
from .serve import (
    DeviceOption,
    DtypeOption,
    JsonFlag,
    ThreadsOption,
    TpOption,
    model_folder,
    server_flags,
)
from .server_process import ServerProcess, running_server

GRPC, GATEWAY = "grpc", "gateway"
TIMEOUT_S: Final = 600.0
# Of the body's last event, and of the body in chunks; nothing else ends like this.
END: Final = b"\n\r\n0\r\n\r\n"

# Reads one answer to its end; gives when its first and last token came, and their number.
Reader: TypeAlias = Callable[[Sequence[int], int], Awaitable[tuple[float, float, int]]]


@dataclass(frozen=True, slots=True)
class _Round:
    """All streams of one way at once, and the CPU time they took."""

    run: Run
    client_cpu_s: float
    gateway_cpu_s: float

    @property
    def num_tokens(self) -> int:
        return sum(timeline.num_tokens for timeline in self.run.timelines)


def gateway(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    tp: TpOption = None,
    threads: ThreadsOption = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    new_tokens: Annotated[int, typer.Option("--output-tokens", min=2)] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each way, by turns.")] = 10,
    json_file: JsonFileOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure tokens/s and TTFT through the OpenAI gateway and through gRPC, by turns.

    Both ways lead to the same server, with the same prompts, and are read by light clients that
    take no message apart before the answer has ended.
    """
    check_files(json_file, None)
    output = Output(as_json)
    work = Work(prompt_tokens, new_tokens)
    flags = server_flags(device=device, dtype=dtype, tp=tp, threads=threads)
    flags += server_flags(num_slots=concurrency, max_seq_len=prompt_tokens + new_tokens)
    with output.progress() as report:
        checkpoint = model_folder(model or "demo", report)
        with running_server(checkpoint, flags, report) as address:
            with Client(address) as client:
                info, server = client.model_info(timeout=60), client.server_info(timeout=60)
            with _running_gateway(address, report) as (url, pid):
                measuring = _measure(address, url, pid, work, info, concurrency, repeats, report)
                rounds = asyncio.run(measuring)
    pairs = zip(rounds[GRPC], rounds[GATEWAY], strict=True)
    ratios = [mine.run.tokens_per_s / other.run.tokens_per_s for other, mine in pairs]
    result = {
        "model": info.name,
        "device": server.workers[0].device,
        "weight_dtype": server.workers[0].weight_dtype,
        "concurrency": concurrency,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "repeats": repeats,
        **{name: _summary(of_one) for name, of_one in rounds.items()},
        "gateway_cpu_us_per_token": asdict(
            Spread.of([one.gateway_cpu_s * 1e6 / one.num_tokens for one in rounds[GATEWAY]])
        ),
        # Of the tokens/s of each pair of rounds.
        "ratio": asdict(Spread.of(ratios)),
    }
    write_json_file(json_file, result)
    if as_json:
        output.json(result)
    else:
        _show(result, output)


@contextmanager
def _running_gateway(server: str, report: Report) -> Iterator[tuple[str, int]]:
    """A gateway on a free port; its URL and its process."""
    command = [sys.executable, "-m", "slotwise_gateway", "--server", server, "--port", "0"]
    command += ["--events", "--log-level", "warning"]
    process = ServerProcess(command, lambda line: None)
    try:
        yield str(process.wait_ready(report)["address"]), process.pid
    finally:
        process.stop()


async def _measure(
    address: str,
    url: str,
    gateway_pid: int,
    work: Work,
    model: ModelInfo,
    concurrency: int,
    repeats: int,
    report: Report,
) -> dict[str, list[_Round]]:
    """By turns, and each pair in the other order, so that drift meets both alike."""
    rounds: dict[str, list[_Round]] = {GRPC: [], GATEWAY: []}
    process = psutil.Process(gateway_pid)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(address))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        readers: dict[str, list[Reader]] = {
            GRPC: [_grpc_reader(channel)] * concurrency,
            GATEWAY: [
                await stack.enter_async_context(_http_reader(url, model.name))
                for _ in range(concurrency)
            ],
        }
        for repeat in range(-1, repeats):
            prompts = work.prompts(model, concurrency, seed=repeat + 2)
            for name in (GRPC, GATEWAY) if repeat % 2 else (GATEWAY, GRPC):
                report(f"{name}, round {repeat + 1} of {repeats}", 0, 0)
                await client.flush_cache(timeout=60)
                one = await _round(readers[name], prompts, work.new_tokens, process)
                # The first one warms up.
                if repeat >= 0:
                    rounds[name].append(one)
    return rounds


async def _round(
    readers: Sequence[Reader],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    gateway_process: psutil.Process,
) -> _Round:
    gateway_before, client_before = _cpu_s(gateway_process), time.process_time()
    sent = time.perf_counter()
    reads = [read(prompt, new_tokens) for read, prompt in zip(readers, prompts, strict=True)]
    ends = await asyncio.gather(*reads)
    client_cpu_s = time.process_time() - client_before
    gateway_cpu_s = _cpu_s(gateway_process) - gateway_before
    for _, _, num_tokens in ends:
        if num_tokens != new_tokens:
            raise CliError(f"an answer has {num_tokens} tokens where {new_tokens} were asked for")
    timelines = tuple(
        Timeline(sent, ((first, 1), (last, num_tokens - 1))) for first, last, num_tokens in ends
    )
    return _Round(Run(timelines, 0.0), client_cpu_s, gateway_cpu_s)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _grpc_reader(channel: grpc.aio.Channel) -> Reader:
    generate = channel.unary_stream(
        "/slotwise.v1.Inference/Generate",
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )

    async def read(prompt: Sequence[int], new_tokens: int) -> tuple[float, float, int]:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(temperature=0),
            max_new_tokens=new_tokens,
            ignore_eos=True,
        )
        first = last = 0.0
        num_tokens = 0
        async for response in generate(request, timeout=TIMEOUT_S):
            last = time.perf_counter()
            if response.HasField("delta"):
                num_tokens += len(response.delta.token_ids)
                first = first or last
        return first, last, num_tokens

    return read


@asynccontextmanager
async def _http_reader(url: str, model: str) -> AsyncIterator[Reader]:
    """On a connection of its own, which it keeps."""
    parts = urlsplit(url)
    source, sink = await asyncio.open_connection(parts.hostname, parts.port)

    async def read(prompt: Sequence[int], new_tokens: int) -> tuple[float, float, int]:
        sink.write(_request(model, prompt, new_tokens))
        async with asyncio.timeout(TIMEOUT_S):
            head = await source.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200 "):
                raise CliError(f"the gateway answered {head.splitlines()[0].decode()}")
            first = last = 0.0
            pieces: list[bytes] = []
            end = b""
            while end != END:
                pieces.append(await source.read(1 << 16))
                last = time.perf_counter()
                first = first or last
                if not pieces[-1]:
                    raise CliError("the gateway closed the connection in the middle of an answer")
                end = (end + pieces[-1])[-len(END) :]
        return first, last, _num_tokens(b"".join(pieces))

    try:
        yield read
    finally:
        sink.close()


def _request(model: str, prompt: Sequence[int], new_tokens: int) -> bytes:
    body = {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": new_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _num_tokens(stream: bytes) -> int:
    """As the stream's last event but one says; 0 when it did not end well."""
    events = [line for line in stream.split(b"\r\n") if line.startswith(b"data: ")]
    lines = [line for event in events for line in event.split(b"\n") if line]
    if len(lines) < 2 or lines[-1] != b"data: [DONE]":
        return 0
    usage = json.loads(lines[-2].removeprefix(b"data: ")).get("usage") or {}
    return int(usage.get("completion_tokens", 0))


def _summary(rounds: Sequence[_Round]) -> dict[str, Any]:
    return {
        **summary([one.run for one in rounds]),
        "client_cpu_us_per_token": asdict(
            Spread.of([one.client_cpu_s * 1e6 / one.num_tokens for one in rounds])
        ),
    }


def _show(result: dict[str, Any], output: Output) -> None:
    table = Table(box=SIMPLE_HEAD)
    for title in ("", "tok/s", "spread", "TTFT ms", "TTFT p90 ms", "client us/token"):
        table.add_column(title, justify="right" if title else "left")
    for name, title in ((GRPC, "gRPC"), (GATEWAY, "gateway")):
        row = result[name]
        speed = Spread(**row["tokens_per_s"])
        table.add_row(
            title,
            f"{speed.median:.1f}",
            f"{speed.min:.1f} to {speed.max:.1f}",
            f"{row['ttft_ms_p50']:.2f}",
            f"{row['ttft_ms_p90']:.2f}",
            f"{row['client_cpu_us_per_token']['median']:.0f}",
        )
    output.line(
        f"{result['model']} on {result['device']}, {result['weight_dtype']}: "
        f"{result['concurrency']} streams of {result['prompt_tokens']} + {result['new_tokens']} "
        f"tokens, {result['repeats']} rounds"
    )
    output.table(table)
    ratio, cpu = result["ratio"], result["gateway_cpu_us_per_token"]
    output.line(
        f"The gateway gives {ratio['median']:.3f} of the tokens/s of gRPC (single rounds "
        f"{ratio['min']:.3f} to {ratio['max']:.3f}), for {cpu['median']:.0f} us of CPU time per "
        f"token ({cpu['min']:.0f} to {cpu['max']:.0f})."
    )
