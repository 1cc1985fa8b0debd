"""The native library: attention over the slot cache, and every operator the promise needs.

Dimension letters: S slots, P positions of a slot, T rows (tokens) of a forward, B rows to sample,
H hidden size, H_q / H_kv query and KV heads, D head dimension, I feed-forward size, K / N inputs and
outputs of a matrix product, V vocabulary.

All arrays are on the CPU, C-contiguous in the last dimension, and are written in place; nothing is
copied silently. float32 unless said. Every argument is checked before use: ValueError or TypeError
naming the operator. The GIL is released while an operator runs.

A row's result is a function of that row alone: it has the same bits at any number of rows, in any
order, with any number of threads.
"""

from torch import Tensor

def cuda_available() -> bool: ...
def cuda_device_count() -> int: ...

class PackedWeight:
    """A matrix [N, K] and an optional bias [N], laid out for `linear`. Owns its memory."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_cols(self) -> int: ...
    @property
    def dtype(self) -> str: ...
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

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        """Copies weight [N, K] (float32 or bfloat16) and bias [N] (float32)."""

    def linear(self, x: Tensor, weight: PackedWeight, out: Tensor) -> None:
        """out [T, N] = x [T, K] @ weight.T + bias, accumulated in float32 along K in order."""

    def embed(self, token_ids: Tensor, weight: PackedWeight, first_id: int, out: Tensor) -> None:
        """out [T, K] = rows token_ids (int32 [T]) - first_id of weight; zeros where outside [0, N)."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out [T, H] = x / sqrt(mean(x^2) + eps) * weight [H]."""

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """residual [T, H] += delta [T, H]; out = rms_norm(residual)."""

    def rope_append(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> None:
        """Normalises and rotates the heads of qkv [T, (H_q + 2 H_kv) D] and appends K and V.

        q_norm, k_norm [D] (RMSNorm over each head) are both given or both None. cos, sin [P, D/2] by
        absolute position, halves rotated as in Hugging Face's Llama. slots, positions int32 [T]. Q
        is written back into qkv; K and V go to k_cache, v_cache [S, P, H_kv, D] (float32 or bfloat16)
        at (slots[t], positions[t]).
        """

    def decode_attention(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        positions: Tensor,
        scale: float,
        out: Tensor,
    ) -> None:
        """One query row per slot: row t attends positions [0, positions[t]] of slots[t].

        Q is the first H_q D columns of qkv [T, (H_q + 2 H_kv) D]; out [T, H_q D]. Same bits as
        prefill_attention gives that row.
        """

    def prefill_attention(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot: int,
        start: int,
        scale: float,
        out: Tensor,
    ) -> None:
        """A chunk of one slot: row t is position start + t and attends [0, start + t]."""

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out [T, I] = silu(gate_up[:, :I]) * gate_up[:, I:]."""

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        out: Tensor,
    ) -> None:
        """One token id per row of logits [B, V] into out (int32 [B]).

        temperature, top_p, min_p float32 [B]; top_k, positions int32 [B]; seeds int64 [B] (the 64
        bits of an unsigned seed). temperature 0: the largest logit, ties to the lowest id. Else
        logits / temperature; keep top_k (0: all), of these the smallest set whose probability reaches
        top_p (1: all; 0: the best), of these what has at least min_p times the best probability;
        then the largest of logit / temperature + Gumbel noise keyed by (seed, position, token id).
        A row with a NaN or +inf, or without a finite value, gives -1.
        """
