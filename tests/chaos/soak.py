"""`make soak`: thousands of mixed requests, some cancelled, late or invalid, while workers die.

Exits with 1 when a promise was broken. Runs on a small model; --model takes another.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from chaos.chaos import FLAGS, Chaos, chaos_on, kill_rank, watchdog
from chaos.kills import told
from chaos.probes import lives_of
from chaos.readers import LostError, Reading, Want, make_requests
from chaos.report import Report
from chaos.service import Service, dial
from checkpoints import make_checkpoint
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

CLIENTS = 12
STREAMS = 2
CANCELLED, LATE, INVALID = 0.30, 0.05, 0.02
KILLS = 0.01
# Of a process, from its first tenth, and from when it has loaded and served all kinds, to its end.
SETTLED_S = 60.0
MEMORY_GROWTH = 1.03
# What the allocator of a process this small may round.
MEMORY_SLACK_BYTES = 8 << 20
TIMEOUT_S = 300.0
BOUND_S = 4 * 3600
_KINDS = ("cancelled", "late", "invalid", "whole")
_WEIGHTS = (CANCELLED, LATE, INVALID, 1 - CANCELLED - LATE - INVALID)


class Soak:
    """Runs the mix beside the readers of a chaos, and kills a rank every so many requests."""

    def __init__(self, chaos: Chaos, seed: int, outcomes: Counter[str]) -> None:
        """outcomes: where each request's end is counted."""
        self._outcomes = outcomes
        self._chaos = chaos
        self._seed = seed
        self._lock = threading.Lock()

    def run(self, count: int) -> None:
        """AssertionError or LostError when a promise was broken."""
        kill_every = round(1 / KILLS)
        with dial(self._chaos.service.address) as channel, ThreadPoolExecutor(CLIENTS) as pool:
            stub = rpc.InferenceStub(channel)
            for first in range(0, count, kill_every):
                last = min(first + kill_every, count)
                batch = [pool.submit(self._one, stub, place) for place in range(first, last)]
                self._chaos.strike(kill_rank)
                for future in batch:
                    future.result()
                self._chaos.check()
            self._check_counters(stub.GetLoad(pb.GetLoadRequest()).requests)

    def _check_counters(self, counted: pb.RequestCounters) -> None:
        assert (counted.error, counted.poisoned, counted.slow_reader) == (0, 0, 0), counted
        invalid = self._outcomes["invalid: INVALID_ARGUMENT"]
        assert counted.rejected_invalid == invalid, f"{invalid} were invalid: {counted}"

    def _one(self, stub: rpc.InferenceStub, place: int) -> None:
        rng = random.Random(f"{self._seed} {place}")
        (kind,) = rng.choices(_KINDS, _WEIGHTS)
        outcome = run_one(stub, rng.choice(self._chaos.wants), kind, rng)
        with self._lock:
            self._outcomes[f"{kind}: {outcome}"] += 1


def run_one(stub: rpc.InferenceStub, want: Want, kind: str, rng: random.Random) -> str:
    """How one request ended. Tokens are compared as they come."""
    reading = Reading(want, uuid.uuid4().hex)
    if kind == "invalid":
        reading.request.token_ids.ids.append(1 << 20)
    timeout = rng.uniform(0.001, 0.1) if kind == "late" else TIMEOUT_S
    num_until_cancel = rng.randrange(5)
    call = stub.Generate(reading.request, timeout=timeout)
    try:
        for count, response in enumerate(call):
            reading.take(response)
            if kind == "cancelled" and count == num_until_cancel:
                _cancel(stub, call, reading.request.request_id, rng)
        reading.got.check_ended()
        reasons = [one.finished.finish_reason for one in reading.got.answers if one.finished]
        if kind == "cancelled" and pb.FINISH_REASON_CANCELLED in reasons:
            return "Finished, CANCELLED"
        reading.check()
        return "Finished"
    except grpc.RpcError as error:
        allowed = {"cancelled": "CANCELLED", "late": "DEADLINE_EXCEEDED"}
        allowed["invalid"] = "INVALID_ARGUMENT"
        if error.code().name != allowed.get(kind):
            raise LostError(f"{kind} {reading}: {error.code().name}: {error.details()}") from error
        return error.code().name


def _cancel(stub: rpc.InferenceStub, call: grpc.Call, request_id: str, rng: random.Random) -> None:
    """By Cancel, or by going away; then nobody may be waited for, so Cancel comes as well."""
    if rng.random() < 0.5:
        call.cancel()
    try:
        stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        # It has ended already.
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise


def memory_faults(memory: list[tuple[float, dict[int, int]]]) -> list[str]:
    """Processes that grew beyond the bound, of those that lived for long."""
    faults = []
    for pid, life in lives_of(memory).items():
        began, (ended, last) = life[0][0], life[-1]
        if ended - began < 2 * SETTLED_S:
            continue
        settled = max(began + SETTLED_S, began + (ended - began) / 10)
        early = next(size for at, size in life if at >= settled)
        if last > early * MEMORY_GROWTH + MEMORY_SLACK_BYTES:
            faults.append(f"process {pid} grew from {early >> 20} to {last >> 20} MiB")
    return faults


def main() -> int:
    asked = _arguments()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1 << 32)
    report = Report("soak")
    watchdog(BOUND_S, "soak").start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        model = asked.model or make_checkpoint(folder / "tiny", "qwen3", tokenizer=True)
        flags = (*FLAGS, "--num-slots", "8", "--max-seq-len", "512", "--retention", "20")
        service = Service(model, folder, flags)
        requests = make_requests(random.Random(seed), 200, range(1, 120))
        chaos, outcomes = None, Counter[str]()
        try:
            with chaos_on(service, STREAMS, seed, requests) as chaos:
                report.strikes = chaos.log
                Soak(chaos, seed, outcomes).run(asked.requests)
            faults = memory_faults(chaos.probes.memory)
            assert not faults, faults
        except KeyboardInterrupt:
            report.facts["stopped early"] = True
        except (AssertionError, LostError) as error:
            print(error)
            report.facts["failed"] = str(error)[:2000]
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / "scheduler.log").write_text(service.log_file.read_text())
        report.facts |= {"seed": seed, "requests": sum(outcomes.values())}
        report.facts["minutes"] = round((time.monotonic() - began) / 60, 1)
        report.facts["outcomes"] = dict(sorted(outcomes.items()))
        report.facts |= told(chaos)
    report.write(asked.out)
    print(report)
    return 1 if "failed" in report.facts else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, help="of faults and requests; default: random")
    parser.add_argument("--model", type=Path, help="a checkpoint folder; default: a small one")
    parser.add_argument("--out", type=Path, default=Path("build/chaos"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
