"""The decoder of Qwen3, Qwen2 and Llama: one forward over the rows of many slots.

T rows of a forward, B rows whose logits are wanted, H hidden size, V vocabulary. Activations are
float32. Under tensor parallelism every rank holds the same residual; products with split inputs
are summed over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker._native import CpuOps
from worker.attention import Attention, CacheShape, SlotCache
from worker.batch import ForwardBatch
from worker.memory_plan import ServingLimits
from worker.model_config import ModelConfig
from worker.rope import rope_tables
from worker.sharding import Shard, vocab_parts
from worker.tensor_parallel import TensorParallelGroup
from worker.weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class Workspace:
    """Activations, allocated once: float32, one row per token of a forward."""

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


class Decoder:
    """A rank's decoder with its slot cache and workspace; one forward at a time."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        limits: ServingLimits,
        weights: ModelWeights,
        ops: CpuOps,
        group: TensorParallelGroup,
    ) -> None:
        self.config = config
        self.shard = shard
        self.limits = limits
        self.weights = weights
        self.ops = ops
        self.cache = SlotCache(_cache_shape(config, shard, limits))
        self._group = group
        self._workspace = _workspace(config, shard, limits)
        self._sample_space = _sample_space(config, shard, limits)
        cos, sin = rope_tables(config.rope, config.head_dim, limits.max_seq_len)
        self.attention = Attention(
            ops, self.cache, cos, sin, config.rms_norm_eps, config.head_dim**-0.5
        )
        group.reserve(
            limits.max_step_tokens * config.hidden_size,
            limits.num_slots,
            vocab_parts(config, shard.world_size),
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [B, V] of the sampled rows, the same on every rank; valid until the next call."""
        space = self._workspace.rows(batch.num_rows)
        self.ops.embed(batch.token_ids, self.weights.embed, self.shard.vocab.begin, space.residual)
        self._group.all_reduce(space.residual)
        layers = self.weights.layers
        eps = self.config.rms_norm_eps
        self.ops.rms_norm(space.residual, layers[0].input_norm, eps, space.normed)
        for index, layer in enumerate(layers):
            self._attend(index, layer, batch, space)
            self._feed_forward(layer, space)
            if index + 1 < len(layers):
                next_norm = layers[index + 1].input_norm
                self.ops.add_rms_norm(space.residual, space.delta, next_norm, eps, space.normed)
        return self._logits(batch, space)

    def _attend(
        self, index: int, layer: LayerWeights, batch: ForwardBatch, space: Workspace
    ) -> None:
        """delta = the attention of `normed`."""
        self.ops.linear(space.normed, layer.qkv, space.qkv)
        self.attention.run(index, layer, batch, space.qkv, space.attended)
        self.ops.linear(space.attended, layer.o, space.delta)
        self._group.all_reduce(space.delta)

    def _feed_forward(self, layer: LayerWeights, space: Workspace) -> None:
        """Adds delta to the residual; delta = the feed-forward of its norm."""
        eps = self.config.rms_norm_eps
        self.ops.add_rms_norm(space.residual, space.delta, layer.post_norm, eps, space.normed)
        self.ops.linear(space.normed, layer.gate_up, space.gate_up)
        self.ops.silu_mul(space.gate_up, space.activated)
        self.ops.linear(space.activated, layer.down, space.delta)
        self._group.all_reduce(space.delta)

    def _logits(self, batch: ForwardBatch, space: Workspace) -> Tensor:
        """The final norm and the head, of the sampled rows only."""
        count = batch.num_sample_rows
        sample = self._sample_space
        logits = sample.logits[:count]
        if count == 0:
            return logits
        residual, delta = space.residual, space.delta
        if batch.sample_rows is not None:
            residual, delta = sample.residual[:count], sample.delta[:count]
            torch.index_select(space.residual, 0, batch.sample_rows, out=residual)
            torch.index_select(space.delta, 0, batch.sample_rows, out=delta)
        normed = sample.normed[:count]
        self.ops.add_rms_norm(
            residual, delta, self.weights.final_norm, self.config.rms_norm_eps, normed
        )
        local = sample.local_logits[:count]
        self.ops.linear(normed, self.weights.head, local)
        self._group.gather_columns(local, logits)
        return logits


def _cache_shape(config: ModelConfig, shard: Shard, limits: ServingLimits) -> CacheShape:
    return CacheShape(
        num_layers=config.num_layers,
        num_slots=limits.num_slots,
        max_seq_len=limits.max_seq_len,
        num_kv_heads=shard.kv_heads.size,
        head_dim=config.head_dim,
        dtype=limits.kv_dtype,
    )


def _workspace(config: ModelConfig, shard: Shard, limits: ServingLimits) -> Workspace:
    rows, hidden = limits.max_step_tokens, config.hidden_size
    q_size = shard.q_heads.size * config.head_dim
    kv_size = shard.kv_heads.size * config.head_dim
    return Workspace(
        residual=_space(rows, hidden),
        normed=_space(rows, hidden),
        delta=_space(rows, hidden),
        qkv=_space(rows, q_size + 2 * kv_size),
        attended=_space(rows, q_size),
        gate_up=_space(rows, 2 * shard.intermediate.size),
        activated=_space(rows, shard.intermediate.size),
    )


def _sample_space(config: ModelConfig, shard: Shard, limits: ServingLimits) -> SampleSpace:
    rows, hidden = limits.num_slots, config.hidden_size
    logits = _space(rows, config.vocab_size)
    return SampleSpace(
        residual=_space(rows, hidden),
        delta=_space(rows, hidden),
        normed=_space(rows, hidden),
        # A lone rank's columns are all columns: it writes them where they belong.
        local_logits=logits if shard.world_size == 1 else _space(rows, shard.vocab.size),
        logits=logits,
    )


def _space(rows: int, columns: int) -> Tensor:
    """Written once here, so that the memory is really there and does not grow later."""
    return torch.empty(rows, columns).zero_()
