"""`make fuzz`: bodies of calls, messages to a worker and damaged model folders, by the million.

Everything follows from the seed and a number; a fault is printed with both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from fuzz.in_child import run_in_child
from fuzz.in_process import run_in_process
from fuzz.over_stream import run_over_streams
from fuzz.over_wire import run_over_wire
from fuzz.report import Report
from fuzz.worker_commands import run_commands

SEED = 20_260
# More than what caches may hold, and than heaps that settle.
MAX_GROWTH_BYTES = 64 << 20


def main() -> int:
    """1 when there was a fault."""
    given = _arguments()
    runs: list[tuple[Callable[[int, range], Report], int, int]] = [
        (run_in_process, given.bodies - given.over_sockets, given.processes),
        (run_over_wire, given.over_sockets, 1),
        (run_commands, given.commands, given.processes),
        (run_over_streams, given.streams, 1),
        (run_in_child, given.folders, given.processes),
    ]
    print(f"seed {given.seed}", flush=True)
    reports = [run_split(*one, given.seed) for one in runs if one[1]]
    return int(any(report.faults for report in reports))


def run_split(
    run: Callable[[int, range], Report], count: int, num_processes: int, seed: int
) -> Report:
    """Numbers below count, a part in each process."""
    bounds = [count * part // num_processes for part in range(num_processes + 1)]
    parts = [range(*bounds[part : part + 2]) for part in range(num_processes)]
    # Each run in a new process: none begins with the heap of another.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        first, *others = list(pool.map(run, [seed] * num_processes, parts))
    for other in others:
        first.add(other)
    if first.growth_bytes > MAX_GROWTH_BYTES:
        first.faults.append(f"memory grew by {first.growth_bytes >> 20} MiB")
    print(first, flush=True)
    return first


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=SEED, help="of everything")
    add("--bodies", type=int, default=1_000_000, help="of calls, in all")
    add("--over-sockets", type=int, default=50_000, help="of these, to a real server")
    add("--commands", type=int, default=100_000, help="messages to a worker")
    add("--streams", type=int, default=200, help="streams to a real worker")
    add("--folders", type=int, default=10_000, help="damaged model folders")
    add("--processes", type=int, default=os.cpu_count() or 1, help="at once")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
