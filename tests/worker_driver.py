"""Drives a rank in this process: step ids, generations, every logits row that was sampled from."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from free_ports import fixed_port

from worker.batch import (
    DecodeRow,
    ForwardBatch,
    PrefillChunk,
    Prefix,
    Row,
    RowResult,
    SlotSetup,
    StepCommand,
    StepResult,
)
from worker.rank import Rank, RankInfo, RankSetup

T = TypeVar("T")


def sampling(
    max_len: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
    end: tuple[int, ...] = (),
    **others: Any,
) -> SlotSetup:
    """`others`: further fields of SlotSetup; Driver.first_chunk sets decode_row."""
    return SlotSetup(temperature, top_p, top_k, min_p, seed, end, max_len, **others)


class Driver:
    """A configured rank, and the commands to it."""

    def __init__(
        self, directory: Path, num_threads: int = 1, device: str = "cpu", **setup: Any
    ) -> None:
        setup = {"epoch": 1, "num_slots": 4, **setup}
        self.rank = Rank(directory, num_threads, device)
        self.info: RankInfo = self.rank.configure(
            RankSetup(**setup), lambda *_: None, lambda: False
        )
        self.executor = self.rank.executor
        self.decoder = self.executor.runner.decoder
        self.step_id = 0
        self.generations = [0] * self.info.limits.num_slots
        # (slot, generation, position of the token drawn from it) -> logits [V]
        self.logits: dict[tuple[int, int, int], torch.Tensor] = {}
        self._forward = self.decoder.forward
        self.decoder.forward = self._recording_forward  # type: ignore[method-assign]

    def first_chunk(
        self,
        slot: int,
        tokens: tuple[int, ...],
        setup: SlotSetup,
        *,
        sample: bool = True,
        source: int = -1,
        num_cached: int = 0,
        **others: Any,
    ) -> PrefillChunk:
        """The slot gets a new tenant; its first `num_cached` positions are those of slot `source`.

        `tokens` are those after them. The slot has the decode row of its own number, or of what
        remains of it.
        """
        row = slot % self.info.limits.max_running
        prefix = None
        if num_cached:
            prefix = Prefix(source, self.generations[source], num_cached)
        self.generations[slot] += 1
        return PrefillChunk(
            slot,
            self.generations[slot],
            num_cached,
            tokens,
            sample,
            replace(setup, decode_row=row),
            prefix,
            **others,
        )

    def chunk(
        self,
        slot: int,
        start: int,
        tokens: tuple[int, ...],
        *,
        sample: bool = True,
        **others: Any,
    ) -> PrefillChunk:
        return PrefillChunk(slot, self.generations[slot], start, tokens, sample, None, **others)

    def decode(self, slot: int, allowed_tokens: bytes = b"") -> DecodeRow:
        return DecodeRow(slot, self.generations[slot], allowed_tokens)

    def run(self, *rows: Row, num_steps: int = 1) -> StepResult:
        self.step_id += 1
        return self.executor.run(
            StepCommand(self.executor.epoch, self.step_id, num_steps, tuple(rows))
        )

    def generate(
        self,
        prompt: tuple[int, ...],
        num_new: int,
        slot: int = 0,
        *,
        cuts: tuple[int, ...] = (),
        num_steps: int = 1,
        **parameters: Any,
    ) -> list[int]:
        """One request alone; `cuts` are the positions at which its prompt is divided."""
        setup = sampling(len(prompt) + num_new, **parameters)
        bounds = [0, *cuts, len(prompt)]
        tokens: list[int] = []
        for begin, end in itertools.pairwise(bounds):
            last = end == len(prompt)
            piece = prompt[begin:end]
            row = (
                self.chunk(slot, begin, piece, sample=last)
                if begin
                else self.first_chunk(slot, piece, setup, sample=last)
            )
            tokens += self.run(row).rows[0].token_ids
        while True:
            row_result = self.run(self.decode(slot), num_steps=num_steps).rows[0]
            if not row_result.token_ids:
                return tokens
            tokens += row_result.token_ids

    def logits_of(self, slot: int) -> dict[int, torch.Tensor]:
        """The present tenant's logits by position."""
        generation = self.generations[slot]
        return {p: row for (s, g, p), row in self.logits.items() if (s, g) == (slot, generation)}

    def _recording_forward(self, batch: ForwardBatch) -> torch.Tensor:
        logits = self._forward(batch)
        rows = range(batch.num_rows) if batch.sample_rows is None else batch.sample_rows.tolist()
        for index, row in enumerate(rows):
            slot, position = int(batch.slots[row]), int(batch.positions[row])
            key = (slot, self.generations[slot], position + 1)
            self.logits[key] = logits[index].clone()
        return logits


def by_slot(result: StepResult) -> dict[int, RowResult]:
    return {row.slot: row for row in result.rows}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.int32), right.contiguous().view(torch.int32)
    )


def free_address() -> str:
    """A local "host:port" that nobody listens on now."""
    return f"127.0.0.1:{fixed_port()}"


def on_ranks(world_size: int, work: Callable[[int], T]) -> list[T]:
    """Runs work(rank) for every rank, each on a thread of its own; raises the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    if errors:
        raise errors[0]
    assert len(results) == world_size, "a rank did not come to its end"
    return [results[rank] for rank in range(world_size)]
