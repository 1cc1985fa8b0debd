"""An NVIDIA GPU as the decoder sees it; the twin of cpu_backend.py.

Products of up to 64 rows go to a kernel that streams the weights at the speed of the memory, those
of many rows to one by tiles where these fill the GPU, the rest to cuBLASLt with split-K off. All
add up along K in order, so a row has the same bits from any (docs/adr/0010). float32 exists to be
compared with: its products run in blocks of a fixed number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker import _native
from worker.attention import CacheShape, SlotCache
from worker.batch import ForwardBatch
from worker.memory_plan import ServingLimits
from worker.tensor_parallel import Group
from worker.weights import TORCH_DTYPES, LayerWeights

# Rows that the weight-streaming kernel takes at once.
STREAM_ROWS = 64
# The library is asked for multiples of this many rows: fewer cost as much.
BLOCK_ROWS = 128


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A matrix [N, K] on the GPU, and a float32 bias [N] or None.

    `streams`: products of few rows go to the kernel that streams the weights.
    """

    matrix: Tensor
    bias: Tensor | None
    streams: bool

    @property
    def num_rows(self) -> int:
        """N."""
        return self.matrix.shape[0]

    @property
    def num_cols(self) -> int:
        """K."""
        return self.matrix.shape[1]


class CudaBackend(_native.CudaOps):
    """The operators of CudaOps; activations are of the weights' type.

    torch's operators run on the same stream when it is the calling thread's.
    """

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream,
        weight_dtype: str,
        portable: bool = False,
    ) -> None:
        super().__init__(device.index, stream.cuda_stream, portable)
        self.stream = stream
        self.device = device
        self.dtype = TORCH_DTYPES[weight_dtype]
        self._all_stream = self.dtype != torch.float32
        fix_arithmetic()

    def activations(self, rows: int, columns: int) -> Tensor:
        """Space for [rows, columns] activations of the device's type, zero at first."""
        return torch.zeros(rows, columns, dtype=self.dtype, device=self.device)

    def floats(self, rows: int, columns: int) -> Tensor:
        """The same in float32."""
        return torch.zeros(rows, columns, device=self.device)

    def agree(self, group: Group) -> None:
        """Sums need as many rows on every rank, and parts of an odd vocabulary differ in size."""
        self._all_stream = group.total(float(self._all_stream)) == group.world_size

    def num_rows(self, count: int) -> int:
        """Rows to run for `count` rows of work."""
        if self._all_stream and count <= STREAM_ROWS:
            return count
        return -(-count // BLOCK_ROWS) * BLOCK_ROWS

    def forward_rows(self, limits: ServingLimits) -> int:
        """The most rows of a forward: all decode rows are there where any decodes."""
        return self.num_rows(limits.max_step_tokens + limits.max_running)

    def sampled_rows(self, limits: ServingLimits) -> int:
        """The most rows that are sampled from: all decode rows, and the prompts that end."""
        return self.num_rows(2 * limits.max_running)

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> DeviceWeight:
        """Weight [N, K] and bias [N] on the device."""
        matrix = weight.to(self.device, self.dtype).contiguous()
        streams = self.linear_supported(STREAM_ROWS, matrix)
        # One matrix that cannot, and whole forwards run at the library's number of rows.
        self._all_stream = self._all_stream and streams
        return DeviceWeight(matrix, None if bias is None else bias.to(self.device), streams)

    def pack_gate_up(self, gate: Tensor, up: Tensor, bias: Tensor | None) -> DeviceWeight:
        """The two matrices [I, H] of a gated feed-forward as one weight, their rows alternating."""
        weight = torch.stack([gate.to(self.device), up.to(self.device)], dim=1)
        if bias is not None:
            bias = bias.view(2, -1).t().reshape(-1)
        return self.pack(weight.view(-1, gate.shape[1]), bias)

    def embed_batch(
        self, batch: ForwardBatch, weight: DeviceWeight, first_id: int, out: Tensor
    ) -> None:
        """The embeddings of the batch's tokens, or of the slot table's rows."""
        decode = batch.num_decode_rows
        if isinstance(batch.table, _native.SlotTable):
            self.embed_slots(batch.table, weight.matrix, first_id, out[:decode])
        if batch.num_rows > decode:
            self.embed(batch.token_ids[decode:], weight.matrix, first_id, out[decode:])

    def linear(  # type: ignore[override]
        self, x: Tensor, weight: DeviceWeight, out: Tensor
    ) -> None:
        """out [T, N] = x [T, K] @ weight.T + bias; T as num_rows gives it. out may be float32."""
        rows = x.shape[0]
        streams = weight.streams and rows <= STREAM_ROWS
        if streams or (out.dtype == self.dtype and self.linear_fills(rows, weight.matrix)):
            super().linear(x, weight.matrix, out)
        elif self.dtype == torch.float32:
            for begin in range(0, rows, BLOCK_ROWS):
                block = slice(begin, begin + BLOCK_ROWS)
                torch.mm(x[block], weight.matrix.t(), out=out[block])
        elif out.dtype == torch.float32:
            torch.mm(x, weight.matrix.t(), torch.float32, out=out)
        else:
            torch.mm(x, weight.matrix.t(), out=out)
        if weight.bias is not None:
            self.add_bias(out, weight.bias)

    def gated_linear(self, x: Tensor, weight: DeviceWeight, gate_up: Tensor, out: Tensor) -> None:
        """out [T, I] = silu(gate) * up of the product with a weight of pack_gate_up."""
        rows = x.shape[0]
        streams = weight.streams and rows <= STREAM_ROWS
        if weight.bias is None and (streams or self.linear_fills(rows, weight.matrix)):
            super().linear(x, weight.matrix, out, gated=True)
        else:
            self.linear(x, weight, gate_up)
            self.silu_mul(gate_up, out)

    def attention(
        self, cache: SlotCache, cos: Tensor, sin: Tensor, eps: float, scale: float
    ) -> CudaAttention:
        """Attention over `cache`."""
        return CudaAttention(self, cache, cos.to(self.device), sin.to(self.device), eps, scale)


class CudaAttention:
    """The twin of Attention: all decode rows at once, a chunk at a time for prompts."""

    def __init__(
        self,
        ops: CudaBackend,
        cache: SlotCache,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        scale: float,
    ) -> None:
        self.ops = ops
        self.cache = cache
        self.scale = scale
        self._cos = cos
        self._sin = sin
        self._eps = eps
        shape = cache.shape
        self._states = torch.zeros(state_floats(shape), device=ops.device)
        self._counters = torch.zeros(
            shape.num_rows * shape.num_kv_heads, dtype=torch.int32, device=ops.device
        )

    def append(self, index: int, layer: LayerWeights, batch: ForwardBatch, qkv: Tensor) -> None:
        """Chunks: q is normed and rotated in place, K and V go to the cache. Decode: see attend."""
        for chunk in batch.chunks:
            self.ops.rope_append(
                qkv[chunk.first_row : chunk.end_row],
                layer.q_norm,
                layer.k_norm,
                self._eps,
                self._cos,
                self._sin,
                self.cache.keys[index],
                self.cache.values[index],
                chunk.slot,
                chunk.start,
                chunk.place,
            )

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of slot `source` become those of `target`."""
        self.ops.copy_prefix(self.cache.memory, source, target, length)

    def attend(
        self, index: int, layer: LayerWeights, batch: ForwardBatch, qkv: Tensor, out: Tensor
    ) -> None:
        """out [T, H_q D]; for decode rows one kernel does append's work too."""
        keys, values = self.cache.keys[index], self.cache.values[index]
        decode = batch.num_decode_rows
        if decode:
            self.ops.decode_attention(
                qkv[:decode],
                layer.q_norm,
                layer.k_norm,
                self._eps,
                self._cos,
                self._sin,
                keys,
                values,
                batch.positions,
                batch.slots,
                self.scale,
                self._states,
                self._counters,
                out[:decode],
            )
        for chunk in batch.chunks:
            rows = slice(chunk.first_row, chunk.end_row)
            self.ops.prefill_attention(
                qkv[rows],
                keys,
                values,
                chunk.slot,
                chunk.start,
                self.scale,
                out[rows],
                chunk.place,
            )


def state_floats(shape: CacheShape) -> int:
    """Floats of decode attention's partial results."""
    return (
        _native.CudaOps.decode_attention_workspace(
            shape.num_rows, shape.max_seq_len, shape.num_q_heads, shape.head_dim
        )
        // 4
    )


def fix_arithmetic() -> None:
    """Torch's products add up along K in order: no split-K, no reduced precision, no TF32."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = (False, False)
    products.allow_fp16_reduced_precision_reduction = (False, False)
    products.allow_tf32 = False
