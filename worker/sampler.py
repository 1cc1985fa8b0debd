"""Sampling parameters by slot, and the draw. S slots, B rows to sample, V vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker._native import CpuOps
from worker.batch import LogitAdjustment, SlotSetup, TokenLogprobs
from worker.runner import CORRUPTED, LOGPROBS_RECORD, LOGPROBS_WORDS, read_logprobs

_Logits = np.ndarray[Any, np.dtype[np.float32]]


class Adjuster:
    """A slot's LogitAdjustment, and how often each token was generated."""

    def __init__(self, adjustment: LogitAdjustment, end_token_ids: Sequence[int]) -> None:
        self._frequency = np.float32(adjustment.frequency_penalty)
        self._presence = np.float32(adjustment.presence_penalty)
        self._repetition = np.float32(adjustment.repetition_penalty)
        self._prompt = set(adjustment.prompt_token_ids)
        self._counts: dict[int, int] = {}
        for token_id in adjustment.generated_token_ids:
            self.count(token_id)
        self._biased = np.array([token_id for token_id, _ in adjustment.biases], dtype=np.int64)
        self._biases = np.array([bias for _, bias in adjustment.biases], dtype=np.float32)
        self._ends = np.array(sorted(end_token_ids), dtype=np.int64)
        self._min_len = adjustment.min_len

    def count(self, token_id: int) -> None:
        """The token was generated."""
        self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def apply(self, row: _Logits, length: int) -> None:
        """Changes the logits [V] from which a sequence of `length` tokens goes on: worker.proto."""
        # What is too large is infinite, as on a GPU; the draw sees it.
        with np.errstate(over="ignore", invalid="ignore"):
            self._penalize(row)
            row[self._biased] += self._biases
        if length < self._min_len:
            row[self._ends] = -np.inf

    def _penalize(self, row: _Logits) -> None:
        if self._repetition != 1:
            seen = _ids(self._prompt | self._counts.keys())
            logits = row[seen]
            row[seen] = np.where(logits > 0, logits / self._repetition, logits * self._repetition)
        if self._counts and (self._frequency or self._presence):
            generated = _ids(self._counts)
            counts = np.array(list(self._counts.values()), dtype=np.float32)
            row[generated] = row[generated] - self._frequency * counts - self._presence


class Sampler:
    """Keeps each slot's parameters; draws are keyed by (seed, position, token id)."""

    def __init__(self, ops: CpuOps, num_slots: int, max_rows: int, vocab_size: int) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._by_slot = _parameters(num_slots)
        self._gathered = _parameters(max_rows)
        self._out = torch.zeros(max_rows, dtype=torch.int32)
        self._num_logprobs = [-1] * num_slots
        self._adjusters: dict[int, Adjuster] = {}

    def set_slot(self, slot: int, setup: SlotSetup) -> None:
        """Parameters of the slot's new tenant."""
        self._adjusters.pop(slot, None)
        if setup.adjustment is not None:
            # Ids past the vocabulary are never drawn.
            ends = [token_id for token_id in setup.end_token_ids if token_id < self._vocab_size]
            self._adjusters[slot] = Adjuster(setup.adjustment, ends)
        temperature, top_k, top_p, min_p, seed = self._by_slot
        temperature[slot] = setup.temperature
        # More than the vocabulary keeps everything, as 0 does.
        top_k[slot] = setup.top_k if setup.top_k < self._vocab_size else 0
        top_p[slot] = setup.top_p
        min_p[slot] = setup.min_p
        # The native side reads the same 64 bits as unsigned.
        seed[slot] = setup.seed - (1 << 64) if setup.seed >= 1 << 63 else setup.seed
        self._num_logprobs[slot] = setup.num_logprobs

    def sample(
        self, logits: Tensor, slots: list[int], positions: list[int], masks: dict[int, bytes]
    ) -> list[int]:
        """A token id per row of logits [B, V] (-1: corrupted row); position of each drawn token.

        `masks` by slot, as in StepWork. The logits stay as they are.
        """
        count = len(slots)
        logits = self._adjusted(logits, slots, positions, masks)
        rows = torch.tensor(slots, dtype=torch.int64)
        chosen = [buffer[:count] for buffer in self._gathered]
        for parameter, target in zip(self._by_slot, chosen, strict=True):
            torch.index_select(parameter, 0, rows, out=target)
        temperature, top_k, top_p, min_p, seeds = chosen
        out = self._out[:count]
        self._ops.sample(
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            torch.tensor(positions, dtype=torch.int32),
            out,
        )
        token_ids: list[int] = out.tolist()
        for slot, token_id in zip(slots, token_ids, strict=True):
            if slot in self._adjusters and token_id != CORRUPTED:
                self._adjusters[slot].count(token_id)
        return token_ids

    def _adjusted(
        self, logits: Tensor, slots: list[int], positions: list[int], masks: dict[int, bytes]
    ) -> Tensor:
        """The logits, or a copy in which some rows are adjusted or masked."""
        rows = [r for r, slot in enumerate(slots) if slot in self._adjusters or slot in masks]
        if not rows:
            return logits
        logits = logits.clone()
        for index in rows:
            slot, row = slots[index], logits[index].numpy()
            if slot in self._adjusters:
                self._adjusters[slot].apply(row, positions[index])
            if slot in masks:
                bits = np.frombuffer(masks[slot], dtype=np.uint8)
                allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
                row[allowed == 0] = -np.inf
        return logits

    def logprobs(
        self, logits: Tensor, slots: list[int], token_ids: list[int]
    ) -> dict[int, TokenLogprobs]:
        """By slot, where it wants them; `token_ids` were drawn from logits [B, V]."""
        rows = [
            row
            for row, (slot, token_id) in enumerate(zip(slots, token_ids, strict=True))
            if self._num_logprobs[slot] >= 0 and token_id != CORRUPTED
        ]
        if not rows:
            return {}
        found = self.logprobs_of(
            logits[rows],
            [token_ids[row] for row in rows],
            [self._num_logprobs[slots[row]] for row in rows],
        )
        return {slots[row]: token for row, token in zip(rows, found, strict=True)}

    def logprobs_of(
        self, logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Of a token per row of logits [B, V], and of as many of the best as `counts` says."""
        counts = [min(count, self._vocab_size) for count in counts]
        out = torch.zeros(len(counts), LOGPROBS_WORDS, dtype=torch.int32)
        tokens = torch.tensor(token_ids, dtype=torch.int32)
        self._ops.logprobs(logits, tokens, torch.tensor(counts, dtype=torch.int32), out)
        records = out.numpy().view(LOGPROBS_RECORD)[:, 0]
        return [read_logprobs(records[row : row + 1], count)[0] for row, count in enumerate(counts)]


def _ids(token_ids: Collection[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))


def _parameters(count: int) -> tuple[Tensor, ...]:
    """temperature, top_k, top_p, min_p, seed."""
    return (
        torch.zeros(count),
        torch.zeros(count, dtype=torch.int32),
        torch.ones(count),
        torch.zeros(count),
        torch.zeros(count, dtype=torch.int64),
    )
