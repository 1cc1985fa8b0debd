"""Real servers for the tests: the scheduler process, its workers, a stub to talk to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from integration.streams import Generation
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

# They end what hangs, on a slow and busy machine too.
START_TIMEOUT_S = 600
ANSWER_TIMEOUT_S = 600
STOP_TIMEOUT_S = 180
MESSAGE_BYTES = 64 << 20
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
]


@dataclass
class Server:
    """A running `python -m scheduler_service` and what it printed."""

    process: subprocess.Popen[str]
    address: str
    events: list[dict]
    log: list[str]
    channel: grpc.Channel
    stub: rpc.InferenceStub

    def collect(self, request: pb.GenerateRequest, timeout: float = ANSWER_TIMEOUT_S) -> Generation:
        """Runs a request to its end and checks the shape of its stream."""
        got = Generation()
        for response in self.stub.Generate(request, timeout=timeout):
            got.add(response)
        got.check_ended()
        return got

    def worker_pids(self) -> list[int]:
        """Processes started by the scheduler, in order of their start."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        # As the kernel has them: ids begin anew above the highest.
        return [int(pid) for pid in children.read_text().split()]


@contextlib.contextmanager
def running_server(model: Path | str, *flags: str, port: int = 0) -> Iterator[Server]:
    """Starts a server, waits until it is ready, drains it at the end."""
    command = [sys.executable, "-m", "scheduler_service", "--model", str(model), "--events"]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        cwd="/",
    )
    events: list[dict] = []
    log: list[str] = []
    ready = threading.Event()
    readers = [
        threading.Thread(target=_read_events, args=(process, events, ready), daemon=True),
        threading.Thread(target=_read_log, args=(process, log), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        assert ready.wait(START_TIMEOUT_S), "".join(log)[-4000:]
        assert process.poll() is None, "".join(log)[-4000:]
        addresses = [e["address"] for e in events if e["event"] == "ready"]
        assert addresses, "".join(log)[-4000:]
        address = addresses[0]
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            yield Server(process, address, events, log, channel, rpc.InferenceStub(channel))
    finally:
        _stop(process)
        for reader in readers:
            reader.join(STOP_TIMEOUT_S)


def _read_events(
    process: subprocess.Popen[str], events: list[dict], ready: threading.Event
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["event"] == "ready":
            ready.set()
    ready.set()


def _read_log(process: subprocess.Popen[str], log: list[str]) -> None:
    assert process.stderr is not None
    log.extend(process.stderr)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
