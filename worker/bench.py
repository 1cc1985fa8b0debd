"""`python -m worker bench`: the engine without gRPC; `python -m worker plan`: the memory plan.

The bench drives an Executor as the scheduler does (decode rows first, then chunks up to the budget)
and prints JSON: the floor under every figure of the served system.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from worker.batch import DecodeRow, PrefillChunk, Row, SlotSetup, StepCommand
from worker.checkpoint import open_checkpoint
from worker.device import default_threads, open_device
from worker.executor import Executor, Submitted
from worker.memory_plan import beside
from worker.rank import Rank, RankSetup, resolve_limits
from worker.sharding import shard_of

# Commands under way at once, as the scheduler has them.
_MAX_OUTSTANDING = 2


@dataclass(slots=True)
class _Sequence:
    slot: int
    prompt: tuple[int, ...]
    num_new: int
    num_planned: int = 0
    num_asked: int = 0
    token_times_ns: list[int] = field(default_factory=list)

    @property
    def setup(self) -> SlotSetup:
        max_len = len(self.prompt) + self.num_new
        return SlotSetup(0.0, 1.0, 0, 0.0, 0, (), max_len, decode_row=self.slot)


class _Driver:
    """Plans commands for a fixed set of sequences that all arrive at once, two ahead."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._step_id = 0
        self._generation = 0

    def run(self, sequences: list[_Sequence], steps_per_command: int) -> tuple[int, list[float]]:
        """Generates all; returns the wall time in ns and the decode step times in ms."""
        self._generation += 1
        waiting = deque(sequences)
        by_slot = {sequence.slot: sequence for sequence in sequences}
        step_ms: list[float] = []
        under_way: deque[Submitted] = deque()
        started_ns = time.perf_counter_ns()
        while True:
            rows = self._rows(sequences, waiting) if len(under_way) < _MAX_OUTSTANDING else []
            if rows:
                under_way.append(self._submit(rows, by_slot, steps_per_command))
            elif under_way:
                step_ms += self._collect(under_way.popleft(), by_slot, started_ns)
            else:
                return time.perf_counter_ns() - started_ns, step_ms

    def gaps_ns(self, count: int) -> list[int]:
        """See Runner.gaps_ns."""
        return self._executor.runner.gaps_ns(count)

    def _submit(
        self, rows: list[Row], by_slot: dict[int, _Sequence], steps_per_command: int
    ) -> Submitted:
        decoding = all(isinstance(row, DecodeRow) for row in rows)
        num_steps = self._steps(rows, by_slot, steps_per_command) if decoding else 1
        for row in rows:
            if isinstance(row, DecodeRow) or row.sample:
                by_slot[row.slot].num_asked += num_steps
        self._step_id += 1
        return self._executor.submit(
            StepCommand(self._executor.epoch, self._step_id, num_steps, tuple(rows))
        )

    def _collect(
        self, submitted: Submitted, by_slot: dict[int, _Sequence], started_ns: int
    ) -> list[float]:
        """Notes the tokens; the times of the command's decode steps."""
        result = self._executor.collect(submitted)
        now_ns = time.perf_counter_ns()
        for row in result.rows:
            by_slot[row.slot].token_times_ns += [now_ns - started_ns] * len(row.token_ids)
        command = submitted.command
        if not all(isinstance(row, DecodeRow) for row in command.rows):
            return []
        return [result.duration_ns / command.num_steps / 1e6] * command.num_steps

    def _rows(self, sequences: list[_Sequence], waiting: deque[_Sequence]) -> list[Row]:
        rows: list[Row] = [
            DecodeRow(sequence.slot, self._generation)
            for sequence in sequences
            if 0 < sequence.num_asked < sequence.num_new
        ]
        budget = self._executor.limits.max_step_tokens - len(rows)
        while waiting and budget > 0:
            sequence = waiting[0]
            start = sequence.num_planned
            token_ids = sequence.prompt[start : start + budget]
            budget -= len(token_ids)
            sequence.num_planned += len(token_ids)
            last = sequence.num_planned == len(sequence.prompt)
            setup = None if start else sequence.setup
            rows.append(
                PrefillChunk(sequence.slot, self._generation, start, token_ids, last, setup)
            )
            if last:
                waiting.popleft()
        return rows

    @staticmethod
    def _steps(rows: list[Row], by_slot: dict[int, _Sequence], steps_per_command: int) -> int:
        left = [by_slot[row.slot].num_new - by_slot[row.slot].num_asked for row in rows]
        return min(steps_per_command, *left)


def main_bench(arguments: list[str]) -> int:
    """The ladder: one line of figures per concurrency, as JSON on stdout."""
    parser = argparse.ArgumentParser(prog="python -m worker bench")
    _add_model_arguments(parser)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--prompt-token-ids-json", type=Path, help="file with one list of ids, or several"
    )
    parser.add_argument("--steps-per-command", type=int, default=4)
    parser.add_argument(
        "--threads", type=int, default=default_threads(), help="on the CPU; a GPU uses none"
    )
    parsed = parser.parse_args(arguments)
    if min(parsed.concurrency) < 1 or parsed.new_tokens < 2 or parsed.prompt_tokens < 1:
        raise ValueError("--concurrency and --prompt-tokens start at 1, --new-tokens at 2")
    rank = Rank(parsed.model, parsed.threads, parsed.device)
    prompts = _prompts(parsed, max(parsed.concurrency))
    longest = max(len(prompt) for prompt in prompts) + parsed.new_tokens
    setup = RankSetup(
        epoch=1,
        num_slots=max(parsed.concurrency),
        max_seq_len=parsed.max_seq_len or longest,
        weight_dtype=parsed.dtype,
        kv_dtype=parsed.kv_dtype,
        max_step_tokens=parsed.max_step_tokens,
    )
    info = rank.configure(setup, lambda *_: None, lambda: False)
    driver = _Driver(rank.executor)
    _measure(driver, prompts[:1], 2, parsed.steps_per_command)  # warm-up
    ladder = [
        _measure(driver, prompts[:count], parsed.new_tokens, parsed.steps_per_command)
        for count in parsed.concurrency
    ]
    report = {
        "model": str(parsed.model),
        "weight_dtype": info.limits.weight_dtype,
        "kv_dtype": info.limits.kv_dtype,
        "device": info.device,
        "num_threads": info.num_threads,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "new_tokens": parsed.new_tokens,
        "predicted_memory_bytes": info.plan.predicted_bytes,
        "measured_memory_bytes": info.measured_bytes,
        "self_tests": {test.name: test.passed for test in info.self_tests},
        "ladder": ladder,
    }
    print(json.dumps(report, indent=2))
    return 0


def main_plan(arguments: list[str]) -> int:
    """The memory plan of one rank, as JSON on stdout; nothing is loaded."""
    parser = argparse.ArgumentParser(prog="python -m worker plan")
    _add_model_arguments(parser)
    parser.add_argument("--num-slots", type=int, default=8)
    parser.add_argument("--max-running", type=int, default=0, help="0: as many as slots")
    parser.add_argument("--tp", type=int, default=1)
    parsed = parser.parse_args(arguments)
    checkpoint = open_checkpoint(parsed.model)
    setup = RankSetup(
        epoch=1,
        world_size=parsed.tp,
        num_slots=parsed.num_slots,
        max_seq_len=parsed.max_seq_len,
        weight_dtype=parsed.dtype,
        kv_dtype=parsed.kv_dtype,
        max_step_tokens=parsed.max_step_tokens,
        max_running=parsed.max_running,
    )
    devices = [open_device(parsed.device, rank, default_threads()) for rank in range(parsed.tp)]
    limits = resolve_limits(checkpoint, setup, devices[0])
    devices[0].check_model(checkpoint.config, limits)
    plans = [
        device.plan(checkpoint.config, shard_of(checkpoint.config, rank, parsed.tp), limits)
        for rank, device in enumerate(devices)
    ]
    # Taken to be on this machine, all of them; on GPUs each has its own.
    shared = devices[0].shares_memory
    needed = sum(plan.needed_bytes for plan in plans) if shared else 0
    report = {
        "model": str(parsed.model),
        "fingerprint": checkpoint.fingerprint,
        "world_size": parsed.tp,
        "device": devices[0].name,
        "ranks": [
            (beside(plan, needed - plan.needed_bytes) if shared else plan).as_dict()
            for plan in plans
        ],
    }
    print(json.dumps(report, indent=2))
    return 0


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face model folder")
    parser.add_argument("--max-seq-len", type=int, default=0, help="0: as needed")
    parser.add_argument("--max-step-tokens", type=int, default=0, help="0: the device's")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (by rank) or cuda:N")
    parser.add_argument("--kv-dtype", default="auto")


def _prompts(parsed: argparse.Namespace, count: int) -> list[tuple[int, ...]]:
    if parsed.prompt_token_ids_json is None:
        vocab = open_checkpoint(parsed.model).config.vocab_size
        return [
            tuple((1 + 31 * seat + 7919 * index) % vocab for index in range(parsed.prompt_tokens))
            for seat in range(count)
        ]
    lists = json.loads(parsed.prompt_token_ids_json.read_text())
    if lists and isinstance(lists[0], int):
        lists = [lists]
    if not lists or not all(lists):
        raise ValueError(f"{parsed.prompt_token_ids_json} holds no token ids")
    return [tuple(lists[seat % len(lists)]) for seat in range(count)]


def _measure(
    driver: _Driver, prompts: list[tuple[int, ...]], num_new: int, steps_per_command: int
) -> dict[str, object]:
    sequences = [_Sequence(slot, prompt, num_new) for slot, prompt in enumerate(prompts)]
    wall_ns, step_ms = driver.run(sequences, steps_per_command)
    # Of one request every step after its prompt is a decode step of its own.
    gaps_ns = driver.gaps_ns(num_new - 1) if len(sequences) == 1 else []
    ttft_ms = [sequence.token_times_ns[0] / 1e6 for sequence in sequences]
    prefill_ns = max(sequence.token_times_ns[0] for sequence in sequences)
    return {
        "concurrency": len(sequences),
        "wall_ms": wall_ns / 1e6,
        "tokens_per_s": sum(len(s.token_times_ns) for s in sequences) / wall_ns * 1e9,
        "decode_tokens_per_s": len(sequences) / statistics.mean(step_ms) * 1e3,
        "ttft_ms": ttft_ms,
        "step_ms_median": statistics.median(step_ms),
        "step_ms_max": max(step_ms),
        "prefill_share": prefill_ns / wall_ns,
        "idle_us_median": statistics.median(gaps_ns) / 1e3 if gaps_ns else None,
        "idle_us_max": max(gaps_ns) / 1e3 if gaps_ns else None,
    }
