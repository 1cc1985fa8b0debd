"""What the decoder needs of a device; CpuBackend and CudaBackend give it.

T rows of a forward, H hidden size, I feed-forward size, K / N inputs and outputs of a product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from worker.batch import ForwardBatch

if TYPE_CHECKING:
    from worker.attention import SlotCache
    from worker.memory_plan import ServingLimits
    from worker.tensor_parallel import Group
    from worker.weights import LayerWeights


class AttentionRunner(Protocol):
    """Attention over a slot cache."""

    @property
    def scale(self) -> float:
        """Factor of the scores."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of slot `source` become those of `target`, another one."""

    def append(self, index: int, layer: LayerWeights, batch: ForwardBatch, qkv: Tensor) -> None:
        """Norms and rotates qkv [T, (H_q + 2 H_kv) D]; K and V go to layer `index` of the cache."""

    def attend(
        self, index: int, layer: LayerWeights, batch: ForwardBatch, qkv: Tensor, out: Tensor
    ) -> None:
        """out [T, H_q D]: the rows of qkv over layer `index` of the cache, after append."""


class Weight(Protocol):
    """A matrix [N, K] with its bias, as the device wants it."""

    @property
    def num_rows(self) -> int:
        """N."""

    @property
    def num_cols(self) -> int:
        """K."""


W = TypeVar("W", bound=Weight)


class Backend(Protocol[W]):
    """The operators and the memory of a device, W its weights. Outputs are written in place."""

    device: torch.device

    def activations(self, rows: int, columns: int) -> Tensor:
        """Space for [rows, columns] activations of the device's type, zero at first."""

    def floats(self, rows: int, columns: int) -> Tensor:
        """The same in float32."""

    def agree(self, group: Group) -> None:
        """After the weights are packed: forwards have as many rows on every rank."""

    def num_rows(self, count: int) -> int:
        """Rows to run for `count` rows of work: as many, or more where that is faster."""

    def forward_rows(self, limits: ServingLimits) -> int:
        """The most rows of a forward."""

    def sampled_rows(self, limits: ServingLimits) -> int:
        """The most rows that are sampled from."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> W:
        """Weight [N, K] and bias [N]."""

    def pack_gate_up(self, gate: Tensor, up: Tensor, bias: Tensor | None) -> W:
        """The two matrices [I, H] of a gated feed-forward; bias [2 I], gate's first."""

    def embed_batch(self, batch: ForwardBatch, weight: W, first_id: int, out: Tensor) -> None:
        """out [T, H] float32: the batch's embeddings; zeros for ids this rank does not hold."""

    def linear(self, x: Tensor, weight: W, out: Tensor) -> None:
        """out [T, N] = x [T, K] @ weight.T + bias."""

    def gated_linear(self, x: Tensor, weight: W, gate_up: Tensor, out: Tensor) -> None:
        """out [T, I] = silu(gate) * up of a weight of pack_gate_up; gate_up [T, 2 I] is scratch."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out [T, H] = x (float32) / sqrt(mean(x^2) + eps) * weight [H]."""

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """residual [T, H] (float32) += delta; out = rms_norm(residual)."""

    def attention(
        self, cache: SlotCache, cos: Tensor, sin: Tensor, eps: float, scale: float
    ) -> AttentionRunner:
        """Attention over `cache`; cos, sin [P, D / 2]."""
