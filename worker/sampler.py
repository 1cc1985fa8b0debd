"""Sampling parameters by slot, and the draw. S slots, B rows to sample, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from worker._native import CpuOps
from worker.batch import SlotSetup


class Sampler:
    """Keeps each slot's parameters; draws are keyed by (seed, position, token id)."""

    def __init__(self, ops: CpuOps, num_slots: int, vocab_size: int) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._by_slot = _parameters(num_slots)
        self._gathered = _parameters(num_slots)
        self._out = torch.zeros(num_slots, dtype=torch.int32)

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


def _parameters(count: int) -> tuple[Tensor, ...]:
    """temperature, top_k, top_p, min_p, seed."""
    return (
        torch.zeros(count),
        torch.zeros(count, dtype=torch.int32),
        torch.ones(count),
        torch.zeros(count),
        torch.zeros(count, dtype=torch.int64),
    )
