"""The native library: attention over the slot cache, and every operator the promise needs.

Dimension letters: S slots, P positions of a slot, T rows (tokens) of a forward, B rows to sample,
H hidden size, H_q / H_kv query and KV heads, D head dimension (even, at most 256), I feed-forward
size, K / N inputs and outputs of a matrix product, V vocabulary.

Arrays are on the CPU, contiguous in the last dimension (other strides are free), float32 unless
said, and written in place; nothing is copied silently. torch tensors are passed fastest; NumPy
arrays work too. Every argument is checked before use: TypeError (wrong kind of array) or ValueError
(wrong shape, layout or value) naming the operator. The GIL is released while an operator runs; the
operators of one CpuOps run one after the other.

A row's result is a function of that row alone: it has the same bits at any number of rows, in any
order, with any number of threads.
"""

from typing import Any, TypeAlias

from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = Tensor | NDArray[Any]

def cuda_available() -> bool: ...
def cuda_device_count() -> int: ...

class PackedWeight:
    """A matrix [N, K] and an optional bias [N], laid out for `linear`. Owns its memory."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_cols(self) -> int: ...
    @property
    def dtype(self) -> str:
        """ "float32" or "bfloat16"."""

    @property
    def num_bytes(self) -> int: ...

class CpuOps:
    """The operators, on a pool of threads of their own."""

    def __init__(self, num_threads: int, isa: str = "auto") -> None:
        """ValueError for an instruction set that this CPU cannot run; "auto" takes the best."""

    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> str:
        """The instruction set in use: "avx512", "avx2" or "portable"."""

    def pack(self, weight: Array, bias: Array | None = None) -> PackedWeight:
        """Copies weight [N, K] (float32 or bfloat16) and bias [N] (float32)."""

    def linear(self, x: Array, weight: PackedWeight, out: Array) -> None:
        """out [T, N] = x [T, K] @ weight.T + bias, accumulated in float32 along K in order."""

    def embed(self, token_ids: Array, weight: PackedWeight, first_id: int, out: Array) -> None:
        """out [T, K] = rows token_ids (int32 [T]) - first_id of weight; zeros outside [0, N)."""

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """out [T, H] = x / sqrt(mean(x^2) + eps) * weight [H]."""

    def add_rms_norm(
        self, residual: Array, delta: Array, weight: Array, eps: float, out: Array
    ) -> None:
        """residual [T, H] += delta [T, H]; out = rms_norm(residual)."""

    def rope_append(
        self,
        qkv: Array,
        q_norm: Array | None,
        k_norm: Array | None,
        eps: float,
        cos: Array,
        sin: Array,
        slots: Array,
        positions: Array,
        k_cache: Array,
        v_cache: Array,
    ) -> None:
        """Normalises and rotates the heads of qkv [T, (H_q + 2 H_kv) D] and appends K and V.

        q_norm, k_norm [D] (RMSNorm over each head) are both given or both None. cos, sin [P, D/2]
        by absolute position, halves rotated as in Hugging Face's Llama. slots, positions int32 [T].
        Q is written back into qkv; K and V go to k_cache, v_cache [S, P, H_kv, D] (float32 or
        bfloat16) at (slots[t], positions[t]), every row at a place of its own.
        """

    def decode_attention(
        self,
        qkv: Array,
        k_cache: Array,
        v_cache: Array,
        slots: Array,
        positions: Array,
        scale: float,
        out: Array,
    ) -> None:
        """One query row per slot: row t attends positions [0, positions[t]] of slots[t].

        Q is the first H_q D columns of qkv [T, (H_q + 2 H_kv) D]; out [T, H_q D]. Same bits as
        prefill_attention gives that row. Nothing past a row's position is read into its result.
        """

    def prefill_attention(
        self,
        qkv: Array,
        k_cache: Array,
        v_cache: Array,
        slot: int,
        start: int,
        scale: float,
        out: Array,
    ) -> None:
        """A chunk of one slot: row t is position start + t and attends [0, start + t]."""

    def silu_mul(self, gate_up: Array, out: Array) -> None:
        """out [T, I] = silu(gate_up[:, :I]) * gate_up[:, I:]."""

    def sample(
        self,
        logits: Array,
        temperature: Array,
        top_k: Array,
        top_p: Array,
        min_p: Array,
        seeds: Array,
        positions: Array,
        out: Array,
    ) -> None:
        """One token id per row of logits [B, V] into out (int32 [B]).

        temperature, top_p, min_p float32 [B]; top_k, positions int32 [B]; seeds int64 [B] (the 64
        bits of an unsigned seed). temperature 0: the largest logit, ties to the lowest id. Else
        logits / temperature; keep top_k (0: all; ties to the lowest ids), of these the smallest set
        whose share of their probability reaches top_p (1: all; 0: the best), of these what has at
        least min_p times the best probability; then the largest of logit / temperature + Gumbel
        noise keyed by (seed, position, token id). A row with a NaN or +inf, or without a finite
        value, gives -1.
        """
