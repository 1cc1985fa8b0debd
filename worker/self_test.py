"""The promise, proved on the loaded weights before the first request.

Each test compares bits. A failure is reported, not hidden: the rank serves, and says that it cannot
promise equal answers. Every rank of a group makes the same calls, in the same order.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.backend import Weight
from worker.batch import ForwardBatch, PrefillChunk
from worker.decoder import Decoder

_SEED = 20_251
# Around multiples of sizes an attention kernel may split at.
_ATTENTION_POSITIONS = (0, 1, 15, 16, 63, 64, 127, 128, 255, 256, 257, 511, 512)
_CHUNK = 3
# The tests' names.
_LINEAR = "linear_rows_equal"
_ATTENTION = "prefill_attention_equals_decode"
_CHUNKS = "chunks_equal_whole_prefill"
_DECODE = "prefill_kv_equals_decode_kv"


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """A property and whether it holds; `detail` says what was compared, or what differed."""

    name: str
    passed: bool
    detail: str


class PrefixReuse(enum.Enum):
    """Which positions of a slot hold what a prefill of the same tokens would write."""

    NONE = "none"
    PREFILL = "prefill"
    ALL = "all"


def prefix_reuse(tests: Sequence[SelfTestResult]) -> PrefixReuse:
    """What the tests have proved."""
    failed = {test.name for test in tests if not test.passed}
    if failed & {_LINEAR, _CHUNKS}:
        return PrefixReuse.NONE
    return PrefixReuse.PREFILL if failed & {_ATTENTION, _DECODE} else PrefixReuse.ALL


class Batches(Protocol):
    """How forwards are made on a device: BatchBuffers and CudaSlots."""

    def chunk_batch(self, chunks: tuple[PrefillChunk, ...]) -> ForwardBatch:
        """The rows of the chunks, one chunk after another."""

    def row_batch(self, slot: int, position: int, token_id: int) -> tuple[ForwardBatch, int]:
        """A decode step of one slot, and the row it has in it."""


@dataclass(frozen=True, slots=True)
class _Rig:
    decoder: Decoder
    batches: Batches
    # Rows of a product, and tokens of a sequence, that reach every kind of kernel.
    row_counts: tuple[int, ...]
    sequence_len: int


def run_self_tests(decoder: Decoder, batches: Batches) -> list[SelfTestResult]:
    """Runs all tests on slot memory, and leaves it zeroed."""
    if decoder.ops.device.type == "cuda":
        rig = _Rig(decoder, batches, (1, 8, 16, 17, 32, 64, 65, 256, 512), 24)
    else:
        rig = _Rig(decoder, batches, (1, 2, 3, 8, 17), 8)
    tests: list[tuple[str, str, Callable[[_Rig], list[str]]]] = [
        (_LINEAR, f"each weight shape at {rig.row_counts} rows", _linear_rows),
        (_ATTENTION, "around tile and split borders", _attention),
        (_CHUNKS, "K, V, logits, attention; whole and in chunks", _chunks),
        (_DECODE, "K, V, logits; whole and by token", _decode),
    ]
    return [_result(name, compared, test(rig)) for name, compared, test in tests]


def _result(name: str, compared: str, differences: list[str]) -> SelfTestResult:
    detail = ("differs: " + ", ".join(differences)) if differences else compared
    return SelfTestResult(name, not differences, detail)


def _linear_rows(rig: _Rig) -> list[str]:
    """A row of a product has the same bits at any number of rows, beside any neighbours."""
    decoder = rig.decoder
    rows = _random(decoder, max(rig.row_counts), _widest_input(decoder))
    differences = []
    for name, weight in _distinct_weights(decoder):
        # The head has only sampled rows, and many columns.
        most = decoder.ops.sampled_rows(decoder.limits) if name == "head" else len(rows)
        counts = [count for count in rig.row_counts if count <= most]
        x = rows[-counts[-1] :, : weight.num_cols].contiguous()
        expected = _product(decoder, weight, x)
        for count in counts:
            if not _same(_product(decoder, weight, x[-count:]), expected[-count:]):
                differences.append(f"{name} [{weight.num_rows}, {weight.num_cols}] at {count} rows")
    gate_up = decoder.weights.layers[0].gate_up
    x = rows[:, : gate_up.num_cols].contiguous()
    expected = _gated(decoder, gate_up, x)
    differences += [
        f"gated product at {count} rows"
        for count in rig.row_counts
        if not _same(_gated(decoder, gate_up, x[-count:]), expected[-count:])
    ]
    return differences


def _attention(rig: _Rig) -> list[str]:
    """A query has the same bits from the prefill and from the decode kernel, whatever the chunk."""
    decoder = rig.decoder
    limit = decoder.limits.max_seq_len
    positions = [position for position in _ATTENTION_POSITIONS if position < limit]
    _fill_slot(decoder, positions[-1] + 1)
    qkv = _random_qkv(decoder, 2)
    differences = [
        f"position {position}" for position in positions if not _attends_alike(rig, qkv, position)
    ]
    decoder.cache.clear(0)
    return differences


def _fill_slot(decoder: Decoder, end: int) -> None:
    """K and V of the first layer at the first `end` positions of slot 0."""
    for tensor in (decoder.cache.keys[0], decoder.cache.values[0]):
        heads, dim = tensor.shape[2:]
        tensor[0, :end] = _random(decoder, end, heads * dim).view(end, heads, dim)


def _random_qkv(decoder: Decoder, rows: int) -> Tensor:
    heads = decoder.shard.q_heads.size + 2 * decoder.shard.kv_heads.size
    return _random(decoder, rows, heads * decoder.config.head_dim)


def _attends_alike(rig: _Rig, qkv: Tensor, position: int) -> bool:
    decoder = rig.decoder
    first = max(0, position - min(1, decoder.limits.max_step_tokens - 1))
    rows = qkv[: position - first + 1]
    prefill = _prefill_attended(rig, rows, first)
    batch, row = rig.batches.row_batch(0, position, 0)
    decode_rows = torch.zeros(batch.num_decode_rows, *qkv.shape[1:]).to(qkv)
    decode_rows[row] = rows[-1]
    decode = _attended(decoder, batch, decode_rows)
    return _same(prefill[-1:], decode[row : row + 1])


def _prefill_attended(rig: _Rig, qkv: Tensor, start: int) -> Tensor:
    """Attention of slot 0's positions from `start` on, as one chunk."""
    chunk = PrefillChunk(0, 1, start, (0,) * qkv.shape[0], False, None)
    return _attended(rig.decoder, rig.batches.chunk_batch((chunk,)), qkv)


def _attended(decoder: Decoder, batch: ForwardBatch, qkv: Tensor) -> Tensor:
    out = decoder.ops.activations(
        qkv.shape[0], decoder.shard.q_heads.size * decoder.config.head_dim
    )
    layer, rows = decoder.weights.layers[0], qkv.clone()
    decoder.attention.append(0, layer, batch, rows)
    decoder.attention.attend(0, layer, batch, rows, out)
    return out


def _chunks(rig: _Rig) -> list[str]:
    """A sequence gives the same cache and logits whole and in chunks, in whatever slot."""
    token_ids = _sequence(rig)
    last_slot = rig.decoder.limits.num_slots - 1
    whole = _in_chunks(rig, 0, token_ids, len(token_ids))
    chunks = _in_chunks(rig, last_slot, token_ids, _CHUNK)
    return _differences(whole, chunks, f"chunks of {_CHUNK}") + _attention_chunks(rig)


def _attention_chunks(rig: _Rig) -> list[str]:
    """Attention far into a slot has the same bits in one chunk and in several."""
    decoder = rig.decoder
    limits = decoder.limits
    end = min(_ATTENTION_POSITIONS[-1] + 1, limits.max_seq_len)
    start = max(0, end - limits.max_step_tokens)
    _fill_slot(decoder, end)
    qkv = _random_qkv(decoder, end - start)
    whole = _prefill_attended(rig, qkv, start)
    # A single row, and more than one before and after it.
    cut = (end - start) // 3
    bounds = sorted({0, cut, cut + 1, end - start})
    parts = [
        _prefill_attended(rig, qkv[begin:stop], start + begin)
        for begin, stop in itertools.pairwise(bounds)
    ]
    decoder.cache.clear(0)
    return [] if _same(whole, torch.cat(parts)) else [f"attention in chunks cut at {bounds}"]


def _decode(rig: _Rig) -> list[str]:
    """A sequence gives the same cache and logits whole and token by token."""
    token_ids = _sequence(rig)
    whole = _in_chunks(rig, 0, token_ids, len(token_ids))
    return _differences(whole, _by_token(rig, 0, token_ids), "decode")


def _sequence(rig: _Rig) -> list[int]:
    limits = rig.decoder.limits
    length = min(rig.sequence_len, limits.max_seq_len, limits.max_step_tokens)
    vocab = rig.decoder.config.vocab_size
    return [(_SEED + 7919 * index) % vocab for index in range(length)]


def _differences(whole: tuple[Tensor, ...], other: tuple[Tensor, ...], name: str) -> list[str]:
    return [
        f"{what} of whole and {name}"
        for what, left, right in zip(("K", "V", "logits"), whole, other, strict=True)
        if not _same(left, right)
    ]


def _in_chunks(rig: _Rig, slot: int, token_ids: list[int], size: int) -> tuple[Tensor, ...]:
    logits = torch.empty(0)
    for start in range(0, len(token_ids), size):
        piece = tuple(token_ids[start : start + size])
        chunk = PrefillChunk(slot, 1, start, piece, True, None)
        logits = rig.decoder.forward(rig.batches.chunk_batch((chunk,)))[0]
    return _computed(rig.decoder, slot, len(token_ids), logits)


def _by_token(rig: _Rig, slot: int, token_ids: list[int]) -> tuple[Tensor, ...]:
    logits = torch.empty(0)
    for position, token_id in enumerate(token_ids):
        batch, row = rig.batches.row_batch(slot, position, token_id)
        logits = rig.decoder.forward(batch)[row]
    return _computed(rig.decoder, slot, len(token_ids), logits)


def _computed(decoder: Decoder, slot: int, end: int, logits: Tensor) -> tuple[Tensor, ...]:
    """The slot's K and V of all layers, and the logits; the slot is zeroed."""
    keys = torch.stack([tensor[slot, :end] for tensor in decoder.cache.keys])
    values = torch.stack([tensor[slot, :end] for tensor in decoder.cache.values])
    result = keys, values, logits.clone()
    decoder.cache.clear(slot)
    return result


def _distinct_weights(decoder: Decoder) -> list[tuple[str, Weight]]:
    layer = decoder.weights.layers[0]
    named = [
        ("qkv", layer.qkv),
        ("o", layer.o),
        ("gate_up", layer.gate_up),
        ("down", layer.down),
        ("head", decoder.weights.head),
    ]
    distinct = {(weight.num_rows, weight.num_cols): (name, weight) for name, weight in named}
    return list(distinct.values())


def _widest_input(decoder: Decoder) -> int:
    return max(weight.num_cols for _, weight in _distinct_weights(decoder))


def _product(decoder: Decoder, weight: Weight, x: Tensor) -> Tensor:
    padded = _padded(decoder, x)
    out = decoder.ops.activations(padded.shape[0], weight.num_rows)
    decoder.ops.linear(padded, weight, out)
    return out[: x.shape[0]]


def _gated(decoder: Decoder, weight: Weight, x: Tensor) -> Tensor:
    padded = _padded(decoder, x)
    scratch = decoder.ops.activations(padded.shape[0], weight.num_rows)
    out = decoder.ops.activations(padded.shape[0], weight.num_rows // 2)
    decoder.ops.gated_linear(padded, weight, scratch, out)
    return out[: x.shape[0]]


def _padded(decoder: Decoder, x: Tensor) -> Tensor:
    """x and zero rows, as many as the backend runs."""
    padded = decoder.ops.activations(decoder.ops.num_rows(x.shape[0]), x.shape[1])
    padded[: x.shape[0]] = x
    return padded


def _random(decoder: Decoder, rows: int, columns: int) -> Tensor:
    """The same values on every rank, in the backend's type."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(_SEED))
    return decoder.ops.activations(rows, columns).copy_(values)


def _same(left: Tensor, right: Tensor) -> bool:
    """Equal bits; a NaN equals itself."""
    return left.shape == right.shape and bool((_bits(left) == _bits(right)).all())


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
