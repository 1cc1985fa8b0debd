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

    `memory` is all of them, keys before values: [2 L, S, P, H_kv, D]. On a GPU the positions of a
    head lie one after another: [2 L, S, H_kv, P, D].
    """

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        on_gpu = device.type == "cuda"
        places = [shape.max_seq_len, shape.num_kv_heads]
        self.memory = torch.empty(
            2 * shape.num_layers,
            shape.num_slots,
            *(places[::-1] if on_gpu else places),
            shape.head_dim,
            dtype=TORCH_DTYPES[shape.dtype],
            device=device,
        )
        # Written once here, so that the memory is really there and does not grow later.
        self.memory.zero_()
        layers = (self.memory.transpose(2, 3) if on_gpu else self.memory).unbind()
        self.keys, self.values = layers[: shape.num_layers], layers[shape.num_layers :]

    def clear(self, slot: int) -> None:
        """Zeroes a slot in every layer."""
        self.memory[:, slot].zero_()


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

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of slot `source` become those of `target`."""
        memory = self.cache.memory
        memory[:, target, :length] = memory[:, source, :length]

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
        for chunk in batch.chunks:
            rows = slice(chunk.first_row, chunk.end_row)
            self.ops.prefill_attention(
                qkv[rows], keys, values, chunk.slot, chunk.start, self.scale, out[rows]
            )
