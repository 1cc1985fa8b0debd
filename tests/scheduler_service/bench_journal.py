"""What the journal costs: `python tests/scheduler_service/bench_journal.py [FOLDER]`.

Steps of 8 calls at 2,000 tokens a second, the wait for an acceptance, and the size of the file over
100,000 short calls. The folder is on the disk to be measured; one in the system's place for
temporary files when none is given.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from array import array
from pathlib import Path

from scheduler_service.journal import Journal
from scheduler_service.record import CallRecord, JournalState, Setup
from scheduler_service.request import FinishedEvent, FinishReason, TokenEvent, TokenLogprobs

SETUP = Setup("weights", "front", "1.0", "build", "bf16", "bf16", "a CPU", 1)
NUM_CALLS = 8
STEP_S = NUM_CALLS / 2000
MIB = 1 << 20


def record(name: str, num_prompt_tokens: int = 512) -> CallRecord:
    prompt = array("I", range(num_prompt_tokens))
    return CallRecord(name, "", bytes(2000), prompt, False, 7, 1, 1, None, SETUP)


def ended(name: str, num_tokens: int) -> FinishedEvent:
    return FinishedEvent(name, FinishReason.LENGTH, 512, num_tokens, 1, 2, 3, 4)


def open_journal(folder: Path, max_bytes: int) -> Journal:
    journal, _ = Journal.open(folder, max_bytes=max_bytes, retention_s=600)
    return journal


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def thread_s(journal: Journal) -> float:
    """CPU time of the thread that writes."""
    ident = journal._writer._thread.ident
    assert ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


async def steps(folder: Path, seconds: float, num_logprobs: int | None) -> None:
    journal = open_journal(folder, 1024 * MIB)
    names = [f"call-{i}" for i in range(NUM_CALLS)]
    await asyncio.gather(*[journal.accept(record(name)) for name in names])
    logprobs: tuple[TokenLogprobs, ...] = ()
    if num_logprobs is not None:
        best = [random.random() for _ in range(num_logprobs)]
        logprobs = (TokenLogprobs(-0.1, 1, tuple(range(num_logprobs)), tuple(best)),)
    add_s: list[float] = []
    begin_s, begin_writer_s, begin_loop_s = time.monotonic(), thread_s(journal), time.thread_time()
    num_steps = int(seconds / STEP_S)
    for step in range(num_steps):
        events = [TokenEvent(name, step, (step,), logprobs) for name in names]
        before_s = time.perf_counter()
        for name, event in zip(names, events, strict=True):
            journal.add(name, 0, event)
        add_s.append((time.perf_counter() - before_s) / NUM_CALLS)
        await asyncio.sleep(max(0.0, begin_s + (step + 1) * STEP_S - time.monotonic()))
    took_s = time.monotonic() - begin_s
    writer = (thread_s(journal) - begin_writer_s) / took_s
    loop = (time.thread_time() - begin_loop_s) / took_s
    begin_s, begin_loop_s = time.monotonic(), time.thread_time()
    for step in range(num_steps):
        _ = [TokenEvent(name, step, (step,), logprobs) for name in names]
        await asyncio.sleep(max(0.0, begin_s + (step + 1) * STEP_S - time.monotonic()))
    idle_loop = (time.thread_time() - begin_loop_s) / (time.monotonic() - begin_s)
    rate = num_steps * NUM_CALLS / took_s
    print(
        f"{rate:.0f} tokens/s, logprobs {num_logprobs}: add {statistics.median(add_s) * 1e6:.2f} "
        f"us a token; of a core: thread {100 * writer:.2f} %, loop {100 * (loop - idle_loop):.2f} %"
    )
    journal.close()


async def acceptances(folder: Path) -> None:
    journal = open_journal(folder, 1024 * MIB)
    for at_once in (1, 8, 64):
        waits_s: list[float] = []
        for turn in range(200):
            names = [f"{at_once}-{turn}-{i}" for i in range(at_once)]
            before_s = time.perf_counter()
            taken = await asyncio.gather(*[journal.accept(record(name)) for name in names])
            waits_s.append(time.perf_counter() - before_s)
            assert all(taken)
            await asyncio.sleep(0.001)
        waits_s.sort()
        print(
            f"accept, {at_once} at once: {waits_s[100] * 1e3:.2f} ms, "
            f"99 % in {waits_s[197] * 1e3:.2f} ms, all in {waits_s[-1] * 1e3:.1f} ms"
        )
    journal.close()


async def short_calls(folder: Path, num_calls: int, max_bytes: int) -> None:
    journal = open_journal(folder, max_bytes)
    largest = num_refused = 0
    begin_s, begin_writer_s = time.monotonic(), thread_s(journal)
    for turn in range(num_calls // 100):
        names = [f"{turn}-{i}" for i in range(100)]
        for name, accepted in [(name, journal.accept(record(name, 50))) for name in names]:
            num_refused += not await accepted
            journal.add(name, 0, TokenEvent(name, 0, tuple(range(30))))
            journal.add(name, 0, ended(name, 30))
        while journal.state is not JournalState.ON:  # noqa: ASYNC110 (in a thread)
            await asyncio.sleep(0.01)
        largest = max(largest, size_of(folder))
    took_s = time.monotonic() - begin_s
    writer_s = thread_s(journal) - begin_writer_s
    journal.close()
    before_s = time.monotonic()
    journal, calls = Journal.open(folder, max_bytes=max_bytes, retention_s=600)
    read_s = time.monotonic() - before_s
    journal.close()
    print(
        f"{num_calls} calls of 30 tokens in {took_s:.0f} s, {writer_s / num_calls * 1e6:.0f} us of "
        f"the thread each, {num_refused} refused; bound {max_bytes / MIB:.0f} MiB, largest "
        f"{largest / MIB:.1f} MiB; {len(calls)} calls read in {read_s:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="where to write; default: temporary")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run of steps")
    parser.add_argument("--calls", type=int, default=100_000, help="short calls")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for num_logprobs in (None, 0, 20):
            asyncio.run(steps(Path(folder) / f"steps-{num_logprobs}", given.seconds, num_logprobs))
        asyncio.run(acceptances(Path(folder) / "accept"))
        asyncio.run(short_calls(Path(folder) / "short", given.calls, 128 * MIB))


if __name__ == "__main__":
    main()
