"""The CPU as the decoder sees it: the native operators, and memory for its tensors.

`CudaBackend` in cuda_backend.py has the same methods; the decoder does not know which it has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker._native import CpuOps, PackedWeight
from worker.attention import Attention, SlotCache
from worker.batch import ForwardBatch
from worker.memory_plan import ServingLimits
from worker.tensor_parallel import Group


class CpuBackend(CpuOps):
    """The operators of CpuOps; activations are float32 and weights are packed."""

    device = torch.device("cpu")

    def activations(self, rows: int, columns: int) -> Tensor:
        """Space for [rows, columns] activations of the device's type, zero at first."""
        return self.floats(rows, columns)

    def floats(self, rows: int, columns: int) -> Tensor:
        """The same in float32. Written once here, so that the memory does not grow later."""
        return torch.empty(rows, columns).zero_()

    def agree(self, group: Group) -> None:
        """They have as many rows as the batch."""

    def num_rows(self, count: int) -> int:
        """Rows to run for `count` rows of work."""
        return count

    def forward_rows(self, limits: ServingLimits) -> int:
        """The most rows of a forward."""
        return limits.max_step_tokens

    def sampled_rows(self, limits: ServingLimits) -> int:
        """The most rows that are sampled from."""
        return limits.max_running

    def pack_gate_up(self, gate: Tensor, up: Tensor, bias: Tensor | None) -> PackedWeight:
        """The two matrices [I, H] of a gated feed-forward as one weight."""
        return self.pack(torch.cat([gate, up]), bias)

    def embed_batch(
        self, batch: ForwardBatch, weight: PackedWeight, first_id: int, out: Tensor
    ) -> None:
        """The embeddings of the batch's tokens."""
        self.embed(batch.token_ids, weight, first_id, out)

    def gated_linear(self, x: Tensor, weight: PackedWeight, gate_up: Tensor, out: Tensor) -> None:
        """out [T, I] = silu(gate) * up of the product with a weight of pack_gate_up."""
        self.linear(x, weight, gate_up)
        self.silu_mul(gate_up, out)

    def attention(
        self, cache: SlotCache, cos: Tensor, sin: Tensor, eps: float, scale: float
    ) -> Attention:
        """Attention over `cache`."""
        return Attention(self, cache, cos, sin, eps, scale)
