"""Attention of a chunk on the GPU: against float64, and the promise of equal bits."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
KERNELS = ("best", "portable")

SLOTS = 3
SLOT = 1
# The relative error of a row and head: the output's rounding, and that of the weights.
ERRORS = {torch.bfloat16: 5e-3, torch.float16: 7e-4, torch.float32: 1e-5}
SHAPES = [(64, 3, 1), (64, 1, 5), (96, 2, 4), (96, 1, 7), (128, 1, 1), (128, 2, 4), (128, 1, 7)]
SHAPES += [(128, 1, 5), (128, 2, 8), (256, 1, 2), (256, 2, 4)]
LONG_SHAPES = [(64, 2, 1), (64, 1, 7), (64, 8, 4), (128, 2, 1), (128, 4, 2), (128, 8, 4)]
LONG_SHAPES += [(128, 1, 7), (128, 2, 8)]
# Around the borders of tiles and of pairs of tiles. From the longest on, 256 rows or more apart:
# what lies past a chunk is NaN.
LONG_STARTS = [20_001, 16_384, 16_127, 15_871, 4_224, 1_023, 512, 255]


@dataclass(frozen=True, slots=True)
class Case:
    """The first `length` positions of one slot; whatever else the caches hold is NaN."""

    group: int
    qkv: Tensor  # [length, (H_q + 2 H_kv) D], K and V of it are NaN: they come from the cache
    keys: Tensor  # [S, P, H_kv, D]
    values: Tensor

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def run(self, ops: Any, start: int, end: int) -> Tensor:
        """out [end - start, H_q D] of the rows at positions [start, end)."""
        columns = self.group * self.keys.shape[2] * self.head_dim
        out = torch.full((end - start, columns), torch.nan, dtype=self.qkv.dtype, device="cuda")
        qkv = self.qkv[start:end].contiguous()
        ops.prefill_attention(qkv, self.keys, self.values, SLOT, start, self.scale, out)
        return out

    def ended(self, end: int) -> "Case":
        """With NaN in the slot from position `end` on."""
        keys, values = (torch.empty_like(x).copy_(x) for x in self.caches)
        keys[SLOT, end:] = values[SLOT, end:] = torch.nan
        return Case(self.group, self.qkv, keys, values)

    def run_placed(self, ops: Any, start: int, end: int, room: int) -> Tensor:
        """The same for a launch of `room` rows that finds its chunk on the device: out [room, ...].

        The rows past the chunk's are NaN in q, and must stay so in out.
        """
        columns = self.group * self.keys.shape[2] * self.head_dim
        qkv = torch.full_like(self.qkv[:1], torch.nan).repeat(room, 1)
        qkv[: end - start] = self.qkv[start:end]
        out = torch.full_like(qkv[:, :columns], torch.nan).contiguous()
        place = torch.tensor([SLOT, start, end - start], dtype=torch.int32, device="cuda")
        ops.prefill_attention(qkv, self.keys, self.values, 0, 0, self.scale, out, place)
        return out

    def in_chunks(self, ops: Any, start: int, end: int, chunk: int) -> Tensor:
        cuts = [*range(start, end, chunk), end]
        return torch.cat([self.run(ops, *cut) for cut in itertools.pairwise(cuts)])

    def error(self, out: Tensor, start: int) -> float:
        """The largest relative error of a row and head of the rows from `start` on."""
        rows, end = out.shape[0], start + out.shape[0]
        q = self.qkv[start:end].view(rows, -1, self.head_dim)[:, : -2 * self.keys.shape[2]]
        k, v = (x[SLOT, :end].double().repeat_interleave(self.group, 1) for x in self.caches)
        scores = torch.einsum("thd,phd->htp", q.double(), k) * self.scale
        positions = torch.arange(end, device="cuda")
        scores.masked_fill_(positions > positions[start:, None], -torch.inf)
        wanted = torch.einsum("htp,phd->thd", scores.softmax(-1), v)
        got = out.view(rows, -1, self.head_dim).double()
        return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


def make_case(
    shape: tuple[int, int, int],
    length: int,
    dtype: torch.dtype = torch.bfloat16,
    heads_first: bool = True,
    room: int = 40,
) -> Case:
    """shape: D, H_kv and G. Queries long enough that the weights differ much."""
    head_dim, kv_heads, group = shape
    free: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
    places = [length + room, kv_heads]
    keys, values = (
        torch.full((SLOTS, *(places[::-1] if heads_first else places), head_dim), torch.nan, **free)
        for _ in range(2)
    )
    if heads_first:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    for cache in (keys, values):
        cache[SLOT, :length] = torch.randn(length, kv_heads, head_dim, **free)
    qkv = torch.full((length, (group + 2) * kv_heads * head_dim), torch.nan, **free)
    columns = group * kv_heads * head_dim
    qkv[:, :columns] = torch.randn(length, columns, **free) * 2
    return Case(group, qkv, keys, values)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_length(cuda_ops: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for length in (1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000):
        case = make_case(shape, length, dtype)
        assert case.error(case.run(cuda_ops, 0, length), 0) < ERRORS[dtype], length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_anywhere(cuda_ops: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = make_case(shape, 1200, dtype, heads_first=False)
    for start, end in ((1, 2), (37, 200), (127, 128), (128, 129), (99, 640), (1023, 1200)):
        out = case.run(cuda_ops, start, end)
        assert case.error(out, start) < ERRORS[dtype], (start, end)


@pytest.mark.parametrize("shape", [(64, 2, 3), (96, 1, 4), (128, 2, 4), (256, 1, 2)])
@pytest.mark.parametrize(("start", "rows"), [(4000, 5), (4001, 130), (32000, 5)])
def test_long_contexts(cuda_ops: Any, shape: tuple[int, int, int], start: int, rows: int) -> None:
    case = make_case(shape, start + rows)
    assert case.error(case.run(cuda_ops, start, start + rows), start) < ERRORS[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_chunks_give_the_same_bits(
    cuda_ops: Any, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    length = 420
    case = make_case(shape, length, dtype)
    whole = case.run(cuda_ops, 0, length)
    assert not whole.isnan().any()
    for chunk in (1, 5, 17, 64, 100, 128, 300):
        assert same_bits(case.in_chunks(cuda_ops, 0, length, chunk), whole), chunk


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_many_rows_give_the_bits_of_few(cuda_ops: Any, head_dim: int, dtype: torch.dtype) -> None:
    # Many make the blocks as large as they get; few share the tiles among blocks, on Hopper.
    start, length = 1111, 3500
    case = make_case((head_dim, 8, 4), length, dtype)
    whole = case.run(cuda_ops, start, length)
    for chunk in (7, 20, 120):
        assert same_bits(case.in_chunks(cuda_ops, start, length, chunk), whole), chunk
    assert case.error(whole[-30:], length - 30) < ERRORS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", LONG_SHAPES)
def test_few_rows_after_a_long_prefix(
    gpu_ops: Callable[[str], Any], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    # On Hopper their tiles are split over clusters, of a size that depends on rows and heads.
    best, portable = gpu_ops("best"), gpu_ops("portable")
    case = make_case(shape, 20_300, dtype)
    for start, rows in itertools.product(LONG_STARTS, (256, 200, 129, 128, 100, 64, 33, 16, 1)):
        end = start + rows
        for cache in case.caches:
            cache[SLOT, end:] = torch.nan
        assert same_bits(case.run(best, start, end), case.run(portable, start, end)), (start, rows)
    case = make_case(shape, 16_500, dtype)
    assert case.error(case.run(best, 16_250, 16_500), 16_250) < ERRORS[dtype]


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("shape", [*SHAPES, (64, 8, 4), (128, 8, 4)])
def test_a_chunk_found_on_the_device(
    cuda_ops: Any, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """What a launch is given does not depend on the chunk: it can be captured. Same bits."""
    case = make_case(shape, 1300, dtype)
    for start, room in itertools.product((1170, 1023, 255, 128, 127, 1, 0), (128, 16)):
        for rows in (room, room - 1, 2 * room // 3, 1, 0):
            ended = case.ended(start + rows)
            out = ended.run_placed(cuda_ops, start, start + rows, room)
            assert out[rows:].isnan().all(), (start, room, rows)
            wanted = ended.run(cuda_ops, start, start + rows)
            assert same_bits(out[:rows], wanted), (start, room, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", LONG_SHAPES)
def test_a_chunk_found_on_the_device_after_a_long_prefix(
    cuda_ops: Any, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    case = make_case(shape, 20_300, dtype)
    for start, room in itertools.product(LONG_STARTS, (256, 128, 16)):
        for rows in (room, room // 2, 1):
            end = start + rows
            ended = case.ended(end)
            out = ended.run_placed(cuda_ops, start, end, room)[:rows]
            assert same_bits(out, ended.run(cuda_ops, start, end)), (start, room, rows)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_layout_and_neighbours_do_not_matter(cuda_ops: Any, head_dim: int) -> None:
    case = make_case((head_dim, 2, 4), 300)
    other = Case(case.group, case.qkv, *(x.contiguous().nan_to_num(1e4) for x in case.caches))
    assert other.keys.stride() != case.keys.stride()
    for start in (0, 130, 299):
        assert same_bits(case.run(cuda_ops, start, 300), other.run(cuda_ops, start, 300))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_what_lies_past_the_chunk_is_not_read(cuda_ops: Any, head_dim: int) -> None:
    case = make_case((head_dim, 2, 4), 400)
    whole = case.run(cuda_ops, 0, 400)
    for end in (399, 200, 128, 3):
        for cache in case.caches:
            cache[SLOT, end:] = torch.nan
        assert same_bits(case.run(cuda_ops, 0, end), whole[:end]), end
