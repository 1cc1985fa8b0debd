"""A rank on a GPU, driven in this process. Tests that need one are skipped where there is none."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_driver import Driver, by_slot, sampling

from worker import _native
from worker.batch import (
    DecodeRow,
    ForwardBatch,
    PrefillChunk,
    Row,
    StepCommand,
    StepResult,
    TokenLogprobs,
)
from worker.executor import Submitted

DEVICE = "cuda"
VOCAB_SIZE = 2048
# Heads as those of Qwen3.
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
}


def num_gpus() -> int:
    """GPUs that this build can use."""
    return torch.cuda.device_count() if _native.BUILT_WITH_CUDA else 0


def needs_gpus(count: int = 1) -> pytest.MarkDecorator:
    """Skips without `count` GPUs and a build with CUDA."""
    reason = f"needs {count} NVIDIA GPU(s) and a build with SLOTWISE_CUDA=ON"
    return pytest.mark.skipif(num_gpus() < count, reason=reason)


class GpuDriver(Driver):
    """Records the logits of every decode step and of every sampled prompt.

    `watched`: decode steps run one kernel after the other, so that each step's logits are seen.
    Else they are replays of the graph, and the logits of commands of one step are seen.
    `logprobs`: of every tenant that wanted them, by slot and generation.
    """

    def __init__(self, directory: Path, device: str = DEVICE, **setup: Any) -> None:
        super().__init__(directory, device=device, **setup)
        self.runner: Any = self.executor.runner
        self.logprobs: dict[tuple[int, int], list[TokenLogprobs]] = {}
        self._graphs = self.runner._steps
        self._run_chunks = self.runner._chunks.forward
        self.runner._chunks.forward = self._recording_chunks
        self.watched = True

    @property
    def watched(self) -> bool:
        return self.runner._steps is not self._graphs

    @watched.setter
    def watched(self, value: bool) -> None:
        eager = {wanted: partial(self.runner._decode_step, wanted) for wanted in self._graphs}
        self.runner._steps = eager if value else self._graphs

    def enter(self) -> None:
        """After work on another driver: each has a stream of its own."""
        torch.cuda.synchronize()
        self.rank._open_device(self.info.rank)

    def submit(self, *rows: Row, num_steps: int = 1) -> Submitted:
        self.step_id += 1
        command = StepCommand(self.executor.epoch, self.step_id, num_steps, tuple(rows))
        return self.executor.submit(command)

    def run(self, *rows: Row, num_steps: int = 1) -> StepResult:
        result = self.executor.collect(self.submit(*rows, num_steps=num_steps))
        for row in result.rows:
            self.logprobs.setdefault((row.slot, row.generation), []).extend(row.logprobs)
        only_decodes = all(isinstance(row, DecodeRow) for row in rows)
        if not self.watched and only_decodes and num_steps == 1:
            for row in result.rows:
                if row.token_ids:
                    position = self.executor._slots[row.slot].length
                    at = self.runner._tenants[row.slot].decode_row
                    self._keep(row.slot, position, self.decoder._logits[at])
        return result

    def _recording_forward(self, batch: ForwardBatch) -> torch.Tensor:
        if batch.chunks:
            return self._forward(batch)
        rows = self._table_rows()
        logits = self._forward(batch)
        self._keep_rows(rows, logits)
        return logits

    def _recording_chunks(
        self, chunks: tuple[PrefillChunk, ...], mixed: bool
    ) -> tuple[ForwardBatch, torch.Tensor]:
        rows = self._table_rows() if mixed else []
        batch, logits = self._run_chunks(chunks, mixed)
        self._keep_rows(rows, logits)
        sampled = [chunk for chunk in chunks if chunk.sample]
        for row, chunk in enumerate(sampled, len(rows)):
            self._keep(chunk.slot, chunk.start + len(chunk.token_ids), logits[row])
        return batch, logits

    def _table_rows(self) -> list[tuple[int, int]]:
        """Slots and positions of the table's rows in the next step."""
        slots = self.runner._slots
        return list(zip(slots.cache_slot.tolist(), slots.row_position.tolist(), strict=True))

    def _keep_rows(self, rows: list[tuple[int, int]], logits: torch.Tensor) -> None:
        for row, (slot, position) in enumerate(rows):
            if position >= 0:
                self._keep(slot, position + 1, logits[row])

    def _keep(self, slot: int, position: int, row: torch.Tensor) -> None:
        # A copy in any case, so that the next step cannot change it.
        self.logits[(slot, self.generations[slot], position)] = row.to("cpu", copy=True)


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    """The same for the same numbers."""
    return tuple(random.Random(seed).choices(range(3, VOCAB_SIZE), k=length))


def in_company(
    driver: GpuDriver,
    ours: int,
    neighbours: int,
    prompt: tuple[int, ...],
    num_new: int,
    parameters: dict[str, Any],
    cuts: tuple[int, ...] = (),
    num_steps: int = 1,
) -> list[int]:
    """The tokens of slot `ours` beside neighbours that come and go, some greedy and some drawn.

    Every other neighbour wants logprobs.
    Their chunks run beside our decode rows, and ours beside theirs. `cuts` divide our prompt;
    commands without a chunk have `num_steps` steps.
    """
    rng = random.Random(100 * neighbours + ours)
    longest = driver.info.limits.max_seq_len
    setup = sampling(len(prompt) + num_new, **parameters)
    bounds = [*cuts, len(prompt)]
    others = [slot for slot in range(neighbours + 1) if slot != ours]
    left: dict[int, int] = {}
    tokens: list[int] = []
    begin = 0
    for _ in range(3 * num_new + len(bounds)):
        rows: list[Row] = [driver.decode(slot) for slot in left]
        if begin == len(prompt):
            rows.append(driver.decode(ours))
        rng.shuffle(rows)
        num_decode = len(rows)
        if begin < len(prompt):
            end = bounds.pop(0)
            piece, last = prompt[begin:end], end == len(prompt)
            rows.append(
                driver.chunk(ours, begin, piece, sample=last)
                if begin
                else driver.first_chunk(ours, piece, setup, sample=last)
            )
            begin = end
        arriving = [slot for slot in others if slot not in left and rng.random() < 0.4]
        for slot in arriving:
            temperature, seed = rng.choice((0.0, 1.5)), rng.getrandbits(64)
            wanted = seed % 21 if seed % 2 else -1
            noise = sampling(longest, temperature=temperature, seed=seed, num_logprobs=wanted)
            theirs = prompt_of(rng.getrandbits(32), rng.choice((1, 15, 16, 17, 60, 130)))
            rows.append(driver.first_chunk(slot, theirs, noise))
        result = driver.run(*rows, num_steps=num_steps if num_decode == len(rows) else 1)
        assert not any(row.corrupted or -1 in row.token_ids for row in result.rows)
        tokens += by_slot(result)[ours].token_ids
        left = {slot: count - 1 for slot, count in left.items() if count > 1}
        left |= {slot: rng.randrange(1, 8) for slot in arriving}
        if len(tokens) >= num_new:
            break
    return tokens
