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
from worker.batch import ForwardBatch
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


@dataclass(frozen=True, slots=True)
class SampleSpace:
    """The same for the rows whose logits are wanted; `local_logits` are this rank's columns."""

    residual: Tensor
    delta: Tensor
    normed: Tensor
    local_logits: Tensor
    logits: Tensor

    def rows(self, num_rows: int) -> SampleSpace:
        """The first `num_rows` rows."""
        return SampleSpace(
            residual=self.residual[:num_rows],
            delta=self.delta[:num_rows],
            normed=self.normed[:num_rows],
            local_logits=self.local_logits[:num_rows],
            logits=self.logits[:num_rows],
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
        self._workspace = _workspace(config, shard, limits, ops)
        self._sample_space = _sample_space(config, shard, limits, ops)
        cos, sin = rope_tables(config.rope, config.head_dim, limits.max_seq_len)
        self.attention = ops.attention(
            self.cache, cos, sin, config.rms_norm_eps, config.head_dim**-0.5
        )
        group.reserve(
            ops.num_rows(limits.max_step_tokens),
            config.hidden_size,
            ops.num_rows(limits.num_slots),
            vocab_parts(config, shard.world_size),
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [B, V] of the sampled rows, the same on every rank; valid until the next call."""
        space = self._workspace.rows(batch.num_rows)
        self.ops.embed_batch(batch, self.weights.embed, self.shard.vocab.begin, space.residual)
        self.group.all_reduce(space.residual)
        layers = self.weights.layers
        self.ops.rms_norm(
            space.residual, layers[0].input_norm, self.config.rms_norm_eps, space.normed
        )
        for index, layer in enumerate(layers):
            self.ops.linear(space.normed, layer.qkv, space.qkv)
            self.attention.run(index, layer, batch, space.qkv, space.attended)
            self.ops.linear(space.attended, layer.o, space.delta)
            self._add_norm(space, layer.post_norm)
            self.ops.gated_linear(space.normed, layer.gate_up, space.gate_up, space.activated)
            self.ops.linear(space.activated, layer.down, space.delta)
            if index + 1 < len(layers):
                self._add_norm(space, layers[index + 1].input_norm)
        return self._logits(batch, space)

    def _add_norm(self, space: Workspace | SampleSpace, weight: Tensor) -> None:
        """residual += delta, summed over the ranks; normed = rms_norm(residual)."""
        eps = self.config.rms_norm_eps
        if self.group.fuses_norm(space.delta):
            self.group.all_reduce_add_rms_norm(
                space.residual, space.delta, weight, eps, space.normed
            )
        else:
            self.group.all_reduce(space.delta)
            self.ops.add_rms_norm(space.residual, space.delta, weight, eps, space.normed)

    def _logits(self, batch: ForwardBatch, space: Workspace) -> Tensor:
        """The final norm and the head, of the sampled rows only."""
        count = batch.num_sample_rows
        if count == 0:
            return self._sample_space.logits[:0]
        sample = self._sample_space.rows(self.ops.num_rows(count))
        if batch.sample_rows is None:
            sample = replace(sample, residual=space.residual, delta=space.delta)
        else:
            torch.index_select(space.residual, 0, batch.sample_rows, out=sample.residual[:count])
            torch.index_select(space.delta, 0, batch.sample_rows, out=sample.delta[:count])
        self._add_norm(sample, self.weights.final_norm)
        self.ops.linear(sample.normed, self.weights.head, sample.local_logits)
        self.group.gather_columns(sample.local_logits, sample.logits)
        return sample.logits[:count]


def cache_shape(config: ModelConfig, shard: Shard, limits: ServingLimits) -> CacheShape:
    """The slot cache of a rank."""
    return CacheShape(
        num_layers=config.num_layers,
        num_slots=limits.num_slots,
        max_seq_len=limits.max_seq_len,
        num_q_heads=shard.q_heads.size,
        num_kv_heads=shard.kv_heads.size,
        head_dim=config.head_dim,
        dtype=limits.kv_dtype,
    )


def _workspace(
    config: ModelConfig, shard: Shard, limits: ServingLimits, ops: Backend[Any]
) -> Workspace:
    rows, hidden = ops.num_rows(max(limits.max_step_tokens, limits.num_slots)), config.hidden_size
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


def _sample_space(
    config: ModelConfig, shard: Shard, limits: ServingLimits, ops: Backend[Any]
) -> SampleSpace:
    rows, hidden = ops.num_rows(limits.num_slots), config.hidden_size
    logits = ops.floats(rows, config.vocab_size)
    return SampleSpace(
        residual=ops.floats(rows, hidden),
        delta=ops.activations(rows, hidden),
        normed=ops.activations(rows, hidden),
        # A lone rank's columns are all columns: it writes them where they belong.
        local_logits=logits if shard.world_size == 1 else ops.floats(rows, shard.vocab.size),
        logits=logits,
    )
