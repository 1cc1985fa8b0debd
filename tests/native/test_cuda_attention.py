"""Decode attention and rope_append on the GPU: against float64, and the promise of equal bits."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import reference

pytestmark = pytest.mark.gpu
KERNELS = ("best", "portable")
MakeOps = Callable[[str], Any]

# The relative error of a head: the output's rounding, and that of the weights.
ERRORS = {torch.bfloat16: 5e-3, torch.float16: 7e-4, torch.float32: 1e-5}
# The same of a head after norm and rotation: its rounding alone, of which 2^-8 and 2^-11 are the
# most.
ROPE_ERRORS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 4e-7}
DTYPES = list(ERRORS)
HALVES = [torch.bfloat16, torch.float16]
DIMS = [64, 96, 128, 256]
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4096]
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Case:
    """Slots whose earlier positions hold keys and values. All else of the caches, and the rows of
    idle slots, is NaN."""

    positions: list[int]  # [T], -1 idle
    qkv: Tensor  # [T, (H_q + 2 H_kv) D]
    keys: Tensor  # [S, P, H_kv, D]
    values: Tensor
    norms: tuple[Tensor, Tensor] | tuple[None, None]  # [D]
    cos: Tensor  # [P, D / 2]
    sin: Tensor
    slots: list[int]  # [T], of the rows

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def q_heads(self) -> int:
        return self.qkv.shape[1] // self.head_dim - 2 * self.kv_heads

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    @property
    def rope(self) -> tuple[Tensor | None, Tensor | None, float, Tensor, Tensor]:
        return (*self.norms, EPS, self.cos, self.sin)

    def copy(self) -> "Case":
        """With caches of its own, of the same strides."""
        keys, values = (torch.empty_like(x).copy_(x) for x in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def decode(self, ops: Any) -> Tensor:
        """out [T, H_q D]. Appends to the caches."""
        workspace = self.workspace(ops)
        out = torch.full_like(self.qkv[:, : self.q_heads * self.head_dim], torch.nan)
        self.launch(ops, workspace, out)
        assert not workspace[2].any()
        return out

    def workspace(self, ops: Any) -> tuple[Tensor, Tensor, Tensor]:
        """positions, states and counters."""
        rows, capacity = len(self.positions), self.keys.shape[1]
        size = ops.decode_attention_workspace(rows, capacity, self.q_heads, self.head_dim) // 4
        states = torch.full((size,), torch.nan, device="cuda")
        counters = torch.zeros(rows * self.kv_heads, dtype=torch.int32, device="cuda")
        return torch.tensor(self.positions, dtype=torch.int32, device="cuda"), states, counters

    def launch(self, ops: Any, workspace: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
        positions, states, counters = workspace
        caches = (self.keys, self.values)
        slots = torch.tensor(self.slots, dtype=torch.int32, device="cuda")
        ops.decode_attention(
            self.qkv, *self.rope, *caches, positions, slots, self.scale, states, counters, out
        )

    def prefill(self, ops: Any, slot: int) -> Tensor:
        """out [H_q D] of the slot's row, as a chunk of its own. Appends to the caches."""
        qkv, out = self.qkv[slot : slot + 1].clone(), torch.full_like(self.qkv[:1], torch.nan)
        out = out[:, : self.q_heads * self.head_dim].contiguous()
        caches = (self.keys, self.values)
        ops.rope_append(qkv, *self.rope, *caches, slot, self.positions[slot])
        ops.prefill_attention(qkv, *caches, slot, self.positions[slot], self.scale, out)
        return out[0]


def make_case(
    head_dim: int,
    kv_heads: int,
    group: int,
    lengths: list[int],
    dtype: torch.dtype = torch.bfloat16,
    heads_first: bool = True,
    norm: bool = True,
) -> Case:
    """lengths: with the new token, 0 for an idle slot."""
    free: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
    capacity = max(*lengths, 1) + 70
    places = [kv_heads, capacity] if heads_first else [capacity, kv_heads]
    keys, values = torch.full((2, len(lengths), *places, head_dim), torch.nan, **free)
    if heads_first:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    qkv = torch.full((len(lengths), (group + 2) * kv_heads * head_dim), torch.nan, **free)
    for slot, length in enumerate(lengths):
        if length > 0:
            qkv[slot] = torch.randn(qkv.shape[1], **free) * 2
            for cache in (keys, values):
                cache[slot, : length - 1] = torch.randn(length - 1, kv_heads, head_dim, **free)
    norms = torch.rand(2, head_dim, device="cuda") * 2 + 0.5
    cos, sin = (x.cuda() for x in reference.rope_tables(capacity, head_dim))
    positions = [length - 1 for length in lengths]
    pair = (norms[0], norms[1]) if norm else (None, None)
    return Case(positions, qkv, keys, values, pair, cos, sin, list(range(len(lengths))))


def rotated(case: Case, heads: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
    """heads [T, n, D] at positions [T] -> float64."""
    wide = heads.double() if norm is None else reference.rms_norm(heads, norm, EPS)
    return reference.rotate(wide, case.cos[positions], case.sin[positions])


def heads_of(case: Case, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, (H_q + 2 H_kv) D] -> q, k, v [T, n, D]."""
    heads = qkv.view(len(qkv), -1, case.head_dim)
    return heads.split([case.q_heads, case.kv_heads, case.kv_heads], dim=1)


def error(got: Tensor, wanted: Tensor) -> float:
    """The largest relative error of a head, [..., D]."""
    return float(((got.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def check_decode(case: Case, ops: Any) -> Tensor:
    """Every row against the oracle, and what is in the caches afterwards."""
    before, out = case.copy(), case.decode(ops)
    dtype = case.qkv.dtype
    assert not out[[p < 0 for p in case.positions]].any()
    for slot, position in enumerate(case.positions):
        if position < 0:
            continue
        where = torch.tensor([position], device="cuda")
        q, k, v = heads_of(case, case.qkv[slot : slot + 1])
        wanted_k = rotated(case, k, case.norms[1], where)[0]
        assert error(case.keys[slot, position], wanted_k) < ROPE_ERRORS[dtype]
        assert torch.equal(case.values[slot, position], v[0])
        wanted_q = rotated(case, q, case.norms[0], where)[0].to(dtype)
        seen = slice(0, position + 1)
        keys, values = case.keys[slot, seen], case.values[slot, seen]
        wanted = reference.attention(wanted_q, keys, values, case.scale)
        found = error(out[slot].view(-1, case.head_dim), wanted)
        assert found < ERRORS[dtype], (slot, position, found)
    for cache, old in ((case.keys, before.keys), (case.values, before.values)):
        changed = (cache != old) & ~(cache.isnan() & old.isnan())
        for slot, position in enumerate(case.positions):
            if position >= 0:
                changed[slot, position] = False
        assert not changed.any()
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.int16), b.contiguous().view(torch.int16)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (3, 2), (2, 4), (1, 5), (2, 7), (1, 8)])
def test_every_length(
    cuda_ops: Any, head_dim: int, kv_heads: int, group: int, dtype: torch.dtype
) -> None:
    lengths = [0, *LENGTHS[:6], 0, 0, *LENGTHS[6:], 0]
    check_decode(make_case(head_dim, kv_heads, group, lengths, dtype), cuda_ops)


@pytest.mark.parametrize("group", [9, 15, 16, 17, 20, 32, 40])
def test_large_groups(cuda_ops: Any, group: int) -> None:
    check_decode(make_case(64, 2, group, [100, 128, 129, 0, 700]), cuda_ops)


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "group"), [(128, 8, 4), (128, 2, 20), (64, 2, 7), (256, 1, 20)]
)
@pytest.mark.parametrize("lengths", [[32768], [32700, 0, 5, 20000]])
def test_long_contexts(
    cuda_ops: Any, head_dim: int, kv_heads: int, group: int, lengths: list[int]
) -> None:
    check_decode(make_case(head_dim, kv_heads, group, lengths), cuda_ops)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_norm(cuda_ops: Any, dtype: torch.dtype) -> None:
    check_decode(make_case(64, 3, 3, [1, 77, 300], dtype, norm=False), cuda_ops)


def test_many_slots(cuda_ops: Any) -> None:
    lengths = [max(0, (i * 131) % 700 - 200) for i in range(150)]
    check_decode(make_case(64, 1, 2, lengths), cuda_ops)


def test_no_slot_decodes(cuda_ops: Any) -> None:
    case = make_case(128, 2, 4, [0, 0, 0])
    assert not case.decode(cuda_ops).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", DIMS)
def test_neighbours_and_slots_do_not_matter(
    cuda_ops: Any, head_dim: int, dtype: torch.dtype
) -> None:
    lengths = [300, 1, 128, 129, 1500, 0, 640, 2049]
    case = make_case(head_dim, 2, 3, lengths, dtype)
    together = case.copy().decode(cuda_ops)
    for slot, length in enumerate(lengths):
        positions = [-1] * len(lengths)
        positions[slot] = length - 1
        alone = replace(case.copy(), positions=positions).decode(cuda_ops)
        assert same_bits(alone[slot], together[slot]), slot
    turned = replace(
        case,
        positions=case.positions[3:] + case.positions[:3],
        qkv=case.qkv.roll(-3, 0),
        keys=case.keys.roll(-3, 0),
        values=case.values.roll(-3, 0),
    )
    assert same_bits(turned.decode(cuda_ops), together.roll(-3, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_rows_of_any_slots(
    cuda_ops: Any, head_dim: int, kv_heads: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Rows in another order and fewer than slots: each row's bits, and K and V in its own slot."""
    lengths = [300, 1, 128, 129, 1500, 0, 640, 2049, 0, 257, 5, 33] + 30 * [7]
    case = make_case(head_dim, kv_heads, 3, lengths, dtype)
    whole = case.copy()
    wanted = whole.decode(cuda_ops)
    for count in (1, 4, 12, 40):
        slots = torch.randperm(len(lengths), generator=generator)[:count].tolist()
        some = replace(
            case.copy(),
            slots=slots,
            positions=[case.positions[slot] for slot in slots],
            qkv=case.qkv[slots].contiguous(),
        )
        assert same_bits(some.decode(cuda_ops), wanted[slots])
        for cache, before, after in (
            (some.keys, case.keys, whole.keys),
            (some.values, case.values, whole.values),
        ):
            for slot in range(len(lengths)):
                assert same_bits(cache[slot], (after if slot in slots else before)[slot])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (1, 5), (2, 8), (1, 20)])
def test_the_bits_of_prefill(
    cuda_ops: Any, head_dim: int, kv_heads: int, group: int, dtype: torch.dtype
) -> None:
    case = make_case(head_dim, kv_heads, group, LENGTHS, dtype, norm=group > 1)
    prefilled = case.copy()
    rows = [prefilled.prefill(cuda_ops, slot) for slot in range(len(LENGTHS))]
    assert same_bits(case.decode(cuda_ops), torch.stack(rows))
    assert same_bits(case.keys, prefilled.keys)
    assert same_bits(case.values, prefilled.values)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 4), (1, 20)])
def test_the_bits_of_every_gpu(
    gpu_ops: MakeOps, head_dim: int, kv_heads: int, group: int, dtype: torch.dtype
) -> None:
    """Portable kernels and this GPU's own, in decode and in prefill."""
    best, portable = gpu_ops("best"), gpu_ops("portable")
    case = make_case(head_dim, kv_heads, group, [0, *LENGTHS], dtype)
    other = case.copy()
    assert same_bits(case.copy().decode(best), case.copy().decode(portable))
    for slot in (3, 8, 12):
        assert same_bits(case.prefill(best, slot), other.prefill(portable, slot))
    assert same_bits(case.keys, other.keys)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize(("start", "length"), [(0, 300), (16_330, 70)])
def test_token_by_token_equals_a_chunk(
    cuda_ops: Any, start: int, length: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = make_case(head_dim, 2, 4, [0, start + length], dtype)
    case.keys[:, start:] = torch.nan
    case.values[:, start:] = torch.nan
    rows = torch.randn(length, case.qkv.shape[1], dtype=dtype, device="cuda") * 2
    chunk, out = case.copy(), torch.empty_like(rows[:, : case.q_heads * head_dim].contiguous())
    qkv = rows.clone()
    cuda_ops.rope_append(qkv, *chunk.rope, chunk.keys, chunk.values, 1, start)
    cuda_ops.prefill_attention(qkv, chunk.keys, chunk.values, 1, start, chunk.scale, out)
    for row in range(length):
        case.qkv[1] = rows[row]
        step = replace(case, positions=[-1, start + row])
        assert same_bits(step.decode(cuda_ops)[1], out[row]), row
    assert same_bits(case.keys, chunk.keys)
    assert same_bits(case.values, chunk.values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize(("slot", "start", "rows"), [(1, 40, 16), (0, 0, 7), (1, 83, 1), (0, 9, 0)])
def test_rows_appended_at_a_place_on_the_device(
    cuda_ops: Any, slot: int, start: int, rows: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = make_case(head_dim, 2, 4, [100, 100], dtype)
    wanted = case.copy()
    qkv = torch.randn(16, case.qkv.shape[1], dtype=dtype, device="cuda")
    launched = qkv.clone()
    cuda_ops.rope_append(launched[:rows], *case.rope, wanted.keys, wanted.values, slot, start)
    place = torch.tensor([slot, start, rows], dtype=torch.int32, device="cuda")
    cuda_ops.rope_append(qkv, *case.rope, case.keys, case.values, 1, 2, place)
    assert same_bits(qkv, launched)
    assert same_bits(case.keys, wanted.keys)
    assert same_bits(case.values, wanted.values)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", DIMS)
def test_steps_that_follow_at_once(cuda_ops: Any, head_dim: int, dtype: torch.dtype) -> None:
    # Many launches without a wait of the host, over states and outputs that the one before used.
    case = make_case(head_dim, 4, 4, [1, 0, 700, 128, 3000], dtype)
    wanted = case.copy().decode(cuda_ops)
    workspace = case.workspace(cuda_ops)
    outs = torch.full((2, *wanted.shape), torch.nan, dtype=dtype, device="cuda")
    for _ in range(300):
        case.launch(cuda_ops, workspace, outs[0])
        case.launch(cuda_ops, workspace, outs[1])
    assert same_bits(outs, torch.stack([wanted, wanted]))
    assert not workspace[2].any()


def test_a_bad_row_spoils_itself_alone(cuda_ops: Any) -> None:
    lengths = [500, 500, 90]
    case = make_case(128, 2, 4, lengths)
    clean = case.copy().decode(cuda_ops).view(3, 8, 128)
    spoilt = case.copy()
    spoilt.keys[0, 140, 1, 5] = torch.nan
    spoilt.values[1, 498, 0, 7] = torch.nan
    out = spoilt.decode(cuda_ops).view(3, 8, 128)
    assert out[0, 4:].isnan().all()
    assert out[1, :4, 7].isnan().all()
    for got, wanted in ((out[0, :4], clean[0, :4]), (out[1, 4:], clean[1, 4:])):
        assert same_bits(got, wanted)
    assert same_bits(out[1, :4, :7], clean[1, :4, :7])
    assert same_bits(out[2], clean[2])


def test_large_scores_do_not_overflow(cuda_ops: Any) -> None:
    case = make_case(64, 2, 4, [1, 129, 1000])
    case.keys[:] *= 100
    check_decode(case, cuda_ops)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", DIMS)
def test_strided_caches(cuda_ops: Any, head_dim: int, dtype: torch.dtype) -> None:
    case = make_case(head_dim, 3, 3, [40, 128, 0, 700], dtype)
    both = torch.full((4, 2, 770, 3, head_dim), torch.nan, dtype=dtype, device="cuda")
    keys, values = both[:, 0], both[:, 1]
    keys.copy_(case.keys)
    values.copy_(case.values)
    strided = replace(case, keys=keys, values=values)
    assert same_bits(strided.decode(cuda_ops), case.decode(cuda_ops))
    assert same_bits(keys, case.keys)
    assert same_bits(values, case.values)


def test_caches_that_cannot_be_copied_in_vectors(cuda_ops: Any) -> None:
    case = make_case(64, 1, 1, [3])
    wide = torch.zeros(2, 1, 73, 1, 68, dtype=torch.bfloat16, device="cuda")[..., :64]
    odd = replace(case, keys=wide[0], values=wide[1])
    with pytest.raises(ValueError, match="16 bytes"):
        odd.decode(cuda_ops)
    with pytest.raises(ValueError, match="16 bytes"):
        cuda_ops.rope_append(odd.qkv, *odd.rope, odd.keys, odd.values, 0, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 130), (77, 33)])
def test_rope_append(
    cuda_ops: Any, head_dim: int, norm: bool, start: int, rows: int, dtype: torch.dtype
) -> None:
    case = make_case(head_dim, 2, 3, [0, 200, 0], dtype, norm=norm)
    before = case.copy()
    qkv = torch.randn(rows, case.qkv.shape[1], dtype=dtype, device="cuda") * 2
    q, k, v = heads_of(case, qkv.clone())
    where = torch.arange(start, start + rows, device="cuda")
    cuda_ops.rope_append(qkv, *case.rope, case.keys, case.values, 1, start)
    got_q, got_k, got_v = heads_of(case, qkv)
    assert error(got_q, rotated(case, q, case.norms[0], where)) < ROPE_ERRORS[dtype]
    assert same_bits(got_k, k)
    assert same_bits(got_v, v)
    kept = case.keys[1, where], case.values[1, where]
    assert error(kept[0], rotated(case, k, case.norms[1], where)) < ROPE_ERRORS[dtype]
    assert same_bits(kept[1], v)
    for cache, old in ((case.keys, before.keys), (case.values, before.values)):
        old[1, where] = cache[1, where]
        assert same_bits(cache, old)


def test_rope_append_gives_a_row_the_same_bits_in_any_chunk(cuda_ops: Any) -> None:
    case = make_case(128, 2, 4, [200])
    rows = torch.randn(60, case.qkv.shape[1], dtype=torch.bfloat16, device="cuda")
    whole, qkv, pieces = case.copy(), rows.clone(), rows.clone()
    cuda_ops.rope_append(qkv, *whole.rope, whole.keys, whole.values, 0, 70)
    for at in range(0, 60, 7):
        part = pieces[at : at + 7]
        cuda_ops.rope_append(part, *case.rope, case.keys, case.values, 0, 70 + at)
    assert same_bits(pieces, qkv)
    assert same_bits(case.keys, whole.keys)
    assert same_bits(case.values, whole.values)
