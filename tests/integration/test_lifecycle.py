"""Real processes that die, hang, drain, or cannot start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from checkpoints import make_checkpoint
from integration.servers import ANSWER_TIMEOUT_S, START_TIMEOUT_S, Server, running_server
from slotwise.v1 import inference_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
READY = "slotwise.v1.Inference"
WAIT_S = 300

# No recovery is given up, however slow the machine.
PATIENT = ("--recovery-timeout", str(WAIT_S))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=4096)
    return folder


def long_request(tokens: int = 1500, seed: int = 5) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[seed + 1, seed + 2, seed + 3]),
        sampling=pb.SamplingParams(temperature=1.0, seed=seed),
        max_new_tokens=tokens,
        ignore_eos=True,
    )


def health_of(server: Server, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(server.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S).status


class Watched:
    """Every state that Watch pushes for a service, in order."""

    def __init__(self, server: Server, service: str) -> None:
        stub = health_pb2_grpc.HealthStub(server.channel)
        self.states: list[int] = []
        self._changed = threading.Condition()
        self._call = stub.Watch(health_pb2.HealthCheckRequest(service=service))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for response in self._call:
                with self._changed:
                    self.states.append(response.status)
                    self._changed.notify_all()
        except grpc.RpcError:
            pass

    def wait_for(self, states: list[int], timeout: float = WAIT_S) -> None:
        """Until exactly these states came; a shorter list is a prefix."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.states) >= len(states), timeout), (
                self.states
            )
            assert self.states[: len(states)] == states


def streams_in_flight(server: Server, pool: ThreadPoolExecutor, count: int, tokens: int = 1500):
    """Starts `count` long streams; returns when each has its first token."""
    started = threading.Semaphore(0)

    def run(seed: int) -> list[int]:
        ids: list[int] = []
        for response in server.stub.Generate(long_request(tokens, seed), timeout=ANSWER_TIMEOUT_S):
            if response.WhichOneof("event") == "delta":
                if not ids:
                    started.release()
                assert response.delta.first_token_index == len(ids)
                ids += response.delta.token_ids
        return ids

    futures = [pool.submit(run, seed) for seed in range(count)]
    for _ in range(count):
        assert started.acquire(timeout=WAIT_S)
    return futures


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 1500), (2, 300)])
def test_a_killed_worker_costs_no_stream_a_token(tiny_model, ranks, tokens):
    """B34: not ready at once, alive all along, ready again after a step on all ranks."""
    flags = ("--max-seq-len", "2048", "--num-slots", "4", "--tp", str(ranks), "--threads", "1")
    flags += PATIENT
    with running_server(tiny_model, *flags) as server, ThreadPoolExecutor(4) as pool:
        want = [server.collect(long_request(tokens, seed)).token_ids for seed in range(4)]
        watched = Watched(server, READY)
        watched.wait_for([SERVING])
        futures = streams_in_flight(server, pool, 4, tokens)
        os.kill(server.worker_pids()[-1], signal.SIGKILL)
        watched.wait_for([SERVING, NOT_SERVING])
        assert health_of(server, "") == SERVING
        watched.wait_for([SERVING, NOT_SERVING, SERVING])
        assert [future.result(WAIT_S) for future in futures] == want
        assert server.stub.GetServerInfo(pb.GetServerInfoRequest()).epoch == 2
        assert len(server.worker_pids()) == ranks
        for rank in range(ranks):
            assert health_of(server, f"slotwise.worker/{rank}") == SERVING


def test_a_stopped_worker_is_noticed(tiny_model):
    """B35: silence while work is pending is not health; idleness is."""
    flags = ("--num-slots", "2", "--worker-timeout", "2", *PATIENT)
    with running_server(tiny_model, *flags) as server, ThreadPoolExecutor(3) as pool:
        want = [server.collect(long_request(seed=seed)).token_ids for seed in range(2)]
        watched = Watched(server, READY)
        watched.wait_for([SERVING])
        futures = streams_in_flight(server, pool, 2)
        os.kill(server.worker_pids()[0], signal.SIGSTOP)
        # Work is pending even if both were through by then.
        late = pool.submit(server.collect, long_request(50))
        watched.wait_for([SERVING, NOT_SERVING, SERVING])
        assert [future.result(WAIT_S) for future in futures] == want
        assert len(late.result(WAIT_S).token_ids) == 50


def test_sigterm_drains(tiny_model):
    """B41: what runs may finish, new requests are refused, nothing is left."""
    flags = ("--num-slots", "4", "--grace", str(WAIT_S))
    with running_server(tiny_model, *flags) as server, ThreadPoolExecutor(4) as pool:
        want = [server.collect(long_request(seed=seed)).token_ids for seed in range(4)]
        workers = server.worker_pids()
        watched = Watched(server, READY)
        watched.wait_for([SERVING])
        futures = streams_in_flight(server, pool, 4)
        server.process.send_signal(signal.SIGTERM)
        watched.wait_for([SERVING, NOT_SERVING])
        with pytest.raises(grpc.RpcError) as refused:
            server.collect(long_request())
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert [future.result(WAIT_S) for future in futures] == want
        assert server.process.wait(WAIT_S) == 0
        assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]


def test_a_passed_grace_ends_streams_unavailable(tiny_model):
    flags = ("--num-slots", "2", "--grace", "0.2", "--max-seq-len", "4096")
    with running_server(tiny_model, *flags) as server, ThreadPoolExecutor(2) as pool:
        request = long_request(4000)
        call = server.stub.Generate(request, timeout=WAIT_S)
        assert next(iter(call)).WhichOneof("event") == "accepted"
        ended = pool.submit(lambda: list(call))
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as cut:
            ended.result(WAIT_S)
        assert cut.value.code() == grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(WAIT_S) == 0


def failed_start(*flags: str) -> str:
    """Runs a server that cannot start; its standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "scheduler_service", "--host", "127.0.0.1", *flags],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        cwd="/",
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_port_in_use(tiny_model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in failed_start("--model", str(tiny_model), "--port", port)


def test_unknown_folder(tmp_path):
    missing = str(tmp_path / "nothing-here")
    assert missing in failed_start("--model", missing, "--port", "0")


def test_truncated_shard(tmp_path):
    make_checkpoint(tmp_path, "llama", tokenizer=True)
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1000])
    error = failed_start("--model", str(tmp_path), "--port", "0")
    assert shard.name in error


def test_unsupported_architecture(tmp_path):
    make_checkpoint(tmp_path, "llama", tokenizer=True)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text()
        .replace("LlamaForCausalLM", "MambaForCausalLM")
        .replace('"llama"', '"mamba"')
    )
    error = failed_start("--model", str(tmp_path), "--port", "0")
    assert "mamba" in error.lower()


def test_more_slots_than_memory(tiny_model):
    error = failed_start("--model", str(tiny_model), "--port", "0", "--num-slots", "100000000")
    assert "100000000" in error.replace(",", "") or "100,000,000" in error
    assert "fit" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(tiny_model):
    error = failed_start("--model", str(tiny_model), "--port", "0", "--device", "cuda")
    paragraph = error[error.index("error: ") :]
    assert paragraph.startswith("error: worker 0: ")
    assert "cuda" in paragraph


def test_two_servers_do_not_collide(tiny_model):
    with running_server(tiny_model) as one, running_server(tiny_model) as two:
        assert one.address != two.address
        assert one.collect(long_request(50)).token_ids == two.collect(long_request(50)).token_ids
