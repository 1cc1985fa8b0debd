"""Attention over the slot cache: against the oracle, and the promise of equal bits."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from tolerances import assert_close
from torch import Tensor

import reference
from worker import _native

DTYPES = [torch.float32, torch.bfloat16]
# Around tiles of 32 and splits of 256 positions.
BORDERS = [0, 1, 30, 31, 32, 33, 63, 64, 255, 256, 257, 287, 288, 511, 512, 513, 599]
SHAPES = [(64, 1, 1), (64, 3, 3), (80, 1, 2), (96, 2, 4), (128, 1, 5), (128, 1, 8), (256, 1, 7)]
SHAPES += [(64, 2, 6), (2, 1, 3), (20, 2, 1)]
LENGTH = 600


@dataclass(frozen=True, slots=True)
class Case:
    """Two slots of a cache and the queries of LENGTH positions of slot 1; what is free is NaN."""

    q_heads: int
    qkv: Tensor  # [LENGTH, (H_q + 2 H_kv) D]
    keys: Tensor  # [2, P, H_kv, D]
    values: Tensor

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def prefill(
        self, ops: _native.CpuOps, start: int = 0, end: int = LENGTH, slot: int = 1
    ) -> Tensor:
        out = torch.full((end - start, self.q_heads * self.head_dim), torch.nan)
        qkv = self.qkv[start:end]
        ops.prefill_attention(qkv, self.keys, self.values, slot, start, self.scale, out)
        return out

    def decode(self, ops: _native.CpuOps, positions: list[int], slot: int = 1) -> Tensor:
        out = torch.full((len(positions), self.q_heads * self.head_dim), torch.nan)
        where = torch.tensor(positions, dtype=torch.int32)
        slots = torch.full_like(where, slot)
        qkv = self.qkv[where.long()]
        ops.decode_attention(qkv, self.keys, self.values, slots, where, self.scale, out)
        return out


def make_case(shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator) -> Case:
    head_dim, kv_heads, group = shape
    keys, values = torch.full((2, 2, LENGTH + 40, kv_heads, head_dim), torch.nan, dtype=dtype)
    filled = torch.randn(2, LENGTH, kv_heads, head_dim, generator=generator).to(dtype)
    keys[1, :LENGTH], values[1, :LENGTH] = filled
    q_heads = kv_heads * group
    qkv = torch.randn(LENGTH, (q_heads + 2 * kv_heads) * head_dim, generator=generator) * 2
    return Case(q_heads, qkv, keys, values)


def oracle(case: Case, position: int) -> Tensor:
    q = case.qkv[position].view(-1, case.head_dim)[: case.q_heads]
    seen = slice(0, position + 1)
    out = reference.attention(q, case.keys[1, seen], case.values[1, seen], case.scale)
    return out.flatten()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_and_decode_equal_the_oracle_and_each_other(
    ops: _native.CpuOps,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    case = make_case(shape, dtype, generator)
    prefilled = case.prefill(ops)
    assert not prefilled.isnan().any()
    wanted = torch.stack([oracle(case, position) for position in BORDERS])
    assert_close(prefilled[BORDERS], wanted, "attention")
    assert torch.equal(case.decode(ops, BORDERS), prefilled[BORDERS])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_position_decodes_to_the_bits_of_prefill(
    ops: _native.CpuOps, dtype: torch.dtype, generator: torch.Generator
) -> None:
    case = make_case((64, 1, 3), dtype, generator)
    everywhere = list(range(LENGTH))
    assert torch.equal(case.decode(ops, everywhere), case.prefill(ops))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 3, 3), (80, 1, 2)])
def test_any_chunks_give_the_same_bits(
    ops: _native.CpuOps,
    lone_ops: _native.CpuOps,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    case = make_case(shape, dtype, generator)
    whole = case.prefill(lone_ops)
    for chunk in (1, 7, 16, 17, 100, 256, 300):
        cuts = [*range(0, LENGTH, chunk), LENGTH]
        pieces = [case.prefill(ops, begin, end) for begin, end in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(pieces), whole), chunk


def test_neighbours_and_slots_do_not_matter(
    ops: _native.CpuOps, generator: torch.Generator
) -> None:
    case = make_case((64, 3, 3), torch.float32, generator)
    case.keys[0], case.values[0] = case.keys[1], case.values[1]
    alone = torch.cat([case.decode(ops, [position]) for position in BORDERS])
    for count in range(1, len(BORDERS) + 1):
        assert torch.equal(case.decode(ops, BORDERS[:count]), alone[:count])
    assert torch.equal(case.decode(ops, BORDERS[::-1]), alone.flip(0))
    assert torch.equal(case.decode(ops, BORDERS, slot=0), alone)
    assert torch.equal(case.prefill(ops, slot=0), case.prefill(ops, slot=1))


def test_each_row_attends_its_own_slot(ops: _native.CpuOps, generator: torch.Generator) -> None:
    case = make_case((64, 3, 3), torch.float32, generator)
    case.keys[0, :40], case.values[0, :40] = case.keys[1, 60:100], case.values[1, 70:110]
    positions = [39, 300, 20, 599, 0, 5]
    slots = [0, 1, 0, 1, 0, 1]
    where, which = (torch.tensor(values, dtype=torch.int32) for values in (positions, slots))
    out = torch.empty(len(slots), case.q_heads * 64)
    qkv = case.qkv[positions]
    ops.decode_attention(qkv, case.keys, case.values, which, where, case.scale, out)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        assert torch.equal(out[row], case.decode(ops, [position], slot)[0])
        assert torch.equal(out[row], case.prefill(ops, position, position + 1, slot)[0])
        seen = slice(0, position + 1)
        q = qkv[row].view(-1, 64)[: case.q_heads]
        wanted = reference.attention(q, case.keys[slot, seen], case.values[slot, seen], case.scale)
        assert_close(out[row], wanted.flatten(), "attention")


def test_what_lies_past_a_row_is_never_read(
    ops: _native.CpuOps, generator: torch.Generator
) -> None:
    # A poisoned position spoils the rows that may see it, and no others, in the same chunk too.
    case = make_case((64, 1, 3), torch.float32, generator)
    clean = case.prefill(ops)
    case.keys[1, 300, 0, 5] = torch.nan
    spoilt = case.prefill(ops)
    assert torch.equal(spoilt[:300], clean[:300])
    assert spoilt[300:].isnan().all()
    case.keys[1, 300] = 0
    clean = case.prefill(ops)
    case.values[1, 407, 0, 5] = torch.inf  # in the middle of a block of rows
    spoilt = case.prefill(ops)
    assert torch.equal(spoilt[:407], clean[:407])
    assert spoilt.view(LENGTH, -1, 64)[407:, :, 5].isinf().all()


def test_large_scores_do_not_overflow(ops: _native.CpuOps, generator: torch.Generator) -> None:
    case = make_case((64, 1, 1), torch.float32, generator)
    case.keys[1, :LENGTH] *= 100
    got = case.decode(ops, BORDERS)
    assert_close(got, torch.stack([oracle(case, position) for position in BORDERS]), "attention")


def test_strided_cache(ops: _native.CpuOps, generator: torch.Generator) -> None:
    case = make_case((64, 3, 3), torch.bfloat16, generator)
    # Heads outside positions, and K and V in one tensor.
    both = torch.full((2, 2, 3, LENGTH + 40, 64), torch.nan, dtype=torch.bfloat16)
    keys, values = both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)
    keys.copy_(case.keys)
    values.copy_(case.values)
    strided = Case(case.q_heads, case.qkv, keys, values)
    assert torch.equal(strided.prefill(ops), case.prefill(ops))
    assert torch.equal(strided.decode(ops, BORDERS), case.decode(ops, BORDERS))


def test_fused_instruction_sets_agree(generator: torch.Generator) -> None:
    try:
        both = [_native.CpuOps(1, isa) for isa in ("avx512", "avx2")]
    except ValueError:
        pytest.skip("this CPU has not both")
    case = make_case((64, 3, 3), torch.float32, generator)
    first, second = (case.prefill(ops) for ops in both)
    assert torch.equal(first, second)


def test_many_splits_in_a_chunk(ops: _native.CpuOps, generator: torch.Generator) -> None:
    # So many rows that the states of all splits are not held at once.
    rows, heads = 512, 32
    keys, values = torch.randn(2, 1, 4096, 1, 64, generator=generator)
    qkv = torch.randn(rows, (heads + 2) * 64, generator=generator)
    case = Case(heads, qkv, keys, values)
    start = 4096 - rows
    out, last = torch.empty(rows, heads * 64), torch.empty(1, heads * 64)
    ops.prefill_attention(qkv, keys, values, 0, start, case.scale, out)
    position = torch.tensor([4095], dtype=torch.int32)
    slot = torch.zeros(1, dtype=torch.int32)
    ops.decode_attention(qkv[-1:], keys, values, slot, position, case.scale, last)
    assert torch.equal(out[-1], last[0])
    q = qkv[-1].view(-1, 64)[:heads]
    assert_close(out[-1], reference.attention(q, keys[0], values[0], 0.125).flatten(), "attention")


def test_cache_of_more_than_2_to_the_31_elements(
    ops: _native.CpuOps, generator: torch.Generator
) -> None:
    # Virtual memory only: a few pages of it are ever touched.
    keys, values = (torch.empty(9, 262145, 4, 256, dtype=torch.bfloat16) for _ in range(2))
    slot, last = 8, 262144
    assert slot * keys.stride(0) > 2**31
    qkv = torch.randn(41, 12 * 256, generator=generator)
    positions = torch.tensor([*range(40), last], dtype=torch.int32)
    slots = torch.full_like(positions, slot)
    cos, sin = torch.ones(1, 128).expand(last + 1, 128), torch.zeros(1, 128).expand(last + 1, 128)
    ops.rope_append(qkv, None, None, 0.0, cos, sin, slots, positions, keys, values)
    assert torch.equal(values[slot, last], qkv[40, 8 * 256 :].view(4, 256).bfloat16())
    case = Case(4, qkv, keys, values)
    q = qkv[39].view(12, 256)[:4]
    wanted = reference.attention(q, keys[slot, :40], values[slot, :40], case.scale)
    assert_close(case.decode(ops, [39], slot)[0], wanted.flatten(), "attention")
    assert torch.equal(case.prefill(ops, 0, 40, slot)[39], case.decode(ops, [39], slot)[0])


def test_no_rows(ops: _native.CpuOps) -> None:
    cache = torch.zeros(1, 4, 1, 8)
    none, out = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 8)
    qkv, tables = torch.zeros(0, 24), torch.zeros(4, 4)
    ops.rope_append(qkv, None, None, 0.0, tables, tables, none, none, cache, cache.clone())
    ops.decode_attention(qkv, cache, cache.clone(), none, none, 1.0, out)
    ops.prefill_attention(qkv, cache, cache.clone(), 0, 4, 1.0, out)
    assert not cache.any()
