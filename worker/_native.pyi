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

BUILT_WITH_CUDA: bool
# Hash of the sources and of how they were compiled.
BUILD: str

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

    def logprobs(self, logits: Array, token_ids: Array, counts: Array, out: Array) -> None:
        """What each row of logits [B, V] says of the token drawn from it, and its best tokens.

        token_ids int32 [B]; counts int32 [B], best tokens wanted, 0 to 20. out int32 [B, 42],
        contiguous, the words of TokenLogprobs in params.h: the drawn token's logprob (float32) and
        its rank from 1, ids of 20 best tokens, their logprobs (float32). Best: logit descending,
        ties by id ascending; past the count or V nothing is written. Logprobs are the log-softmax
        of the logits as they are. A row from which nothing can be drawn has none.
        """

class SlotTable:
    """The slots that may decode, a row each: what a step reads and changes without the host.

    Arrays on the GPU, one element per row (R rows, int32 unless said); the caller keeps them.
    `length`: tokens in the cache; `active`: 1 while the slot may decode; `scheduled`: 2 where the
    present command lists it, 1 where for its next step alone, 0 then and else; `row_token`,
    `row_position`: the inputs of the next step, -1 for idle rows, kept by begin_command and sample.
    end_ids int32 [R, ceil(V / 32)], bit id % 32 of word id / 32; temperature, top_p, min_p float32;
    seed int64; counter int32 [1]. `ring`: address of pinned int32 [ring_rows, R]; row counter %
    ring_rows gets a step's token ids, -1 for a corrupted row, -2 for one that took no part.
    `stamps`: address of pinned int64 [ring_rows, 2], the device's clock in ns at the start and at
    the end of the step.
    """

    def __init__(
        self,
        *,
        vocab: int,
        last_token: Tensor,
        length: Tensor,
        active: Tensor,
        scheduled: Tensor,
        row_token: Tensor,
        row_position: Tensor,
        max_len: Tensor,
        end_ids: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        counter: Tensor,
        ring: int,
        stamps: int,
        ring_rows: int,
    ) -> None: ...

class AdjustTable:
    """What is done to the logits that a row of a SlotTable is sampled from: worker.proto.

    Arrays on the GPU; the caller keeps them. int32 [R]: `flags`, the sum of 1 (repetition), 2
    (frequency and presence), 4 (bias), 8 (min_len), 16 (mask), nothing else of the row being read;
    min_len. float32 [R]: the penalties. `counts` int32 [R, V]: how often a token was generated, and
    bit 30 for one seen in the prompt; `bias` float32 [R, V], 0 changes nothing; `mask` int32 [R,
    ceil(V / 32)], bit id % 32 of word id / 32 for a token that may be sampled.
    """

    def __init__(
        self,
        *,
        flags: Tensor,
        min_len: Tensor,
        frequency_penalty: Tensor,
        presence_penalty: Tensor,
        repetition_penalty: Tensor,
        counts: Tensor,
        bias: Tensor,
        mask: Tensor,
    ) -> None: ...

class CudaOps:
    """The operators on one GPU; only in a build with CUDA. Each is put on the stream given here.

    Tensors are on that GPU and contiguous unless said. Activations, weights, keys and values are of
    one type, bfloat16, float16 or float32; the residual, norms, rotation tables and logits are
    float32. Kinds and shapes are checked as CpuOps does; values are not read.
    """

    def __init__(self, device: int, stream: int, portable: bool = False) -> None:
        """`stream`: torch.cuda.Stream.cuda_stream.

        `portable`: with the kernels of every device from compute capability 8.0 on, where this one
        has better ones too; attention and the sampler give the same bits.
        """

    def embed(self, token_ids: Tensor, weight: Tensor, first_id: int, out: Tensor) -> None:
        """out [T, H] float32 = rows token_ids (int32 [T]) - first_id of weight; zeros outside."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out [T, H] = x [T, H] (float32) / sqrt(mean(x^2) + eps) * weight [H]."""

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """residual [T, H] (float32) += delta [T, H]; out = rms_norm(residual)."""

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out [T, I] = silu(gate_up[:, 0::2]) * gate_up[:, 1::2]."""

    def add_bias(self, x: Tensor, bias: Tensor) -> None:
        """x [T, N] += bias [N] (float32), rounded once."""

    def linear_supported(self, num_rows: int, weight: Tensor) -> bool:
        """Whether `linear` takes this size on this GPU."""

    def linear_fills(self, num_rows: int, weight: Tensor) -> bool:
        """Whether it does, and so many rows, more than 64, keep nearly all of the GPU busy."""

    def linear(self, x: Tensor, weight: Tensor, out: Tensor, gated: bool = False) -> None:
        """out [T, N] = x [T, K] @ weight.T, added up along K in order.

        out float32: not rounded, at most 64 rows. gated: rows 2 i and 2 i + 1 of weight are gate
        and up, out [T, N / 2] is silu_mul of the rounded product.
        """

    def decode_attention(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        positions: Tensor,
        slots: Tensor,
        scale: float,
        states: Tensor,
        counters: Tensor,
        out: Tensor,
    ) -> None:
        """Row t is slots[t] at positions[t] (int32 [T]; position -1: idle, out is zeros).

        Norm, rotate, append, attend [0, positions[t]]. positions, slots and earlier rows of the
        caches are read before the kernels ahead on the stream have ended: where these write them,
        put `embed` between, or wait. Rows that are not idle are of different slots.

        k_cache, v_cache [S, P, H_kv, D], any strides with D contiguous. states float32, at least
        decode_attention_workspace bytes; counters int32 [T H_kv], zero.
        """

    @staticmethod
    def decode_attention_workspace(
        num_rows: int, num_positions: int, num_q_heads: int, head_dim: int
    ) -> int:
        """Bytes of `states`."""

    def rope_append(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot: int,
        start: int,
        place: Tensor | None = None,
    ) -> None:
        """Row t is position start + t of the slot: q normed and rotated in place, k, v appended.

        `place`, int32 [3]: slot, start and how many of the rows there are, read by the device when
        it comes to it, in the stead of the arguments; so a captured launch serves many chunks.
        Values are not checked: the rows must lie in the slot.
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
        place: Tensor | None = None,
    ) -> None:
        """Row t attends [0, start + t] of the slot; q as rope_append left it; `place` as there."""

    def copy_prefix(self, cache: Tensor, source: int, target: int, length: int) -> None:
        """The first `length` positions of slot `source` become those of `target`, another one.

        cache [N, S, H, P, D] holds N tensors, of all layers; D a multiple of 16 bytes.
        """

    def begin_command(self, table: SlotTable) -> None:
        """row_token and row_position from scheduled, active, last_token and length."""

    def embed_slots(self, table: SlotTable, weight: Tensor, first_id: int, out: Tensor) -> None:
        """embed of row_token into out [R, H]; stamps the start of the step."""

    def adjust_logits(
        self,
        table: SlotTable,
        adjust: AdjustTable,
        logits: Tensor,
        rows: Tensor | None,
        out: Tensor,
    ) -> None:
        """out [B, V] = logits [B, V] as their rows want them, with the bits of worker/sampler.py.

        rows as for `sample`, which comes behind it with `out`. Once for a step: in decode the token
        in row_token is counted as generated. Rows without part are not written.
        """

    def sample(
        self, table: SlotTable, logits: Tensor, rows: Tensor | None, workspace: Tensor
    ) -> None:
        """Draws a token for each row of logits [B, V], as CpuOps.sample does; moves the slots on.

        rows None: all of the table in order, those with row_position -1 take no part, lengths grow
        by one. Else int32 [B], the rows whose prompts end here. workspace uint8, sample_workspace
        bytes, zero before its first use.
        """

    @staticmethod
    def sample_workspace(num_rows: int, vocab: int) -> int: ...
    def logprobs(
        self, table: SlotTable, logits: Tensor, rows: Tensor | None, counts: Tensor, out: Tensor
    ) -> None:
        """Logprobs of the tokens that the last `sample` drew, as CpuOps.logprobs gives them.

        Behind `sample`, before any other step, with the same rows, and with the logits before
        adjust_logits. counts int32 [R], -1 for rows that want none. out: pinned int32 [N, R, 42] on
        the CPU; row step % N, where the token is in row step % ring_rows of the ring. What a row
        gets that drew none means nothing.
        """

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, count: int, out: Tensor) -> None:
        """The same of a given token for each row of logits [B, V]: token_ids int32 [B].

        count: best tokens wanted, 0 to 20. out: pinned int32 [B, 42] on the CPU.
        """

class CudaPeers:
    """A rank's part of the sums between the GPUs of one machine; only in a build with CUDA.

    Every rank writes into the memory of the others. The ranks are processes, make the same calls in
    the same order, and may capture them in graphs. Parts are added in rank order in float32 and the
    sum is rounded once.
    """

    MAX_RANKS: int
    MAX_ROWS: int

    def __init__(
        self,
        device: int,
        stream: int,
        rank: int,
        world_size: int,
        max_rows: int,
        row_size: int,
        timeout_s: float,
    ) -> None:
        """Allocates for fused sums of up to `max_rows` rows of up to `row_size` elements."""

    @property
    def num_bytes(self) -> int:
        """Of the memory that peers write to."""

    def handle(self) -> bytes:
        """What the peers need to open this rank's memory."""

    def open(self, handles: list[bytes]) -> None:
        """Opens the memory of all other ranks. RuntimeError where a GPU cannot reach another's."""

    def close_peers(self) -> None:
        """Lets go of the other ranks' memory; nothing may be running."""

    def release(self, peers_have_closed: bool) -> None:
        """Frees this rank's memory, or keeps it for good where a peer may still write to it."""

    def abort(self) -> None:
        """Kernels wait for no peer any more. From any thread, but not during `release`."""

    def failed(self) -> bool:
        """Whether a peer did not come within the time-out, or `abort` was called; results since
        then are garbage."""

    def all_reduce(self, x: Tensor) -> None:
        """x [T, N] (contiguous, any float type) = the sum of all ranks' x."""

    def fuses_norm(self, num_rows: int, hidden: int) -> bool:
        """Whether all_reduce_add_rms_norm takes this size."""

    def all_reduce_add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """add_rms_norm with the sum of all ranks' delta; delta stays as it is."""

    def gather_columns(self, local: Tensor, begins: list[int], out: Tensor) -> None:
        """out[:, begins[r] : begins[r + 1]] = local of rank r, float32."""
