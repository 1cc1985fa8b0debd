"""The promise, proved on the loaded weights before the first request.

Each test compares bits. A failure is reported, not hidden: the rank serves, and says that it cannot
promise equal answers. Every rank of a group makes the same calls, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker._native import PackedWeight
from worker.batch import BatchBuffers, ForwardBatch, PrefillChunk
from worker.decoder import Decoder

_ROW_COUNTS = (1, 2, 3, 8, 17)
_SEQUENCE_LEN = 8
_SEED = 20_251
# Around multiples of sizes an attention kernel may split at.
_ATTENTION_POSITIONS = (0, 1, 15, 16, 63, 64, 127, 128, 255, 256, 257, 511, 512)


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """A property and whether it holds; `detail` says what was compared, or what differed."""

    name: str
    passed: bool
    detail: str


def run_self_tests(decoder: Decoder) -> list[SelfTestResult]:
    """Runs all tests on slot memory, and leaves it zeroed."""
    tests: list[tuple[str, str, Callable[[Decoder], list[str]]]] = [
        ("linear_rows_equal", f"each weight shape at {_ROW_COUNTS} rows", _linear_rows),
        ("prefill_attention_equals_decode", "around tile and split borders", _attention),
        ("prefill_kv_equals_decode_kv", "K, V, logits; whole, in chunks, by token", _sequence),
    ]
    return [_result(name, compared, test(decoder)) for name, compared, test in tests]


def _result(name: str, compared: str, differences: list[str]) -> SelfTestResult:
    detail = ("differs: " + ", ".join(differences)) if differences else compared
    return SelfTestResult(name, not differences, detail)


def _linear_rows(decoder: Decoder) -> list[str]:
    """A row of a product has the same bits at any number of rows, beside any neighbours."""
    generator = torch.Generator().manual_seed(_SEED)
    rows = torch.randn(max(_ROW_COUNTS), _widest_input(decoder), generator=generator)
    differences = []
    for name, weight in _distinct_weights(decoder):
        x = rows[:, : weight.num_cols].contiguous()
        expected = _product(decoder, weight, x)
        for count in _ROW_COUNTS:
            if not _same(_product(decoder, weight, x[-count:]), expected[-count:]):
                differences.append(f"{name} [{weight.num_rows}, {weight.num_cols}] at {count} rows")
    return differences


def _attention(decoder: Decoder) -> list[str]:
    """A query has the same bits from the prefill and from the decode kernel, whatever the chunk."""
    limit = decoder.limits.max_seq_len
    positions = [position for position in _ATTENTION_POSITIONS if position < limit]
    generator = torch.Generator().manual_seed(_SEED)
    keys, values = decoder.cache.keys[0], decoder.cache.values[0]
    end = positions[-1] + 1
    for tensor in (keys, values):
        tensor[0, :end] = torch.randn(tensor[0, :end].shape, generator=generator)
    heads = decoder.shard.q_heads.size + 2 * decoder.shard.kv_heads.size
    qkv = torch.randn(2, heads * decoder.config.head_dim, generator=generator)
    differences = [
        f"position {position}"
        for position in positions
        if not _attends_alike(decoder, qkv, position)
    ]
    decoder.cache.clear(0)
    return differences


def _attends_alike(decoder: Decoder, qkv: Tensor, position: int) -> bool:
    keys, values = decoder.cache.keys[0], decoder.cache.values[0]
    ops, scale = decoder.ops, decoder.attention.scale
    q_size = decoder.shard.q_heads.size * decoder.config.head_dim
    first = max(0, position - 1)
    rows = qkv[: position - first + 1]
    prefill = torch.empty(rows.shape[0], q_size)
    ops.prefill_attention(rows, keys, values, 0, first, scale, prefill)
    decode = torch.empty(1, q_size)
    at = torch.tensor([position], dtype=torch.int32)
    slot = torch.zeros(1, dtype=torch.int32)
    ops.decode_attention(rows[-1:], keys, values, slot, at, scale, decode)
    return _same(prefill[-1:], decode)


def _sequence(decoder: Decoder) -> list[str]:
    """A sequence gives the same cache and logits whole, in chunks and token by token."""
    length = min(_SEQUENCE_LEN, decoder.limits.max_seq_len, decoder.limits.max_step_tokens)
    vocab = decoder.config.vocab_size
    token_ids = [(_SEED + 7919 * index) % vocab for index in range(length)]
    whole = _computed(decoder, 0, _in_chunks(0, token_ids, length))
    last_slot = decoder.limits.num_slots - 1
    chunked = _computed(decoder, last_slot, _in_chunks(last_slot, token_ids, 3))
    decoded = _computed(decoder, 0, _token_by_token(0, token_ids))
    differences = []
    for name, other in (("chunks of 3", chunked), ("decode", decoded)):
        for what, left, right in zip(("K", "V", "logits"), whole, other, strict=True):
            if not _same(left, right):
                differences.append(f"{what} of whole and {name}")
    return differences


def _computed(decoder: Decoder, slot: int, batches: list[ForwardBatch]) -> tuple[Tensor, ...]:
    """Runs the batches in `slot`; its K and V of all layers, and the last logits."""
    logits = torch.empty(0)
    for batch in batches:
        logits = decoder.forward(batch)
    end = int(batches[-1].positions[-1]) + 1
    keys = torch.stack([tensor[slot, :end] for tensor in decoder.cache.keys])
    values = torch.stack([tensor[slot, :end] for tensor in decoder.cache.values])
    result = keys, values, logits[-1:].clone()
    decoder.cache.clear(slot)
    return result


def _in_chunks(slot: int, token_ids: list[int], size: int) -> list[ForwardBatch]:
    chunks = [
        PrefillChunk(slot, 1, start, tuple(token_ids[start : start + size]), True, None)
        for start in range(0, len(token_ids), size)
    ]
    return [BatchBuffers(size).fill([], [chunk]) for chunk in chunks]


def _token_by_token(slot: int, token_ids: list[int]) -> list[ForwardBatch]:
    rows = [(slot, position, token_id) for position, token_id in enumerate(token_ids)]
    return [BatchBuffers(1).fill([row], []) for row in rows]


def _distinct_weights(decoder: Decoder) -> list[tuple[str, PackedWeight]]:
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


def _product(decoder: Decoder, weight: PackedWeight, x: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], weight.num_rows)
    decoder.ops.linear(x, weight, out)
    return out


def _same(left: Tensor, right: Tensor) -> bool:
    """Equal bits; a NaN equals itself."""
    return left.shape == right.shape and bool((_bits(left) == _bits(right)).all())


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
