"""SIGTERM to every process at once, once and twice: nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest

from chaos.readers import make_requests, undisturbed
from chaos.service import Service, check_nothing_left, dial, poll, shared_memory
from checkpoints import make_checkpoint
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

STREAMS = 4
FLAGS = ("--tp", "2", "--threads", "1", "--num-slots", str(STREAMS))
WAIT_S = 300


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=4096)


@contextlib.contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[Service]:
    service = Service(model, folder, (*FLAGS, *flags))
    try:
        service.start()
        service.wait_ready()
        yield service
    finally:
        service.end()


def long_requests(num_tokens: int) -> list[pb.GenerateRequest]:
    """Of one answer each."""
    return make_requests(random.Random(3), 3, range(num_tokens, num_tokens + 1))


@contextlib.contextmanager
def streams_of(
    service: Service, requests: list[pb.GenerateRequest]
) -> Iterator[list[Future[list[int]]]]:
    """Streams past their first tokens; each gives all of them, or the error that it ends with."""
    with dial(service.address) as channel, ThreadPoolExecutor(STREAMS) as pool:
        stub = rpc.InferenceStub(channel)
        calls = [stub.Generate(request, timeout=WAIT_S) for request in requests]
        begun = [_until_first_token(call) for call in calls]
        yield [pool.submit(_rest, *one) for one in zip(calls, begun, strict=True)]


def _until_first_token(call: grpc.Call) -> list[int]:
    return next(list(one.delta.token_ids) for one in call if one.HasField("delta"))


def _rest(call: grpc.Call, ids: list[int]) -> list[int]:
    for response in call:
        ids += response.delta.token_ids
    return ids


def everybody(service: Service) -> list[int]:
    """As systemd and a container's stop see them: every process of the service."""
    tree = psutil.Process(service.pid).children(recursive=True)
    service.pids |= {one.pid for one in tree}
    return [service.pid, *(one.pid for one in tree)]


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_drains(tiny_model, tmp_path, number):
    """B41: streams end whole although their workers got the signal too; then nothing is left."""
    requests = long_requests(450)
    with contextlib.ExitStack() as at_end:
        service = at_end.enter_context(serving(tiny_model, tmp_path, "--grace", str(WAIT_S)))
        wants = undisturbed(service.address, requests, STREAMS)
        streams = at_end.enter_context(streams_of(service, requests))
        pids = everybody(service)
        used = shared_memory(pids)
        signal_all(pids, number)
        got = [stream.result(WAIT_S) for stream in streams]
        assert got == [want.generation.token_ids for want in wants]
        assert service.wait_end() == 0, service.last_words()
        check_nothing_left(service)
        assert not [name for name in used if os.path.exists(name)]
    log = service.log_file.read_text()
    assert "Traceback" not in log, log
    assert "cannot schedule new futures" not in log, log


def test_a_second_signal_to_all_ends_at_once(tiny_model, tmp_path):
    """B41: whatever the grace, streams end UNAVAILABLE, and nothing is left."""
    with (
        serving(tiny_model, tmp_path, "--grace", "3600") as service,
        streams_of(service, long_requests(4000)) as streams,
    ):
        pids = everybody(service)
        signal_all(pids, signal.SIGTERM)
        # Two that come at once are one.
        poll(lambda: "draining" in service.log_file.read_text(), WAIT_S, "the drain begins")
        signal_all(pids, signal.SIGTERM)
        assert service.wait_end() == 0, service.last_words()
        for stream in streams:
            error = stream.exception(WAIT_S)
            assert isinstance(error, grpc.RpcError)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        check_nothing_left(service)


def test_what_a_killed_scheduler_left_goes_with_the_next(tiny_model, tmp_path):
    """Its workers end with it; its folder of sockets is removed by the next scheduler."""
    with serving(tiny_model, tmp_path) as service:
        service.ranks()
        service.kill()
        service.wait_ready()
        with dial(service.address) as channel:
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), max_new_tokens=3)
            rpc.InferenceStub(channel).Complete(request, timeout=WAIT_S)
        assert service.stop() == 0
        check_nothing_left(service)
