"""`python -m scheduler_service` as a process: its events, its errors, its signals. Fake workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_server
import grpc
import psutil
import pytest
from free_ports import fixed_port
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizer_files import write_model

from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

WAIT_S = 300
ENDLESS = 1_000_000


class Program:
    """A started program whose standard output is read line by line."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        self.log: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def event(self, name: str) -> dict:
        """The next event of this name."""
        while line := self.line():
            event = json.loads(line)
            if event["event"] == name:
                return event
        raise AssertionError("".join(self.log))

    def wait_for_log(self, words: str) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: any(words in line for line in self.log), WAIT_S)
        assert found, "".join(self.log)

    def end(self) -> int:
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.log.append(line)
                self._changed.notify_all()


@contextlib.contextmanager
def program(*command: str) -> Iterator[Program]:
    started = Program(*command)
    try:
        yield started
    finally:
        started.kill()


@pytest.fixture
def model(tmp_path) -> Path:
    return write_model(tmp_path, vocab_size=1000, max_position_embeddings=2 * ENDLESS)


@pytest.fixture
def worker(tmp_path) -> Iterator[str]:
    address = f"unix:{tmp_path}/worker.sock"
    with program(fake_server.__file__, "--listen", address) as running:
        assert "listens" in running.line()
        yield address


@contextlib.contextmanager
def serving(model: Path, worker: str, *flags: str) -> Iterator[tuple[Program, rpc.InferenceStub]]:
    command = ["-m", "scheduler_service", "--model", str(model), "--workers", worker, "--events"]
    more = ["--port", "0", "--max-seq-len", str(2 * ENDLESS), "--num-slots", "2", *flags]
    with program(*command, *more) as running:
        address = running.event("ready")["address"]
        with grpc.insecure_channel(address) as channel:
            yield running, rpc.InferenceStub(channel)


def request(num_new: int) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=[5])
    return pb.GenerateRequest(
        token_ids=ids, max_new_tokens=num_new, ignore_eos=True, omit_text=True
    )


def code_of(call) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code()


def test_events_tell_of_loading_and_readiness(model, worker):
    command = ["-m", "scheduler_service", "--model", str(model), "--workers", worker, "--events"]
    with program(*command, "--port", "0", "--log-format", "json") as running:
        loading = running.event("loading")
        assert (loading["stage"], loading["done"], loading["total"]) == ("weights", 1, 2)
        ready = running.event("ready")
        assert ready["model"] == model.name
        assert ready["address"].startswith("127.0.0.1:")
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 0
        assert running.line() == ""
        assert [json.loads(line)["level"] for line in running.log]


def test_sigterm_while_the_workers_are_not_there(model, tmp_path):
    nowhere = f"unix:{tmp_path}/nobody.sock"
    command = ["-m", "scheduler_service", "--model", str(model), "--workers", nowhere]
    with program(*command, "--port", "0") as running:
        running.wait_for_log("listening")
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_process_for_trials_ends_with_the_server(model, worker, number):
    with serving(model, worker) as (running, stub):
        asked = pb.GenerateRequest(text="a", regex="(abc)*", max_new_tokens=2)
        stub.Complete(asked, timeout=WAIT_S)
        (trial,) = psutil.Process(running.process.pid).children()
        there = [trial, *trial.children()]
        running.process.send_signal(number)
        running.end()
        _, left = psutil.wait_procs(there, WAIT_S)
        assert not left


def test_health_answers_before_the_workers_are_there(model, tmp_path):
    """B36."""
    nowhere = f"unix:{tmp_path}/nobody.sock"
    port = str(fixed_port())
    command = ["-m", "scheduler_service", "--model", str(model), "--workers", nowhere]
    with program(*command, "--port", port) as running:
        running.wait_for_log("listening")
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            got = {
                name: health.Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S)
                for name in ("", "slotwise.v1.Inference", "slotwise.worker/0")
            }
            stub = rpc.InferenceStub(channel)
            assert code_of(stub.Generate(request(1), timeout=WAIT_S)) is (
                grpc.StatusCode.UNAVAILABLE
            )
    assert [answer.status for answer in got.values()] == [1, 2, 2]


def test_a_drain_with_streams_running(model, worker):
    """B41: those that end within the grace do, a new one is refused, the exit is clean."""
    with serving(model, worker) as (running, stub), ThreadPoolExecutor(1) as pool:
        call = stub.Generate(request(3000), timeout=WAIT_S)
        next(call)
        ended = pool.submit(lambda: list(call))
        running.process.send_signal(signal.SIGTERM)
        running.wait_for_log("draining")
        refused = stub.Generate(request(1), timeout=WAIT_S)
        assert code_of(refused) is grpc.StatusCode.UNAVAILABLE
        assert ended.result(WAIT_S)[-1].finished.usage.completion_tokens == 3000
        assert running.end() == 0


def test_a_passed_grace_ends_the_streams(model, worker):
    """B41, grace too short."""
    with serving(model, worker, "--grace", "0.2") as (running, stub):
        call = stub.Generate(request(ENDLESS), timeout=WAIT_S)
        next(call)
        running.process.send_signal(signal.SIGTERM)
        assert code_of(call) is grpc.StatusCode.UNAVAILABLE
        assert running.end() == 0


def test_a_second_signal_ends_at_once(model, worker):
    """B41, in spite of a long grace."""
    with serving(model, worker, "--grace", "3600") as (running, stub):
        call = stub.Generate(request(ENDLESS), timeout=WAIT_S)
        next(call)
        running.process.send_signal(signal.SIGTERM)
        running.wait_for_log("draining")
        running.process.send_signal(signal.SIGTERM)
        assert code_of(call) is grpc.StatusCode.UNAVAILABLE
        assert running.end() == 0


def failed_start(*flags: str, status: int = 1) -> str:
    """Standard error of a start that fails."""
    with program("-m", "scheduler_service", *flags) as running:
        assert running.end() == status
        error = "".join(running.log)
    assert "Traceback" not in error
    assert "error: " in error
    return error


def test_starts_that_fail_say_why(model, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        error = failed_start("--model", str(model), "--workers", "unix:/x", "--port", port)
        assert f"127.0.0.1:{port}: Address already in use" in error
    missing = os.path.join(tmp_path, "missing")
    assert missing in failed_start("--model", missing, "--workers", "unix:/x", "--port", "0")
    error = failed_start("--model", str(model), "--num-slots", "0", status=2)
    assert "num_slots is 0" in error


def test_workers_of_another_model_are_refused(tmp_path, worker):
    model = write_model(tmp_path, vocab_size=999)
    error = failed_start("--model", str(model), "--workers", worker, "--port", "0")
    assert "vocabulary of 1000" in error
    assert "999" in error
