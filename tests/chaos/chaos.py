"""One service under readers and probes, and the faults that strike it, one after another."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from chaos.namespaces import Host
from chaos.probes import (
    NOT_SERVING,
    SERVING,
    Probes,
    Readiness,
    check_load,
    check_slots,
    until_idle,
)
from chaos.readers import Readers, Want, make_requests, undisturbed
from chaos.relay import Relay
from chaos.service import (
    START_TIMEOUT_S,
    Service,
    check_nothing_left,
    dial,
    poll,
    shared_memory,
)
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

# For a recovery, on cores that others keep busy; the promise is 15 s.
RECOVERY_BOUND_S = 240.0
# For readiness to be taken back; the promise is 2 s.
NOT_SERVING_BOUND_S = 120.0
STORM_SIZE = 100
WORKER_TIMEOUT_S = 3.0
FLAGS = (
    *("--tp", "2"),
    *("--threads", "1"),
    *("--worker-timeout", str(WORKER_TIMEOUT_S)),
    # No recovery may be given up.
    *("--recovery-timeout", "600"),
)


@dataclass(frozen=True)
class Strike:
    """A fault as it went. Times are seconds after it; None: not of this kind of fault."""

    name: str
    at_s: float
    not_serving_s: float | None = None
    ready_s: float | None = None
    # The first new token behind readiness, whatever stream it is of.
    first_token_s: float | None = None

    def __str__(self) -> str:
        times = {
            "NOT_SERVING": self.not_serving_s,
            "ready": self.ready_s,
            "first token": self.first_token_s,
        }
        told = ", ".join(f"{name} {time:.2f} s" for name, time in times.items() if time is not None)
        return f"{self.at_s:8.2f} s  {self.name}: {told or 'nobody noticed'}"


class Chaos:
    """Readers read through a relay; watchers and probes ask the service itself."""

    def __init__(
        self, service: Service, wants: Sequence[Want], readers: Readers, relay: Relay, seed: int
    ) -> None:
        """The service is ready and idle; the readers dial the relay."""
        self.service = service
        self.rng = random.Random(seed)
        self.log: list[Strike] = []
        self.relay = relay
        self.readers = readers
        self.readiness = Readiness(service)
        self.wants = wants
        with dial(service.address) as channel:
            info = rpc.InferenceStub(channel).GetServerInfo(pb.GetServerInfoRequest())
        self.num_slots = info.num_slots
        self.probes = Probes(service, info.num_slots)
        self._began = time.monotonic()

    @property
    def faults(self) -> list[str]:
        return [*self.service.faults, *self.readers.faults, *self.probes.faults]

    def check(self) -> None:
        """AssertionError when a promise was broken by now."""
        assert not self.faults, "\n".join([*self.faults[:10], self.told()])

    def told(self) -> str:
        """The faults so far and the last lines of the server's log."""
        return "\n".join([*map(str, self.log[-20:]), self.service.last_words()])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Readers and probes run inside; at the end all streams end and all is checked."""
        for one in (self.readiness, self.probes, self.readers):
            one.start()
        try:
            up = self.readiness.wait_for(SERVING, 0, RECOVERY_BOUND_S)
            assert up is not None, "readiness was never SERVING"
            self.wait_token()
            yield
            self.readers.stop()
            self.check()
            with dial(self.service.address) as channel:
                check_idle(rpc.InferenceStub(channel), self.num_slots)
        finally:
            self.readers.abandon()
            self.relay.close()
            self.probes.stop()
            self.readiness.stop()
        self.check()

    def wait_token(self, after: float | None = None) -> float:
        """The time of the first token after that moment (now, unless given)."""
        moment = time.monotonic() if after is None else after
        end = time.monotonic() + RECOVERY_BOUND_S
        while time.monotonic() < end:
            came = self.readers.progress.wait_after(moment, 1)
            self.check()
            if came is not None:
                return came
        raise AssertionError(f"no token within {RECOVERY_BOUND_S} s\n{self.told()}")

    def strike(self, fault: Callable[[Chaos], None], restarts: bool | None = None) -> Strike:
        """Strikes and waits until streams go on. restarts: readiness tells of it."""
        began = time.monotonic()
        fault(self)
        self._record(fault.__name__, began, fault in RESTARTING if restarts is None else restarts)
        self.check()
        print(self.log[-1], flush=True)
        return self.log[-1]

    def _record(self, name: str, began: float, restarts: bool) -> None:
        if not restarts:
            self.wait_token()
            self.log.append(Strike(name, began - self._began))
            return
        down = self.readiness.wait_for(NOT_SERVING, began, NOT_SERVING_BOUND_S)
        assert down is not None, f"{name}: readiness stays SERVING\n{self.told()}"
        up = self._wait_steady(down)
        token = self.wait_token(up)
        self.log.append(Strike(name, began - self._began, down - began, up - began, token - began))

    def _wait_steady(self, after: float) -> float:
        """The time of the SERVING that nothing took back."""
        end = time.monotonic() + RECOVERY_BOUND_S
        while time.monotonic() < end:
            up = self.readiness.wait_for(SERVING, after, 1)
            self.check()
            if up is None:
                continue
            lost_again = self.readiness.wait_for(NOT_SERVING, up, 0)
            if lost_again is None:
                return up
            after = lost_again
        raise AssertionError(f"not ready within {RECOVERY_BOUND_S} s\n{self.told()}")


def check_idle(stub: rpc.InferenceStub, num_slots: int) -> None:
    """Nothing runs any more: every slot is free, every request has ended in one way."""
    check_load(until_idle(stub))
    listed = stub.ListSlots(pb.ListSlotsRequest())
    check_slots(listed, num_slots)
    assert all(slot.state == pb.SLOT_STATE_FREE for slot in listed.slots), "busy, and nothing runs"


# Faults of processes.


def kill_rank(chaos: Chaos) -> None:
    _signal(chaos.rng.choice(chaos.service.ranks()), signal.SIGKILL)


def kill_all_ranks(chaos: Chaos) -> None:
    for pid in chaos.service.ranks():
        _signal(pid, signal.SIGKILL)


def stop_rank(chaos: Chaos) -> None:
    """It stays stopped: whoever watches must find out."""
    _signal(chaos.rng.choice(chaos.service.ranks()), signal.SIGSTOP)


def kill_scheduler(chaos: Chaos) -> None:
    chaos.service.kill()


def kill_scheduler_and_rank(chaos: Chaos) -> None:
    """In either order."""
    kills = [kill_scheduler, kill_rank]
    chaos.rng.shuffle(kills)
    if kills[0] is kill_scheduler:
        ranks = chaos.service.ranks()
        chaos.service.kill()
        _signal(chaos.rng.choice(ranks), signal.SIGKILL)
    else:
        kill_rank(chaos)
        chaos.service.kill()


def kill_in_recovery(chaos: Chaos) -> None:
    """A rank, and when readiness is gone a rank again, at some moment of the recovery."""
    began = time.monotonic()
    kill_rank(chaos)
    down = chaos.readiness.wait_for(NOT_SERVING, began, NOT_SERVING_BOUND_S)
    assert down is not None, "the first death was not noticed"
    time.sleep(chaos.rng.uniform(0, 2))
    ranks = chaos.service.ranks()
    if ranks:
        _signal(chaos.rng.choice(ranks), signal.SIGKILL)


def kill_in_start(chaos: Chaos) -> None:
    """The scheduler, and when another starts, that one too or a rank of it, before it is ready."""
    before = chaos.service.num_starts
    chaos.service.kill()
    poll(lambda: chaos.service.num_starts > before, START_TIMEOUT_S, "another start")
    poll(lambda: chaos.service.ranks() != [], START_TIMEOUT_S, "workers of another start")
    time.sleep(chaos.rng.uniform(0, 1))
    if chaos.rng.random() < 0.5:
        chaos.service.kill()
    else:
        for pid in chaos.service.ranks()[:1]:
            _signal(pid, signal.SIGKILL)


def stop_scheduler(chaos: Chaos) -> None:
    """It stands for a while, and goes on as if nothing had been."""
    chaos.service.signal(signal.SIGSTOP)
    time.sleep(chaos.rng.uniform(0.1, 1.0))
    chaos.service.signal(signal.SIGCONT)


# Faults of the network, between the readers and the service.


def cut_connections(chaos: Chaos) -> None:
    chaos.relay.cut()


def delay_connections(chaos: Chaos) -> None:
    chaos.relay.delay(chaos.rng.uniform(0.02, 0.2))
    time.sleep(0.5)
    chaos.wait_token()
    chaos.relay.delay(0)


def partition(chaos: Chaos) -> None:
    """Nothing passes for a while; then what was held does, or every connection is lost."""
    chaos.relay.hold()
    time.sleep(chaos.rng.uniform(0.1, 1.0))
    if chaos.rng.random() < 0.5:
        chaos.relay.cut()
    chaos.relay.release()


# Faults of clients.


def cancel_storm(chaos: Chaos) -> None:
    """Many streams that are cancelled at once: some wait, some run, some go by Cancel."""
    # Nobody refuses them, so that each is cancelled.
    with dial(chaos.service.address) as channel, ThreadPoolExecutor(16) as pool:
        stub = rpc.InferenceStub(channel)
        seeds = [chaos.rng.randrange(1 << 30) for _ in range(STORM_SIZE)]
        calls = list(pool.map(lambda seed: _begin(stub, random.Random(seed)), seeds))
        for place, (request_id, call) in enumerate(calls):
            if place % 2:
                call.cancel()
            else:
                with contextlib.suppress(grpc.RpcError):
                    stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=30)
        # Each ends, by one Finished or one status.
        list(pool.map(_drain_call, [call for _, call in calls]))


def _begin(stub: rpc.InferenceStub, rng: random.Random) -> tuple[str, grpc.Call]:
    """A stream whose Accepted has come, or that was refused."""
    (request,) = make_requests(rng, 1, range(100, 200))
    request.request_id = f"storm-{uuid.uuid4().hex}"
    call = stub.Generate(request, timeout=60)
    with contextlib.suppress(grpc.RpcError, StopIteration):
        next(call)
    return request.request_id, call


def _drain_call(call: grpc.Call) -> None:
    with contextlib.suppress(grpc.RpcError):
        deque(call, maxlen=0)


def slow_reader(chaos: Chaos) -> None:
    """Clients that stop reading while the others go on; then they leave."""
    with dial(chaos.service.address) as channel:
        stub = rpc.InferenceStub(channel)
        rng = random.Random(chaos.rng.randrange(1 << 30))
        calls = [_begin(stub, rng)[1] for _ in range(2)]
        for _ in range(5):
            chaos.wait_token()
        for call in calls:
            call.cancel()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# Those that readiness tells of.
RESTARTING = (
    kill_rank,
    kill_all_ranks,
    stop_rank,
    kill_scheduler,
    kill_scheduler_and_rank,
    kill_in_recovery,
    kill_in_start,
)
OF_THE_NETWORK = (cut_connections, delay_connections, partition)
OF_CLIENTS = (cancel_storm, slow_reader)


@contextlib.contextmanager
def chaos_on(
    service: Service,
    streams: int,
    seed: int,
    requests: Sequence[pb.GenerateRequest],
    host: Host | None = None,
    **readers: Any,
) -> Iterator[Chaos]:
    """Starts the service, asks what it answers undisturbed, and looks that nothing is left after.

    The readers dial from `host`; None: from this one.
    """
    print(f"seed {seed}", flush=True)
    try:
        service.start()
        service.wait_ready()
        wants = undisturbed(service.address, requests, streams)
        relay = Relay((service.host, service.port), host.socket if host else None)
        reading = Readers(relay.address, wants, streams, seed, **readers)
        chaos = Chaos(service, wants, reading, relay, seed)
        with chaos.running():
            yield chaos
            used = shared_memory([service.pid, *service.ranks()])
        assert service.stop() == 0, service.last_words()
        check_nothing_left(service)
        assert not [name for name in used if Path(name).exists()], used
    finally:
        service.end()


def watchdog(seconds: float, what: str) -> threading.Timer:
    """Ends the whole program when it hangs: a long run must not hang for ever."""

    def give_up() -> None:
        print(f"{what} hangs", flush=True)
        os._exit(3)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    return timer
