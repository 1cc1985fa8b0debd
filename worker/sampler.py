"""Sampling parameters by slot, and the draw. S slots, B rows to sample, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from worker._native import CpuOps
from worker.batch import SlotSetup, TokenLogprobs
from worker.runner import CORRUPTED, LOGPROBS_RECORD, LOGPROBS_WORDS, read_logprobs


class Sampler:
    """Keeps each slot's parameters; draws are keyed by (seed, position, token id)."""

    def __init__(self, ops: CpuOps, num_slots: int, vocab_size: int) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._by_slot = _parameters(num_slots)
        self._gathered = _parameters(num_slots)
        self._out = torch.zeros(num_slots, dtype=torch.int32)
        self._num_logprobs = [-1] * num_slots

    def set_slot(self, slot: int, setup: SlotSetup) -> None:
        """Parameters of the slot's new tenant."""
        temperature, top_k, top_p, min_p, seed = self._by_slot
        temperature[slot] = setup.temperature
        # More than the vocabulary keeps everything, as 0 does.
        top_k[slot] = setup.top_k if setup.top_k < self._vocab_size else 0
        top_p[slot] = setup.top_p
        min_p[slot] = setup.min_p
        # The native side reads the same 64 bits as unsigned.
        seed[slot] = setup.seed - (1 << 64) if setup.seed >= 1 << 63 else setup.seed
        self._num_logprobs[slot] = setup.num_logprobs

    def sample(self, logits: Tensor, slots: list[int], positions: list[int]) -> list[int]:
        """A token id per row of logits [B, V] (-1: corrupted row); position of each drawn token."""
        count = len(slots)
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
        return list(out.tolist())

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
        counts = [min(self._num_logprobs[slots[row]], self._vocab_size) for row in rows]
        out = torch.zeros(len(rows), LOGPROBS_WORDS, dtype=torch.int32)
        drawn = torch.tensor([token_ids[row] for row in rows], dtype=torch.int32)
        wanted = torch.tensor(counts, dtype=torch.int32)
        self._ops.logprobs(logits[rows], drawn, wanted, out)
        records = out.numpy().view(LOGPROBS_RECORD)[:, 0]
        return {
            slots[row]: read_logprobs(records[index : index + 1], counts[index])[0]
            for index, row in enumerate(rows)
        }


def _parameters(count: int) -> tuple[Tensor, ...]:
    """temperature, top_k, top_p, min_p, seed."""
    return (
        torch.zeros(count),
        torch.zeros(count, dtype=torch.int32),
        torch.ones(count),
        torch.zeros(count),
        torch.zeros(count, dtype=torch.int64),
    )
