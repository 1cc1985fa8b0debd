"""Asks for a server's health again and again, from a process of its own: `python health_probe.py
HOST:PORT`. It goes on until its input ends, and prints the times that the answers took."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

INTERVAL_S = 0.02
# Of an answer; one that does not come counts as so long.
TIMEOUT_S = 120.0


@dataclass
class Probe:
    """Of the answers the times in ms, rising, once the probe has ended; and how many were not
    SERVING, or none at all."""

    times_ms: list[float] = field(default_factory=list)
    num_bad: int = 0

    def percentile(self, percent: float) -> float:
        return self.times_ms[min(len(self.times_ms) - 1, int(len(self.times_ms) * percent / 100))]

    def __str__(self) -> str:
        median, high, worst = (self.percentile(percent) for percent in (50, 99, 100))
        return (
            f"health: {len(self.times_ms)} answers, median {median:.1f} ms, 99 % within "
            f"{high:.1f} ms, the slowest {worst:.1f} ms, {self.num_bad} bad"
        )


@contextlib.contextmanager
def probing(address: str) -> Iterator[Probe]:
    """Probes the readiness at the address while the block runs."""
    command = [sys.executable, __file__, address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "asking\n"
    probe = Probe()
    try:
        yield probe
    finally:
        found, _ = process.communicate()
        probe.times_ms, probe.num_bad = json.loads(found)


def main(address: str) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    request = health_pb2.HealthCheckRequest(service="slotwise.v1.Inference")
    times_ms, num_bad = [], 0
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(request, timeout=TIMEOUT_S)
        print("asking", flush=True)
        while not ended.wait(INTERVAL_S):
            started = time.monotonic()
            try:
                response = stub.Check(request, timeout=TIMEOUT_S)
                num_bad += response.status != health_pb2.HealthCheckResponse.SERVING
            except grpc.RpcError:
                num_bad += 1
            times_ms.append((time.monotonic() - started) * 1e3)
    print(json.dumps([sorted(times_ms), num_bad]))


if __name__ == "__main__":
    main(sys.argv[1])
