"""The slot cache and attention over it.

S slots, P positions of a slot, T rows of a forward, L layers, H_q / H_kv heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from worker._native import CpuOps
from worker.batch import ForwardBatch
from worker.weights import TORCH_DTYPES, LayerWeights

if TYPE_CHECKING:
    from worker._native import CudaOps


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Size of a slot cache; at most `num_rows` of its slots decode at a time."""

    num_layers: int
    num_slots: int
    num_rows: int
    max_seq_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str


class SlotCache:
    """Keys and values of every slot: per layer two tensors [S, P, H_kv, D], zero at first.

    On a GPU the positions of a head lie one after another in memory.
    """

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        self.keys = [_layer(shape, device) for _ in range(shape.num_layers)]
        self.values = [_layer(shape, device) for _ in range(shape.num_layers)]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of slot `source` become those of `target`."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :length].copy_(tensor[source, :length])

    def clear(self, slot: int) -> None:
        """Zeroes a slot in every layer."""
        for tensor in (*self.keys, *self.values):
            tensor[slot].zero_()


def _layer(shape: CacheShape, device: torch.device) -> Tensor:
    slots, positions, heads, dim = (
        shape.num_slots,
        shape.max_seq_len,
        shape.num_kv_heads,
        shape.head_dim,
    )
    dtype = TORCH_DTYPES[shape.dtype]
    if device.type == "cuda":
        return torch.zeros(slots, heads, positions, dim, dtype=dtype, device=device).transpose(1, 2)
    # Written once here, so that the memory is really there and does not grow later.
    return torch.empty(slots, positions, heads, dim, dtype=dtype).zero_()


@dataclass(frozen=True, slots=True)
class Attention:
    """Normalise, rotate and append K and V, then attend: the same bits in prefill and decode."""

    ops: CpuOps
    cache: SlotCache
    cos: Tensor
    sin: Tensor
    eps: float
    scale: float

    def append(self, index: int, layer: LayerWeights, batch: ForwardBatch, qkv: Tensor) -> None:
        """Norms and rotates qkv [T, (H_q + 2 H_kv) D]; K and V go to layer `index` of the cache."""
        self.ops.rope_append(
            qkv,
            layer.q_norm,
            layer.k_norm,
            self.eps,
            self.cos,
            self.sin,
            batch.slots,
            batch.positions,
            self.cache.keys[index],
            self.cache.values[index],
        )

    def attend(
        self, index: int, layer: LayerWeights, batch: ForwardBatch, qkv: Tensor, out: Tensor
    ) -> None:
        """out [T, H_q D]: the rows of qkv, as append left them, over layer `index` of the cache."""
        keys, values = self.cache.keys[index], self.cache.values[index]
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
        attend_chunks(self.ops, keys, values, batch, qkv, self.scale, out)


def attend_chunks(
    ops: CpuOps | CudaOps,
    keys: Tensor,
    values: Tensor,
    batch: ForwardBatch,
    qkv: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """The rows of the batch's chunks: a chunk at a time, over keys and values of its slot."""
    for chunk in batch.chunks:
        rows = slice(chunk.first_row, chunk.end_row)
        ops.prefill_attention(qkv[rows], keys, values, chunk.slot, chunk.start, scale, out[rows])
