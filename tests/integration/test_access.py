"""Callers told apart by tokens, and TLS on every connection, through the whole service."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from certificates import Authority, Pair

from checkpoints import make_checkpoint
from integration.front import WAIT_S, Front, rest, running_front
from integration.servers import running_server
from integration.streams import Generation
from scheduler_service.auth import Callers
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

ALICE = {"metadata": (("authorization", "Bearer alice-0123456789abcdef"),)}
BOB = {"metadata": (("authorization", "Bearer bob-0123456789abcdef"),)}
OPERATOR = {"metadata": (("authorization", "Bearer operator-0123456789"),)}
ENTRIES = [
    {"name": "alice", "token": "alice-0123456789abcdef", "max_running": 1, "max_waiting": 1},
    {"name": "bob", "token": "bob-0123456789abcdef"},
    {"name": "root", "token": "operator-0123456789", "operator": True},
]


def write_tokens(folder: Path) -> Path:
    path = folder / "tokens.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(ENTRIES))
    return path


@pytest.fixture
async def front(front_model, tmp_path) -> AsyncIterator[Front]:
    """Two slots; alice may have one of them."""
    callers = Callers(write_tokens(tmp_path))
    async with running_front(front_model, tmp_path, num_slots=2, callers=callers) as running:
        yield running


def endless(request_id: str) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=[5])
    return pb.GenerateRequest(
        request_id=request_id, token_ids=ids, max_new_tokens=200, ignore_eos=True
    )


async def started(front: Front, request_id: str, who: dict) -> grpc.aio.UnaryStreamCall:
    call = front.stub.Generate(endless(request_id), timeout=WAIT_S, **who)
    assert (await call.read()).HasField("accepted")
    return call


async def until_running(front: Front, count: int) -> pb.GetLoadResponse:
    async with asyncio.timeout(WAIT_S):
        while True:
            load = await front.stub.GetLoad(pb.GetLoadRequest(), timeout=WAIT_S, **BOB)
            if load.num_running == count:
                return load


async def test_a_request_is_its_callers_own(front):
    front.hold()
    running = await started(front, "mine", ALICE)
    for call in (
        front.stub.Cancel(pb.CancelRequest(request_id="mine"), timeout=WAIT_S, **BOB),
        front.stub.Attach(pb.AttachRequest(request_id="mine"), timeout=WAIT_S, **BOB),
        front.stub.Replay(pb.ReplayRequest(request_id="mine"), timeout=WAIT_S, **BOB),
        # An operator may cancel and repeat it, not read it.
        front.stub.Attach(pb.AttachRequest(request_id="mine"), timeout=WAIT_S, **OPERATOR),
    ):
        error = await front.error(call)
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "another caller's" in error.details()
    front.release()
    got = Generation()
    got.add(pb.GenerateResponse(accepted=pb.Accepted()))
    for response in await rest(running):
        got.add(response)
    got.check_ended()
    assert len(got.token_ids) == 200


async def test_owners_and_operators_cancel(front):
    front.hold()
    for who in (ALICE, OPERATOR):
        running = await started(front, "mine", ALICE)
        await front.stub.Cancel(pb.CancelRequest(request_id="mine"), timeout=WAIT_S, **who)
        last = (await rest(running))[-1]
        assert last.finished.finish_reason == pb.FINISH_REASON_CANCELLED


async def test_limits_of_a_token_bind_its_caller_alone(front):
    meter = front.hold()
    await started(front, "a1", ALICE)
    await until_running(front, 1)
    await started(front, "a2", ALICE)
    error = await front.error(front.stub.Generate(endless("a3"), timeout=WAIT_S, **ALICE))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    # Behind alice's second, which may not run yet.
    await started(front, "b1", BOB)
    # What was sent before is done; slots are given in the next command.
    meter.allow(2)
    load = await until_running(front, 2)
    assert load.num_waiting == 1
    front.release()


@contextmanager
def secure_worker(folder: Path, model: Path, pair: Pair, ca: Authority) -> Iterator[str]:
    """A worker process that listens on TCP and wants certificates; its address."""
    command = [sys.executable, "-m", "worker", "--listen", "127.0.0.1:0", "--model", str(model)]
    command += ["--threads", "1", "--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    command += ["--tls-client-ca", str(ca.path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            yield next(found[1] for line in lines if (found := re.search(r"on (127.*)\n", line)))
        finally:
            process.kill()


def test_nothing_goes_in_the_clear(tmp_path):
    model = tmp_path / "tiny"
    make_checkpoint(model, "llama", tokenizer=True)
    inner, outer = Authority(tmp_path, "inner"), Authority(tmp_path, "outer")
    own, port = inner.client("scheduler"), outer.pair("port")
    flags = ["--tls-cert", str(port.cert), "--tls-key", str(port.key)]
    flags += ["--tokens", str(write_tokens(tmp_path)), "--max-seq-len", "64"]
    flags += ["--workers-tls-ca", str(inner.path), "--workers-tls-cert", str(own.cert)]
    flags += ["--workers-tls-key", str(own.key)]
    with secure_worker(tmp_path, model, inner.pair("worker"), inner) as address:
        with running_server(model, "--workers", address, *flags) as server:
            credentials = grpc.ssl_channel_credentials(outer.content)
            with grpc.secure_channel(server.address, credentials) as channel:
                stub = rpc.InferenceStub(channel)
                request = pb.GenerateRequest(text="a b", max_new_tokens=4, ignore_eos=True)
                answer = stub.Complete(request, timeout=WAIT_S, **BOB)
                assert answer.choices[0].finished.usage.completion_tokens == 4
                assert code_of(stub.Complete, request) is grpc.StatusCode.UNAUTHENTICATED
            assert code_of(server.stub.Complete, request, **BOB) is grpc.StatusCode.UNAVAILABLE
        assert not [line for line in server.log if "0123456789" in line]
        assert not [line for line in server.log if "WARNING" in line and "TLS" in line]


def code_of(method: grpc.UnaryUnaryMultiCallable, request: object, **who) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        method(request, timeout=WAIT_S, **who)
    return caught.value.code()
