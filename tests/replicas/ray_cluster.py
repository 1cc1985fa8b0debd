"""A Ray cluster of several nodes on this machine, and a `slotwise serve` that uses it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import psutil
import pytest

from integration.streams import Generation
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

# They end what hangs, on a slow and busy machine too.
PATIENCE_S = 300
# Read by Ray when it is imported. It waits for no network, and starts no process before its time.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_enable_worker_prestart", "0")
_SETTINGS = {
    # A node is held for dead a second after it is.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 2,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}
NODE_CPUS = 2


def need_ray() -> None:
    """Skips the test without Ray; where all is to be there, it fails."""
    try:
        import ray  # noqa: F401
    except ImportError:
        reason = "no Ray; pip install 'slotwise[ray]'"
        if os.environ.get("SLOTWISE_ALL_TOOLCHAINS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S} s"
        time.sleep(0.05)


class RayCluster:
    """A head without CPUs, where drivers are, and nodes that come and go."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _SETTINGS}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address

    def add_node(self, num_gpus: int = 0) -> int:
        """Process id of the new node's raylet. GPUs need not be there: Ray believes what it is
        told."""
        node = self._cluster.add_node(
            num_cpus=NODE_CPUS, num_gpus=num_gpus, object_store_memory=80 << 20
        )
        return node.all_processes["raylet"][0].process.pid

    def free_cpus(self) -> float:
        """Of the whole cluster, as it says itself."""
        import ray

        if not ray.is_initialized():
            ray.init(self.address, log_to_driver=False, logging_level="ERROR")
        return ray.available_resources().get("CPU", 0)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


class Served:
    """A running `slotwise serve --launcher ray`."""

    def __init__(self, model: Path, folder: Path, address: str, flags: Sequence[str]) -> None:
        folder.mkdir()
        self._log_file = folder / "log"
        command = [sys.executable, "-m", "slotwise_cli", "serve", str(model), "--json"]
        command += ["--launcher", "ray", "--ray-address", address, "--port", "0"]
        with self._log_file.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--log-level", "info", "--device", "cpu", *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._address = ""
        self._num_ready = 0
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def log(self) -> str:
        return self._log_file.read_text()

    def wait_ready(self, times: int = 1) -> None:
        with self._changed:
            is_ready = self._changed.wait_for(lambda: self._num_ready >= times, PATIENCE_S)
        assert is_ready, self.log()
        assert self._address, self.log()

    @contextlib.contextmanager
    def stub(self) -> Iterator[rpc.InferenceStub]:
        with grpc.insecure_channel(self._address) as channel:
            yield rpc.InferenceStub(channel)

    def num_recoveries(self) -> int:
        with self.stub() as stub:
            return stub.GetLoad(pb.GetLoadRequest()).num_recoveries

    def child(self, module: str) -> psutil.Process:
        """The process that runs it: the scheduler, or the one that Ray knows."""
        children = psutil.Process(self.process.pid).children()
        return next(one for one in children if module in one.cmdline())

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        self._reader.join()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.end()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event.get("event") == "ready":
                self._address = event["address"]
                self._count()
        # One that has ended is waited for no more.
        self._count(1000)

    def _count(self, ready: int = 1) -> None:
        with self._changed:
            self._num_ready += ready
            self._changed.notify_all()


def workers(raylet: int) -> list[psutil.Process]:
    """Worker processes on a node."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in psutil.Process(raylet).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.cmdline()[1:3] == ["-m", "worker"]:
                    found.append(one)
    return found


def has_ended(process: psutil.Process) -> bool:
    """Also if nobody has asked for its exit status yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def stop_workers(raylet: int) -> list[psutil.Process]:
    """Has those of a node stand still, so that no stream ends before what is to come."""
    found = workers(raylet)
    for one in found:
        one.suspend()
    return found


class Stream:
    """An answer that is read in two parts."""

    def __init__(self, stub: rpc.InferenceStub, request: pb.GenerateRequest) -> None:
        self._responses = stub.Generate(request, timeout=PATIENCE_S)
        self._got = Generation()

    def read_some(self, num_tokens: int) -> None:
        while len(self._got.token_ids) < num_tokens:
            self._got.add(next(self._responses))
        assert self._got.answers[0].finished is None, "the answer was over too soon"

    def rest(self) -> list[int]:
        for response in self._responses:
            self._got.add(response)
        self._got.check_ended()
        return self._got.token_ids
