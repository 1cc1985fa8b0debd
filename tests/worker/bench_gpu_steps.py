"""What logprobs, penalties and masks add to a decode step, and what a prefix costs to copy.

    PYTHONPATH=tests python tests/worker/bench_gpu_steps.py MODEL [--rows 8] [--prompt 512]

MODEL: a folder, such as `slotwise make-checkpoint --like qwen3-8b` makes. All kinds of steps take
turns, so that the card is as warm for each; medians, and shares of the plain step.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from gpu_driver import GpuDriver, prompt_of
from worker_driver import sampling

from worker.batch import LogitAdjustment, SlotSetup

STEPS = 64
ROUNDS = 9


def setups(vocab_size: int, max_len: int) -> dict[str, SlotSetup]:
    """By kind of step."""
    everything = LogitAdjustment(
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=1.1,
        prompt_token_ids=tuple(range(0, vocab_size, 7)),
        biases=tuple((token_id, 0.5) for token_id in range(0, vocab_size, 500)),
        min_len=max_len,
    )
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "plain again": {},
        "logprobs 20": {"num_logprobs": 20},
        "adjusted": {"adjustment": everything},
        "masked": {"masked": True},
        "everything": {"num_logprobs": 20, "adjustment": everything, "masked": True},
    }
    common: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": 3}
    return {name: sampling(max_len, **common, **kind) for name, kind in kinds.items()}


def measure_steps(driver: GpuDriver, rows: int, prompt_tokens: int) -> dict[str, list[float]]:
    """Microseconds of a step, by kind and round. A masked row's command has one step."""
    vocab_size = driver.decoder.config.vocab_size
    allowed = b"\xff" * -(-vocab_size // 8)
    times: dict[str, list[float]] = {}
    kinds = setups(vocab_size, prompt_tokens + STEPS + 2)
    for _ in range(ROUNDS):
        for name, setup in kinds.items():
            mask = allowed if setup.masked else b""
            for slot in range(rows):
                prompt = prompt_of(slot, prompt_tokens)
                driver.run(driver.first_chunk(slot, prompt, setup, allowed_tokens=mask))
            decoding = [driver.decode(slot, mask) for slot in range(rows)]
            commands, steps = (STEPS, 1) if mask else (1, STEPS)
            submitted = [driver.submit(*decoding, num_steps=steps) for _ in range(commands)]
            results = [driver.executor.collect(one) for one in submitted]
            spent = [result.duration_ns / steps / 1e3 for result in results]
            assert all(len(row.token_ids) == steps for one in results for row in one.rows)
            times.setdefault(name, []).append(statistics.median(spent))
    return times


def measure_copy(driver: GpuDriver, length: int) -> float:
    """Milliseconds of copying a prefix from one slot to another."""
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        driver.decoder.attention.copy_prefix(0, 1, length)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    """Prints a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--prefix", type=int, default=16384)
    parsed = parser.parse_args()
    driver = GpuDriver(parsed.model, num_slots=parsed.rows, max_seq_len=parsed.prefix)
    driver.watched = False
    driver.decoder.forward = driver._forward  # type: ignore[method-assign]
    medians = {
        name: statistics.median(times)
        for name, times in measure_steps(driver, parsed.rows, parsed.prompt).items()
    }
    for name, median in medians.items():
        share = 100 * (median / medians["plain"] - 1)
        print(f"{parsed.rows} rows after {parsed.prompt}, {name}: {median:.1f} us, {share:+.2f} %")
    print(f"copy of {parsed.prefix} positions: {measure_copy(driver, parsed.prefix):.2f} ms")


if __name__ == "__main__":
    main()
