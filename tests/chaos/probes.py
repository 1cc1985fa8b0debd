"""What is looked at all the time: health, slots, counters, memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chaos.service import Service, dial
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

READY = "slotwise.v1.Inference"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PROBE_EVERY_S = 0.25
# Of a machine whose cores are all busy; the promise is 0.1 s.
PROBE_TIMEOUT_S = 120.0


class Readiness:
    """Every state that Watch pushes for the readiness name, with its time; over restarts."""

    def __init__(self, service: Service) -> None:
        self.changes: list[tuple[float, int]] = []
        self._service = service
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._call: grpc.Call | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(10)

    def wait_for(self, state: int, after: float, timeout_s: float) -> float | None:
        """When this state came after that moment; None: not within the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(state, after) is not None, timeout_s)
            return self._find(state, after)

    def _find(self, state: int, after: float) -> float | None:
        return next((at for at, now in self.changes if now == state and at > after), None)

    def _run(self) -> None:
        while not self._stop.is_set():
            with dial(self._service.address) as channel:
                self._watch(health_pb2_grpc.HealthStub(channel))
            # Whoever is not there does not serve.
            self._note(NOT_SERVING)
            self._stop.wait(0.02)

    def _watch(self, stub: health_pb2_grpc.HealthStub) -> None:
        with contextlib.suppress(grpc.RpcError):
            self._call = stub.Watch(
                health_pb2.HealthCheckRequest(service=READY), wait_for_ready=True
            )
            for response in self._call:
                self._note(response.status)

    def _note(self, state: int) -> None:
        with self._changed:
            if not self.changes or self.changes[-1][1] != state:
                self.changes.append((time.monotonic(), state))
                self._changed.notify_all()


class Probes:
    """Asks for liveness, slots and load again and again; `faults` holds what was not right."""

    def __init__(self, service: Service, num_slots: int) -> None:
        self.faults: list[str] = []
        self.liveness_s: list[float] = []
        # Of the scheduler and the workers, in bytes: (time, {process id: resident}).
        self.memory: list[tuple[float, dict[int, int]]] = []
        self._service = service
        self._num_slots = num_slots
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PROBE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop.wait(PROBE_EVERY_S):
            start = self._service.num_starts
            if not self._service.is_ready:
                continue
            try:
                with dial(self._service.address) as channel:
                    self._probe(channel)
            except grpc.RpcError as error:
                # One that was killed meanwhile need not answer.
                if self._service.is_ready and self._service.num_starts == start:
                    self.faults.append(f"no answer: {error.code().name}: {error.details()}")
            except AssertionError as error:
                self.faults.append(str(error))

    def _probe(self, channel: grpc.Channel) -> None:
        began = time.monotonic()
        health = health_pb2_grpc.HealthStub(channel)
        alive = health.Check(health_pb2.HealthCheckRequest(service=""), timeout=PROBE_TIMEOUT_S)
        self.liveness_s.append(time.monotonic() - began)
        assert alive.status == SERVING, "liveness is not SERVING"
        stub = rpc.InferenceStub(channel)
        check_slots(stub.ListSlots(pb.ListSlotsRequest(), timeout=PROBE_TIMEOUT_S), self._num_slots)
        check_load(stub.GetLoad(pb.GetLoadRequest(), timeout=PROBE_TIMEOUT_S))
        pids = [self._service.pid, *self._service.ranks()]
        sizes = {pid: size for pid in pids if (size := resident_bytes(pid))}
        self.memory.append((time.monotonic(), sizes))


def check_slots(listed: pb.ListSlotsResponse, num_slots: int) -> None:
    """free + busy == slots, and each answer is in one slot."""
    slots = listed.slots
    assert [slot.index for slot in slots] == list(range(num_slots)), "slots are missing or doubled"
    busy = [slot for slot in slots if slot.state != pb.SLOT_STATE_FREE]
    free = [slot for slot in slots if slot.state == pb.SLOT_STATE_FREE]
    assert len(busy) + len(free) == num_slots
    assert not any(slot.HasField("request_id") for slot in free), "a free slot has a request"
    answers = [(slot.request_id, slot.choice_index) for slot in busy]
    assert all(request_id for request_id, _ in answers), "a busy slot has no request"
    assert len(set(answers)) == len(answers), f"an answer is in two slots: {answers}"


def check_load(load: pb.GetLoadResponse) -> None:
    """All that were accepted or resumed wait, run or have ended, each in one way."""
    count = load.requests
    ended = count.stop + count.length + count.cancelled + count.deadline + count.error
    known = ended + load.num_running + load.num_waiting
    came = count.accepted
    assert came == known, f"{came} came, {known} are known: {load}"
    assert count.poisoned <= count.error
    assert count.slow_reader <= count.cancelled
    assert load.num_running <= load.max_running


def resident_bytes(pid: int) -> int:
    """0 when the process is not there."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) << 10
    return 0


def until_idle(stub: rpc.InferenceStub, timeout_s: float = PROBE_TIMEOUT_S) -> pb.GetLoadResponse:
    """Waits until nothing waits or runs; the load of then."""
    end = time.monotonic() + timeout_s
    while True:
        load = stub.GetLoad(pb.GetLoadRequest(), timeout=PROBE_TIMEOUT_S)
        if not (load.num_running or load.num_waiting):
            return load
        assert time.monotonic() < end, f"requests are left: {load}"
        time.sleep(0.05)


def timed(condition: Callable[[], object]) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    condition()
    return time.monotonic() - began


def growth(memory: list[tuple[float, dict[int, int]]]) -> dict[str, str]:
    """Of the processes that lived longest: resident MiB after each tenth of it."""
    longest = sorted(lives_of(memory).items(), key=lambda one: len(one[1]))[-3:]
    return {f"process {pid}, MiB": " ".join(_tenths(life)) for pid, life in longest}


def _tenths(life: list[tuple[float, int]]) -> list[str]:
    places = (tenth * (len(life) - 1) // 10 for tenth in range(1, 11))
    return [f"{life[place][1] / (1 << 20):.1f}" for place in places]


def lives_of(memory: list[tuple[float, dict[int, int]]]) -> dict[int, list[tuple[float, int]]]:
    """By process id: (time, resident bytes), in order."""
    lives: dict[int, list[tuple[float, int]]] = {}
    for at, sizes in memory:
        for pid, size in sizes.items():
            lives.setdefault(pid, []).append((at, size))
    return lives
