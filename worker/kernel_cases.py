"""What `bench-kernels` measures: every CUDA operator at the shapes of a model, beside torch.

T rows of a forward, N / K outputs and inputs of a product, S slots, P positions, H_q / H_kv heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker import _native
from worker.batch import MAX_LOGPROBS
from worker.gpu_timer import Launch
from worker.model_config import ModelConfig
from worker.runner import LOGPROBS_WORDS

# Weights, keys and values come from memory in a step: more of them than any L2 cache holds.
_ROTATED_BYTES = 256 << 20
_MAX_SETS = 128
_DECODE_ROWS = (1, 8)
# Of a product that streams the weight: more running slots, or the new tokens of a short turn.
_STREAMED_ROWS = (*_DECODE_ROWS, 32, 64)
# New rows after a prefix that the slot holds already.
_FEW_ROWS = (16, 64, 256)
# As the decoder pads, where a library multiplies few rows.
_PADDED_ROWS = 128
_RING_ROWS = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. `num_bytes`: what must be moved at least; `flops` of the tensor cores.

    `own` is None where torch's operators are the ones in use. `peers`: torch's, by name.
    """

    shape: str
    num_bytes: int
    flops: int
    own: Sequence[Launch] | None
    peers: Mapping[str, Sequence[Launch]] = field(default_factory=dict)
    # What the launches use by address only.
    kept: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class _Sampler:
    """A step's end: a slot table whose slots all decode, logits [S, V], and the draw from them."""

    table: _native.SlotTable
    logits: Tensor
    sample: Launch
    # What the table uses by address only.
    kept: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Bench:
    """The cases of one model on one device, made one after the other."""

    config: ModelConfig
    ops: _native.CudaOps
    device: torch.device
    dtype: torch.dtype
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]

    def cases(self) -> Iterator[tuple[str, Callable[[], Case]]]:
        """Names of kernels, and what makes the case with its buffers, which may be large."""
        products = self._products()
        for rows in (*_DECODE_ROWS, *self.chunks):
            yield "embed", partial(self._embed, rows)
            yield "add_rms_norm", partial(self._norm, rows)
        for rows, name in product(_STREAMED_ROWS, products):
            yield f"linear {name}", partial(self._linear, name, rows, *products[name])
        for rows, name in product(self.chunks, ("qkv", "o", "gate_up", "down")):
            yield f"product {name}", partial(self._product, name, rows, *products[name])
        for rows in self.chunks:
            yield "silu_mul", partial(self._silu, rows)
            yield "rope_append", partial(self._rope, rows)
        for context, slots in product(self.contexts, _DECODE_ROWS):
            yield "decode_attention", partial(self._decode_attention, slots, context)
        for context, rows in product(self.contexts, sorted({*_FEW_ROWS, *self.chunks})):
            if rows <= context:
                yield "prefill_attention", partial(self._prefill_attention, rows, context)
        for rows, greedy in product(_DECODE_ROWS, (True, False)):
            yield "sample", partial(self._sample, rows, greedy)
        for rows in _DECODE_ROWS:
            yield "adjust_logits", partial(self._adjust_logits, rows)
            yield "logprobs", partial(self._logprobs, rows)

    @property
    def _item(self) -> int:
        return self.dtype.itemsize

    def _products(self) -> dict[str, tuple[int, int]]:
        """[N, K] of a layer's products and of the head."""
        config = self.config
        q_size = config.num_heads * config.head_dim
        qkv = q_size + 2 * config.num_kv_heads * config.head_dim
        return {
            "qkv": (qkv, config.hidden_size),
            "o": (config.hidden_size, q_size),
            "gate_up": (2 * config.intermediate_size, config.hidden_size),
            "down": (config.hidden_size, config.intermediate_size),
            "head": (config.vocab_size, config.hidden_size),
        }

    def _norm(self, rows: int) -> Case:
        hidden = self.config.hidden_size
        residual = self._random(rows, hidden, dtype=torch.float32)
        delta, out = self._random(rows, hidden), self._empty(rows, hidden)
        weight = self._random(hidden, dtype=torch.float32)
        args = (residual, delta, weight, self.config.rms_norm_eps, out)
        # The residual is read and written, delta read, the result written.
        moved = rows * hidden * (8 + 2 * self._item) + hidden * 4
        own = [partial(self.ops.add_rms_norm, *args)]
        norm = partial(torch.nn.functional.rms_norm, residual, (hidden,), weight)
        return Case(f"{rows} x {hidden}", moved, 0, own, {"rms_norm": [norm]})

    def _silu(self, rows: int) -> Case:
        inner = self.config.intermediate_size
        gate_up, out = self._random(rows, 2 * inner), self._empty(rows, inner)
        moved = rows * inner * 3 * self._item
        own = [partial(self.ops.silu_mul, gate_up, out)]

        def torch_silu() -> Tensor:
            return torch.nn.functional.silu(gate_up[:, :inner]) * gate_up[:, inner:]

        return Case(f"{rows} x {inner}", moved, 0, own, {"silu * up": [torch_silu]})

    def _linear(self, name: str, rows: int, n: int, k: int) -> Case:
        """The product of few rows, which streams the weight."""
        gated, wide = name == "gate_up", name == "head"
        weights = _sets(n * k * self._item, lambda: self._random(n, k))
        x, padded = self._random(rows, k), self._random(_PADDED_ROWS, k)
        out = self._empty(rows, n // 2 if gated else n, dtype=torch.float32 if wide else None)
        own = None
        if self.ops.linear_supported(rows, weights[0]):
            own = [partial(self.ops.linear, x, weight, out, gated) for weight in weights]
        peers = {
            "mm": [partial(_mm_of_any_bits, x, weight.T) for weight in weights],
            f"mm, {_PADDED_ROWS} rows": [partial(torch.mm, padded, weight.T) for weight in weights],
        }
        moved = (n * k + rows * k) * self._item + out.nbytes
        return Case(f"{rows} x [{n}, {k}]", moved, 2 * rows * n * k, own, peers)

    def _product(self, name: str, rows: int, n: int, k: int) -> Case:
        """The product of a chunk, with SiLU behind it where the layer has that."""
        gated = name == "gate_up"
        weights = _sets(n * k * self._item, lambda: self._random(n, k))
        x, product = self._random(rows, k), self._empty(rows, n)
        out = self._empty(rows, n // 2) if gated else product
        own = None
        if self.ops.linear_fills(rows, weights[0]):
            own = [partial(self.ops.linear, x, weight, out, gated) for weight in weights]

        def library(weight: Tensor) -> None:
            torch.mm(x, weight.T, out=product)
            if gated:
                self.ops.silu_mul(product, out)

        peers = {"mm, silu_mul" if gated else "mm": [partial(library, w) for w in weights]}
        moved = (n * k + rows * k) * self._item + out.nbytes
        return Case(f"{rows} x [{n}, {k}]", moved, 2 * rows * n * k, own, peers)

    def _rope(self, rows: int) -> Case:
        config = self.config
        (k_cache, v_cache), (cos, sin) = self._cache(1, rows), self._angles(rows)
        qkv = self._random(rows, self._products()["qkv"][0])
        args = (qkv, *self._norms(), config.rms_norm_eps, cos, sin, k_cache, v_cache, 0, 0)
        moved = 2 * qkv.nbytes + cos.nbytes + sin.nbytes
        shape = f"{rows} x {qkv.shape[1]}"
        return Case(shape, moved, 0, [partial(self.ops.rope_append, *args)])

    def _decode_attention(self, slots: int, context: int) -> Case:
        """All rows, each of its own slot, decode at position `context` - 1."""
        config = self.config
        shape = (config.num_heads, config.head_dim)
        num_bytes = slots * context * 2 * config.num_kv_heads * config.head_dim * self._item
        caches = _sets(num_bytes, lambda: self._cache(slots, context))
        cos, sin = self._angles(context)
        qkv = self._random(slots, self._products()["qkv"][0])
        positions = self._ints([context - 1] * slots)
        counters = self._ints([0] * (slots * config.num_kv_heads))
        room = self.ops.decode_attention_workspace(slots, context, *shape)
        states = self._empty(-(-room // 4), dtype=torch.float32)
        out = self._empty(slots, config.num_heads * config.head_dim)
        head = (qkv, *self._norms(), config.rms_norm_eps, cos, sin)
        order = self._ints(range(slots))
        tail = (positions, order, config.head_dim**-0.5, states, counters, out)
        own = [partial(self.ops.decode_attention, *head, k, v, *tail) for k, v in caches]
        q = self._random(slots, config.num_heads, 1, config.head_dim)
        peers = {"SDPA": [self._sdpa(q, k, v) for k, v in caches]}
        flops = 4 * slots * config.num_heads * context * config.head_dim
        return Case(f"{slots} x {context}", num_bytes, flops, own, peers)

    def _prefill_attention(self, rows: int, context: int) -> Case:
        """The last `rows` of `context` positions."""
        config = self.config
        start = context - rows
        read = context * 2 * config.num_kv_heads * config.head_dim * self._item
        caches = _sets(read, lambda: self._cache(1, context))
        qkv = self._random(rows, self._products()["qkv"][0])
        out = self._empty(rows, config.num_heads * config.head_dim)
        tail = (0, start, config.head_dim**-0.5, out)
        q = self._random(1, config.num_heads, rows, config.head_dim)
        seen = rows * start + rows * (rows + 1) // 2
        return Case(
            f"{rows} at {start}",
            read + out.nbytes * 2,
            4 * config.num_heads * config.head_dim * seen,
            [partial(self.ops.prefill_attention, qkv, k, v, *tail) for k, v in caches],
            {"SDPA": [self._sdpa(q, k, v, causal=True) for k, v in caches]},
        )

    def _sample(self, rows: int, greedy: bool) -> Case:
        sampler = self._sampler(rows, greedy)
        vocab, logits = self.config.vocab_size, sampler.logits
        own = [sampler.sample]
        if greedy:
            how, peer, draw = "greedy", "argmax", partial(torch.argmax, logits, -1)
        else:
            how, peer, draw = "top_k 20, top_p 0.95", "topk, multinomial", partial(_draw, logits)
        shape = f"{rows} x {vocab}, {how}"
        return Case(shape, logits.nbytes, 0, own, {peer: [draw]}, sampler.kept)

    def _adjust_logits(self, rows: int) -> Case:
        """All that can be asked for in every row."""
        sampler, vocab = self._sampler(rows, greedy=True), self.config.vocab_size
        words = -(-vocab // 32)
        arrays = {
            "flags": self._ints([31] * rows),
            "min_len": self._ints([(1 << 31) - 1] * rows),
            "counts": self._ints([1]).expand(rows, vocab).contiguous(),
            "bias": self._random(rows, vocab, dtype=torch.float32),
            "mask": self._ints([-1]).expand(rows, words).contiguous(),
        }
        for name in ("frequency", "presence", "repetition"):
            arrays[f"{name}_penalty"] = torch.ones(rows, device=self.device)
        adjust = _native.AdjustTable(**arrays)
        out = torch.empty_like(sampler.logits)
        own = [partial(self.ops.adjust_logits, sampler.table, adjust, sampler.logits, None, out)]
        moved = 4 * sampler.logits.nbytes + 2 * arrays["mask"].nbytes
        kept = (*sampler.kept, *arrays.values(), out)
        return Case(f"{rows} x {vocab}, everything", moved, 0, own, {}, kept)

    def _logprobs(self, rows: int) -> Case:
        """Of the tokens of one step; the best MAX_LOGPROBS of every row."""
        sampler = self._sampler(rows, greedy=False)
        sampler.sample()
        counts = self._ints([MAX_LOGPROBS] * rows)
        out = self._pinned(1, rows, LOGPROBS_WORDS)
        own = [partial(self.ops.logprobs, sampler.table, sampler.logits, None, counts, out)]
        peers = {"log_softmax, topk": [partial(_best_logprobs, sampler.logits)]}
        shape = f"{rows} x {self.config.vocab_size}, best {MAX_LOGPROBS}"
        return Case(shape, sampler.logits.nbytes, 0, own, peers, (*sampler.kept, counts, out))

    def _sampler(self, rows: int, greedy: bool) -> _Sampler:
        vocab = self.config.vocab_size
        logits = self._random(rows, vocab, dtype=torch.float32) * 4
        arrays = self._slot_arrays(rows, greedy)
        ring = self._pinned(_RING_ROWS, rows)
        stamps = self._pinned(_RING_ROWS, 2, dtype=torch.int64)
        table = _native.SlotTable(
            vocab=vocab,
            ring=ring.data_ptr(),
            stamps=stamps.data_ptr(),
            ring_rows=_RING_ROWS,
            **arrays,
        )
        self.ops.begin_command(table)
        room = self.ops.sample_workspace(rows, vocab)
        workspace = torch.zeros(room, device=self.device, dtype=torch.uint8)
        sample = partial(self.ops.sample, table, logits, None, workspace)
        return _Sampler(table, logits, sample, (*arrays.values(), ring, stamps))

    def _slot_arrays(self, slots: int, greedy: bool) -> dict[str, Tensor]:
        """A slot table in which every slot is active, without an end."""
        ints = {"last_token": 1, "length": 1, "active": 1, "scheduled": 2, "row_token": 1}
        ints |= {"row_position": 1, "max_len": (1 << 31) - 1, "top_k": 0 if greedy else 20}
        floats = {"temperature": 0.0 if greedy else 0.7, "top_p": 1.0 if greedy else 0.95}
        floats |= {"min_p": 0.0}
        words = -(-self.config.vocab_size // 32)
        return {
            **{name: self._ints([value] * slots) for name, value in ints.items()},
            **{name: torch.full((slots,), x, device=self.device) for name, x in floats.items()},
            "end_ids": torch.zeros(slots, words, device=self.device, dtype=torch.int32),
            "seed": torch.arange(slots, device=self.device),
            "counter": self._ints([0]),
        }

    def _embed(self, rows: int) -> Case:
        vocab, hidden = self._products()["head"]
        weight = self._random(vocab, hidden)
        ids = torch.randint(vocab, (rows,), device=self.device, dtype=torch.int32)
        out = self._empty(rows, hidden, dtype=torch.float32)
        moved = rows * hidden * (self._item + 4)
        own = [partial(self.ops.embed, ids, weight, 0, out)]
        peer = partial(torch.nn.functional.embedding, ids, weight)
        return Case(f"{rows} x {hidden}", moved, 0, own, {"embedding": [peer]})

    def _random(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(sizes, device=self.device, dtype=dtype or self.dtype)

    def _empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(sizes, device=self.device, dtype=dtype or self.dtype)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=torch.int32)

    def _pinned(self, *sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(sizes, dtype=dtype, pin_memory=self.device.type == "cuda")

    def _cache(self, slots: int, positions: int) -> tuple[Tensor, Tensor]:
        """K and V [S, P, H_kv, D], a head's positions side by side."""
        sizes = (slots, self.config.num_kv_heads, positions, self.config.head_dim)
        keys, values = self._random(*sizes), self._random(*sizes)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _angles(self, positions: int) -> tuple[Tensor, Tensor]:
        angles = self._random(positions, self.config.head_dim // 2, dtype=torch.float32)
        return angles.cos(), angles.sin()

    def _norms(self) -> tuple[Tensor | None, Tensor | None]:
        if not self.config.qk_norm:
            return None, None
        ones = torch.ones(self.config.head_dim, device=self.device)
        return ones, ones

    def _sdpa(self, q: Tensor, keys: Tensor, values: Tensor, causal: bool = False) -> Launch:
        """q [S, H_q, T, D]; keys, values [S, P, H_kv, D]."""
        # It loads torch's compiler, a second that no worker should spend at its start.
        from torch.nn.attention.bias import causal_lower_right

        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        mask = causal_lower_right(q.shape[2], k.shape[2]) if causal else None
        grouped = q.shape[1] != k.shape[1]
        return partial(scaled_dot_product_attention, q, k, v, mask, enable_gqa=grouped)


def _sets(num_bytes: int, make: Callable[[], T]) -> list[T]:
    """Buffers of `num_bytes`: enough of them that none is in a cache when its turn comes."""
    return [make() for _ in range(min(max(-(-_ROTATED_BYTES // num_bytes), 1), _MAX_SETS))]


def _mm_of_any_bits(x: Tensor, weight: Tensor) -> Tensor:
    """The library at its best, which may split K: other bits at another number of rows."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True
    result = torch.mm(x, weight)
    keep_bits()
    return result


def keep_bits() -> None:
    """As the decoder sets it: torch's products have the same bits at any number of rows."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)


def _draw(logits: Tensor) -> Tensor:
    best = torch.topk(logits, 20)
    return torch.multinomial(torch.softmax(best.values, -1), 1)


def _best_logprobs(logits: Tensor) -> Tensor:
    return torch.topk(torch.log_softmax(logits, -1), MAX_LOGPROBS).values
