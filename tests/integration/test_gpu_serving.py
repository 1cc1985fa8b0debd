"""The whole chain on a GPU: the same tokens alone, in company, after cancels, after a death."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from gpu_driver import DEVICE, needs_gpus

from checkpoints import make_checkpoint
from integration.servers import Server, running_server
from slotwise.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.gpu, needs_gpus()]

VOCAB_SIZE = 4096
WAIT_S = 60
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 40960,
}
DRAWS = [
    pb.SamplingParams(temperature=0),
    pb.SamplingParams(temperature=0.8, seed=42),
    pb.SamplingParams(temperature=1.0, top_k=20, seed=7),
    pb.SamplingParams(temperature=1.2, top_p=0.9, seed=2**64 - 1),
    pb.SamplingParams(temperature=0.7, min_p=0.05, top_p=0.95, top_k=50, seed=0),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Eight slots of 32K positions on the first GPU."""
    folder: Path = tmp_path_factory.mktemp("model")
    make_checkpoint(
        folder, "qwen3", seed=5, dtype="bfloat16", device=DEVICE, tokenizer=True, **SHAPE
    )
    with running_server(folder, "--device", DEVICE, "--max-seq-len", "32768") as running:
        yield running


def request(index: int, length: int, num_new: int, draw: int = 0) -> pb.GenerateRequest:
    """`index` is the seed of the prompt."""
    ids = [
        3 + (7919 * (position + 31 * index) ** 2) % (VOCAB_SIZE - 3) for position in range(length)
    ]
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        sampling=DRAWS[draw % len(DRAWS)],
        max_new_tokens=num_new,
        ignore_eos=True,
    )


def tokens_of(server: Server, one: pb.GenerateRequest) -> list[int]:
    got = server.collect(one)
    assert got.finished is not None
    assert len(got.token_ids) == one.max_new_tokens
    return got.token_ids


def together(server: Server, requests: list[pb.GenerateRequest]) -> list[list[int]]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda one: tokens_of(server, one), requests))


def test_the_gpu_serves(server: Server) -> None:
    (worker,) = server.stub.GetServerInfo(pb.GetServerInfoRequest()).workers
    assert worker.device.startswith(DEVICE)
    assert (worker.weight_dtype, worker.kv_dtype) == ("bfloat16", "bfloat16")
    assert len(worker.self_tests) == 4
    assert all(test.passed for test in worker.self_tests), worker.self_tests


def test_alone_and_in_company(server: Server) -> None:
    """B19, B20: 24 requests of any length, alone, and then all at once on eight slots."""
    lengths = (1, 15, 17, 64, 127, 129, 300, 2050)
    requests = [
        request(index, lengths[index % len(lengths)], 20 + 3 * index, draw=index)
        for index in range(24)
    ]
    alone = [tokens_of(server, one) for one in requests]
    assert len({tuple(ids) for ids in alone}) > len(alone) // 2
    assert together(server, requests) == alone
    assert together(server, requests[::-1]) == alone[::-1]


def test_two_equal_prompts_in_one_step(server: Server) -> None:
    """B27: both go on as if alone, while others fill the slots around them."""
    twin = request(100, 4096, 500, draw=1)
    alone = tokens_of(server, twin)
    others = [request(101 + index, 700, 40, draw=index) for index in range(18)]
    with ThreadPoolExecutor(20) as pool:
        twins = [pool.submit(tokens_of, server, twin) for _ in range(2)]
        noise = [pool.submit(tokens_of, server, other) for other in others]
        assert [one.result(WAIT_S) for one in twins] == [alone, alone]
        assert all(one.result(WAIT_S) for one in noise)


def test_cancelled_in_the_middle_of_a_prompt(server: Server) -> None:
    """B13: the same prompt right after is as from a cold server, beside a stream that decodes."""
    long = request(200, 32_000, 8)
    beside = request(201, 100, 3000, draw=2)
    cold, stream = tokens_of(server, long), tokens_of(server, beside)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(tokens_of, server, beside)
        for delay in (0.0, 0.003, 0.01, 0.02, 0.03):
            call = server.stub.Generate(long, timeout=WAIT_S)
            assert next(iter(call)).WhichOneof("event") == "accepted"
            # The prompt is 16 chunks or more.
            time.sleep(delay)
            call.cancel()
            assert tokens_of(server, long) == cold
        assert running.result(WAIT_S) == stream


def test_a_long_prompt_does_not_starve_streams(server: Server) -> None:
    """B43: streams get a token beside every chunk of it."""
    prompt_len = 32_000
    long = request(400, prompt_len, 8)
    streams = [request(401 + index, 50, 4000, draw=index) for index in range(4)]
    times: list[list[float]] = [[] for _ in streams]
    started = threading.Semaphore(0)
    enough = threading.Event()

    def stream(index: int) -> None:
        call = server.stub.Generate(streams[index], timeout=WAIT_S)
        for response in call:
            if response.WhichOneof("event") == "delta":
                if not times[index]:
                    started.release()
                times[index] += [time.monotonic()] * len(response.delta.token_ids)
            if enough.is_set():
                call.cancel()
                return

    with ThreadPoolExecutor(len(streams)) as pool:
        futures = [pool.submit(stream, index) for index in range(len(streams))]
        for _ in streams:
            assert started.acquire(timeout=WAIT_S)
        begin, end = 0.0, 0.0
        for response in server.stub.Generate(long, timeout=WAIT_S):
            if response.WhichOneof("event") == "accepted":
                begin = time.monotonic()
            elif response.WhichOneof("event") == "delta" and not end:
                end = time.monotonic()
        enough.set()
        for future in futures:
            future.result(WAIT_S)
    chunks = prompt_len // server.stub.GetServerInfo(pb.GetServerInfoRequest()).max_step_tokens
    assert chunks >= 15
    for seen in times:
        # The clocks are the client's: the first and the last may be missed.
        assert sum(begin < moment < end for moment in seen) >= chunks - 3


def test_a_killed_worker_costs_no_stream_a_token(server: Server) -> None:
    """Prefill of prompt and tokens gives the bits that decode had written."""
    requests = [request(300 + index, 200 * index + 5, 2500, draw=index) for index in range(4)]
    want = [tokens_of(server, one) for one in requests]
    started = threading.Semaphore(0)

    def stream(one: pb.GenerateRequest) -> list[int]:
        ids: list[int] = []
        for response in server.stub.Generate(one, timeout=120):
            if response.WhichOneof("event") == "delta":
                if not ids:
                    started.release()
                assert response.delta.first_token_index == len(ids)
                ids += response.delta.token_ids
        return ids

    epoch = server.stub.GetServerInfo(pb.GetServerInfoRequest()).epoch
    with ThreadPoolExecutor(len(requests)) as pool:
        futures: list[Future[list[int]]] = [pool.submit(stream, one) for one in requests]
        for _ in futures:
            assert started.acquire(timeout=WAIT_S)
        os.kill(server.worker_pids()[-1], signal.SIGKILL)
        assert [future.result(WAIT_S) for future in futures] == want
    assert server.stub.GetServerInfo(pb.GetServerInfoRequest()).epoch == epoch + 1
