"""A rank's parameters, read from the checkpoint slice by slice, packed for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from worker.backend import Backend, Weight
from worker.checkpoint import HEAD_NAME, Checkpoint
from worker.errors import CheckpointError
from worker.memory_plan import weight_bytes
from worker.sharding import Part, Shard

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Called with (bytes loaded so far, bytes in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's share. Matrices [N, K] with their bias; norms float32 [H] or [D]."""

    input_norm: Tensor
    qkv: Weight
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    post_norm: Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A rank's share of the model. `head` is `embed` itself when the checkpoint ties them."""

    embed: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Weight


def load_weights(
    checkpoint: Checkpoint, shard: Shard, dtype: str, ops: Backend[Weight], progress: Progress
) -> ModelWeights:
    """Loads the share of `shard` in `dtype` ("float32", "bfloat16"); one matrix at a time."""
    with ExitStack() as stack:
        return _Loader(checkpoint, shard, dtype, ops, progress, stack).load()


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        shard: Shard,
        dtype: str,
        ops: Backend[Weight],
        progress: Progress,
        stack: ExitStack,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._shard = shard
        self._dtype = TORCH_DTYPES[dtype]
        self._ops = ops
        self._progress = progress
        self._stack = stack
        self._files: dict[Path, Any] = {}
        self._done_bytes = 0
        self._total_bytes = weight_bytes(self._config, shard, dtype)

    def load(self) -> ModelWeights:
        vocab = self._shard.vocab
        embed = self._pack([("model.embed_tokens", vocab)])
        layers = tuple(self._layer(index) for index in range(self._config.num_layers))
        final_norm = self._vector("model.norm.weight")
        tied = self._config.tie_word_embeddings
        head = embed if tied else self._pack([(HEAD_NAME.removesuffix(".weight"), vocab)])
        return ModelWeights(embed, layers, final_norm, head)

    def _layer(self, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        config, shard = self._config, self._shard
        q_rows = shard.q_heads.scaled(config.head_dim)
        kv_rows = shard.kv_heads.scaled(config.head_dim)
        attn, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return LayerWeights(
            input_norm=self._vector(f"{prefix}input_layernorm.weight"),
            qkv=self._pack(
                [(f"{attn}q_proj", q_rows), (f"{attn}k_proj", kv_rows), (f"{attn}v_proj", kv_rows)],
                config.qkv_bias,
            ),
            q_norm=self._vector(f"{attn}q_norm.weight") if config.qk_norm else None,
            k_norm=self._vector(f"{attn}k_norm.weight") if config.qk_norm else None,
            o=self._pack_columns(f"{attn}o_proj", q_rows, config.o_bias),
            post_norm=self._vector(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._pack_gate_up(f"{mlp}gate_proj", f"{mlp}up_proj"),
            down=self._pack_columns(f"{mlp}down_proj", shard.intermediate, config.mlp_bias),
        )

    def _pack(self, pieces: Sequence[tuple[str, Part]], bias: bool = False) -> Weight:
        """Rows of several matrices one below the other, as one product."""
        weight = torch.cat([self._rows(name, part) for name, part in pieces])
        return self._ops.pack(weight, self._biases(pieces) if bias else None)

    def _pack_gate_up(self, gate: str, up: str) -> Weight:
        part = self._shard.intermediate
        bias = self._biases([(gate, part), (up, part)]) if self._config.mlp_bias else None
        return self._ops.pack_gate_up(self._rows(gate, part), self._rows(up, part), bias)

    def _pack_columns(self, name: str, columns: Part, bias: bool) -> Weight:
        """Columns of a matrix: the ranks' products are summed, so one rank alone adds the bias."""
        weight = self._slice(f"{name}.weight")[:, columns.begin : columns.end].to(self._dtype)
        self._count(weight)
        own_bias = bias and self._shard.adds_bias
        return self._ops.pack(
            weight.contiguous(), self._vector(f"{name}.bias") if own_bias else None
        )

    def _rows(self, name: str, part: Part) -> Tensor:
        rows: Tensor = self._slice(f"{name}.weight")[part.begin : part.end]
        rows = rows.to(self._ops.device, self._dtype)
        self._count(rows)
        return rows

    def _biases(self, pieces: Sequence[tuple[str, Part]]) -> Tensor:
        return torch.cat([self._vector(f"{name}.bias", part) for name, part in pieces])

    def _vector(self, name: str, part: Part | None = None) -> Tensor:
        whole = self._slice(name)
        vector: Tensor = whole[:] if part is None else whole[part.begin : part.end]
        # A copy, so that no vector keeps a whole file mapped.
        vector = vector.to(self._ops.device, torch.float32, copy=True)
        self._count(vector)
        return vector

    def _slice(self, name: str) -> Any:
        path = self._checkpoint.tensors[name].path
        try:
            if path not in self._files:
                self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            return self._files[path].get_slice(name)
        except Exception as error:
            # safetensors raises its own type without a common base, and OSError.
            raise CheckpointError(f"{path.name}: {name} cannot be read: {error}") from error

    def _count(self, tensor: Tensor) -> None:
        self._done_bytes += tensor.numel() * tensor.element_size()
        self._progress(min(self._done_bytes, self._total_bytes), self._total_bytes)
