"""Bodies to the server's handlers in this process, thousands in a second."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from fuzz.bodies import BodyMaker
from fuzz.good_calls import good_calls
from fuzz.handlers import Front, running_front
from fuzz.report import Report, resident_bytes
from tokenizer_files import QWEN3_TEMPLATE, write_model

from scheduler_service.service import load_model

# More than there are slots, so that some wait.
NUM_CALLERS = 24
# Memory is looked at after each; heaps and caches settle in the first few.
NUM_PARTS, NUM_SETTLING = 8, 2


def run_in_process(seed: int, numbers: range) -> Report:
    """Blocks until all bodies of these numbers are answered."""
    return asyncio.run(_run(seed, numbers))


async def _run(seed: int, numbers: range) -> Report:
    report, started = Report("bodies in process", seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        model = load_model(write_model(Path(folder), QWEN3_TEMPLATE), "")
        maker = BodyMaker(seed, good_calls())
        async with running_front(model, Path(folder)) as front:
            sizes = []
            for part in range(NUM_PARTS):
                first, last = (len(numbers) * n // NUM_PARTS for n in (part, part + 1))
                await take_all(front, maker, numbers[first:last])
                gc.collect()
                sizes.append(resident_bytes())
            report.growth_bytes = sizes[-1] - sizes[NUM_SETTLING - 1]
        model.constraints.close()
    report.count, report.outcomes, report.faults = len(numbers), front.codes, front.faults
    report.seconds = time.monotonic() - started
    report.notes.append("MiB: " + " ".join(f"{size / (1 << 20):.1f}" for size in sizes))
    report.notes.append(f"slowest: {front.slowest[0]:.2f} s, {front.slowest[1][:150]}")
    return report


async def take_all(front: Front, maker: BodyMaker, numbers: Iterable[int]) -> None:
    left = iter(numbers)

    async def caller() -> None:
        for number in left:
            await front.take(maker.body(number))

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CALLERS):
            group.create_task(caller())
