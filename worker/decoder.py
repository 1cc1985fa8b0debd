"""The decoder of Qwen3, Qwen2 and Llama: one forward over the rows of many slots.

T rows of a forward, B rows whose logits are wanted, H hidden size, V vocabulary. The residual and
the logits are float32, other activations are of the backend's type. Under tensor parallelism every
rank holds the same residual; products with split inputs are summed over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from worker.attention import CacheShape, SlotCache
from worker.backend import Backend
from worker.batch import ChunkSpan, ForwardBatch
from worker.memory_plan import ServingLimits
from worker.model_config import ModelConfig
from worker.rope import rope_tables
from worker.sharding import Shard, vocab_parts
from worker.tensor_parallel import Group
from worker.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class Workspace:
    """Activations, allocated once, one row per token of a forward."""

    residual: Tensor
    normed: Tensor
    delta: Tensor
    qkv: Tensor
    attended: Tensor
    gate_up: Tensor
    activated: Tensor

    def rows(self, num_rows: int) -> Workspace:
        """The first `num_rows` rows."""
        return Workspace(
            residual=self.residual[:num_rows],
            normed=self.normed[:num_rows],
            delta=self.delta[:num_rows],
            qkv=self.qkv[:num_rows],
            attended=self.attended[:num_rows],
            gate_up=self.gate_up[:num_rows],
            activated=self.activated[:num_rows],
        )


class Decoder:
    """A rank's decoder with its slot cache and workspace; one forward at a time."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        limits: ServingLimits,
        weights: ModelWeights,
        ops: Backend[Any],
        group: Group,
    ) -> None:
        self.config = config
        self.shard = shard
        self.limits = limits
        self.weights = weights
        self.ops = ops
        self.cache = SlotCache(cache_shape(config, shard, limits), ops.device)
        self.group = group
        ops.agree(group)
        rows, sampled_rows = ops.forward_rows(limits), ops.sampled_rows(limits)
        self._workspace = _workspace(config, shard, ops, rows)
        self._sampled_space = _workspace(config, shard, ops, sampled_rows)
        self._logits = ops.floats(sampled_rows, config.vocab_size)
        # A lone rank's columns are all columns: it writes them where they belong.
        alone = shard.world_size == 1
        self._local_logits = self._logits if alone else ops.floats(sampled_rows, shard.vocab.size)
        cos, sin = rope_tables(config.rope, config.head_dim, limits.max_seq_len)
        self.attention = ops.attention(
            self.cache, cos, sin, config.rms_norm_eps, config.head_dim**-0.5
        )
        group.reserve(
            rows,
            config.hidden_size,
            sampled_rows,
            vocab_parts(config, shard.world_size),
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [B, V] of the sampled rows, the same on every rank; valid until the next call."""
        space = self._workspace.rows(batch.num_rows)
        self.ops.embed_batch(batch, self.weights.embed, self.shard.vocab.begin, space.residual)
        self.group.all_reduce(space.residual)
        eps = self.config.rms_norm_eps
        self.ops.rms_norm(space.residual, self.weights.layers[0].input_norm, eps, space.normed)
        last = self.config.num_layers - 1
        for index, layer in enumerate(self.weights.layers):
            self.ops.linear(space.normed, layer.qkv, space.qkv)
            self.attention.append(index, layer, batch, space.qkv)
            if index < last:
                self._finish_layer(index, batch, space)
        if batch.sample_rows is None:
            return self._head(batch, space, batch.num_rows)
        # Of the last layer the other rows leave nothing but their K and V.
        sampled = self._sampled(batch.sample_rows, space)
        return self._head(batch.sampled(), sampled, batch.num_sample_rows)

    def head_logits(
        self, batch: ForwardBatch, rows: Tensor, chunks: tuple[ChunkSpan, ...]
    ) -> Tensor:
        """Logits [B, V] of `rows` (integers [B]) of the last forward, `batch`, all of its chunks.

        `chunks`: whose they are, in their own numbering from 0. B at most `max_head_rows`. Valid
        until the next call of this or of forward; the same on every rank, and all must call it.
        """
        batch = replace(batch, num_decode_rows=0, sampled_chunks=chunks)
        space = self._workspace.rows(batch.num_rows)
        return self._head(batch.sampled(), self._sampled(rows, space), rows.shape[0])

    @property
    def max_head_rows(self) -> int:
        """The most rows that head_logits takes at once."""
        return self.ops.sampled_rows(self.limits)

    def _head(self, batch: ForwardBatch, space: Workspace, count: int) -> Tensor:
        """The last layer from its attention on, and the logits [B, V]; B is `count`."""
        if count == 0:
            return self._logits[:0]
        self._finish_layer(self.config.num_layers - 1, batch, space)
        rows = space.normed.shape[0]
        self.ops.linear(space.normed, self.weights.head, self._local_logits[:rows])
        self.group.gather_columns(self._local_logits[:rows], self._logits[:rows])
        return self._logits[:count]

    def _finish_layer(self, index: int, batch: ForwardBatch, space: Workspace) -> None:
        """Layer `index` from its attention on; normed is the next layer's input."""
        layer = self.weights.layers[index]
        self.attention.attend(index, layer, batch, space.qkv, space.attended)
        self.ops.linear(space.attended, layer.o, space.delta)
        self._add_norm(space, layer.post_norm)
        self.ops.gated_linear(space.normed, layer.gate_up, space.gate_up, space.activated)
        self.ops.linear(space.activated, layer.down, space.delta)
        self._add_norm(space, self._next_norm(index))

    def _next_norm(self, index: int) -> Tensor:
        """The norm after layer `index`."""
        layers = self.weights.layers
        return layers[index + 1].input_norm if index + 1 < len(layers) else self.weights.final_norm

    def _sampled(self, rows: Tensor, space: Workspace) -> Workspace:
        """The wanted rows of qkv and of the residual, in a space of their own."""
        count = rows.shape[0]
        sampled = self._sampled_space.rows(self.ops.num_rows(count))
        torch.index_select(space.qkv, 0, rows, out=sampled.qkv[:count])
        torch.index_select(space.residual, 0, rows, out=sampled.residual[:count])
        return sampled

    def _add_norm(self, space: Workspace, weight: Tensor) -> None:
        """residual += delta, summed over the ranks; normed = rms_norm(residual)."""
        eps = self.config.rms_norm_eps
        if self.group.fuses_norm(space.delta):
            self.group.all_reduce_add_rms_norm(
                space.residual, space.delta, weight, eps, space.normed
            )
        else:
            self.group.all_reduce(space.delta)
            self.ops.add_rms_norm(space.residual, space.delta, weight, eps, space.normed)


def cache_shape(config: ModelConfig, shard: Shard, limits: ServingLimits) -> CacheShape:
    """The slot cache of a rank."""
    return CacheShape(
        num_layers=config.num_layers,
        num_slots=limits.num_slots,
        num_rows=limits.max_running,
        max_seq_len=limits.max_seq_len,
        num_q_heads=shard.q_heads.size,
        num_kv_heads=shard.kv_heads.size,
        head_dim=config.head_dim,
        dtype=limits.kv_dtype,
    )


def _workspace(config: ModelConfig, shard: Shard, ops: Backend[Any], rows: int) -> Workspace:
    hidden = config.hidden_size
    q_size = shard.q_heads.size * config.head_dim
    kv_size = shard.kv_heads.size * config.head_dim
    return Workspace(
        residual=ops.floats(rows, hidden),
        normed=ops.activations(rows, hidden),
        delta=ops.activations(rows, hidden),
        qkv=ops.activations(rows, q_size + 2 * kv_size),
        attended=ops.activations(rows, q_size),
        gate_up=ops.activations(rows, 2 * shard.intermediate.size),
        activated=ops.activations(rows, shard.intermediate.size),
    )
