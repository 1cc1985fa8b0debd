"""The slot cache and attention over it.

S slots, P positions of a slot, T rows of a forward, L layers, H_q / H_kv heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker._native import CpuOps
from worker.batch import ForwardBatch
from worker.weights import TORCH_DTYPES, LayerWeights


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Size of a slot cache."""

    num_layers: int
    num_slots: int
    max_seq_len: int
    num_kv_heads: int
    head_dim: int
    dtype: str


class SlotCache:
    """Keys and values of every slot: per layer two tensors [S, P, H_kv, D], zero at first."""

    def __init__(self, shape: CacheShape) -> None:
        sizes = (shape.num_slots, shape.max_seq_len, shape.num_kv_heads, shape.head_dim)
        dtype = TORCH_DTYPES[shape.dtype]
        self.shape = shape
        # Written once here, so that the memory is really there and does not grow later.
        self.keys = [torch.empty(sizes, dtype=dtype).zero_() for _ in range(shape.num_layers)]
        self.values = [torch.empty(sizes, dtype=dtype).zero_() for _ in range(shape.num_layers)]

    def clear(self, slot: int) -> None:
        """Zeroes a slot in every layer."""
        for tensor in (*self.keys, *self.values):
            tensor[slot].zero_()


@dataclass(frozen=True, slots=True)
class Attention:
    """Normalise, rotate and append K and V, then attend: the same bits in prefill and decode."""

    ops: CpuOps
    cache: SlotCache
    cos: Tensor
    sin: Tensor
    eps: float
    scale: float

    def run(
        self, index: int, layer: LayerWeights, batch: ForwardBatch, qkv: Tensor, out: Tensor
    ) -> None:
        """out [T, H_q D] of qkv [T, (H_q + 2 H_kv) D]; K and V go to layer `index` of the cache."""
        keys, values = self.cache.keys[index], self.cache.values[index]
        self.ops.rope_append(
            qkv,
            layer.q_norm,
            layer.k_norm,
            self.eps,
            self.cos,
            self.sin,
            batch.slots,
            batch.positions,
            keys,
            values,
        )
        decode = batch.num_decode_rows
        if decode:
            self.ops.decode_attention(
                qkv[:decode],
                keys,
                values,
                batch.slots[:decode],
                batch.positions[:decode],
                self.scale,
                out[:decode],
            )
        for chunk in batch.chunks:
            rows = slice(chunk.first_row, chunk.end_row)
            self.ops.prefill_attention(
                qkv[rows], keys, values, chunk.slot, chunk.start, self.scale, out[rows]
            )
