"""The matrix products on the GPU: the bits of the library's product without split-K."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from worker import _native

pytestmark = pytest.mark.gpu

ROW_COUNTS = [1, 2, 3, 7, 8, 9, 16, 17, 24, 31, 32, 33, 48, 63, 64]
# By tiles of 128 rows, two at a time: one, a few, uneven ones, and more than all SMs take at once.
MANY = [65, 129, 511, 768, 2049]
# [N, K] of Qwen3 8B, 0.6B and 8B on two GPUs; then sizes that are cut unevenly.
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
SHAPES += [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
SHAPES += [(3072, 4096), (4096, 2048), (12288, 4096), (4096, 6144)]
SHAPES += [(8, 64), (24, 576), (1000, 64), (1000, 576), (1064, 704), (27000, 640), (76000, 192)]
# Columns that suit one, two or no tiles of 256; the gated ones of the models; long and short K.
# 20,000 are several tiles a block of each width; with K = 64 they come faster than they are stored.
TILED_SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (12288, 4096)]
TILED_SHAPES += [(6144, 1024), (1024, 3072), (16, 64), (272, 128), (1072, 576), (27008, 640)]
TILED_SHAPES += [(20000, 64), (20000, 576)]
HEADS = [(151936, 4096), (151936, 1024), (1000, 576)]
DTYPES = [torch.bfloat16, torch.float16]
GUARD = 64  # columns after out's, of NaN


@pytest.fixture(autouse=True)
def plain_library() -> Iterator[None]:
    """cuBLASLt without split-K and without sums in less than float32."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    matmul = torch.backends.cuda.matmul
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    yield
    torch.backends.cuda.preferred_blas_library(before)
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def library(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K] @ weight [N, K].T, computed with rows and columns that suit the library."""
    rows, n = len(x), len(weight)
    wide = max(256, -(-n // 128) * 128)
    x = torch.cat([x, x.new_zeros(-rows % 128, x.shape[1])])
    if wide != n:
        weight = torch.cat([weight, weight.new_zeros(wide - n, weight.shape[1])])
    y = x @ weight.T if out_dtype is None else torch.mm(x, weight.T, out_dtype=out_dtype)
    return y[:rows, :n]


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int16), right.contiguous().view(torch.int16))


def run(
    ops: Any,
    x: Tensor,
    weight: Tensor,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The product, after a look at what surrounds it."""
    columns = len(weight) // 2 if gated else len(weight)
    guarded = torch.full(
        (len(x) + 1, columns + GUARD), torch.nan, dtype=out_dtype or x.dtype, device="cuda"
    )
    ops.linear(x, weight, guarded[:-1, :columns], gated)
    assert guarded[-1].isnan().all()
    assert guarded[:-1, columns:].isnan().all()
    return guarded[:-1, :columns].clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_product_has_the_bits_of_the_library(
    cuda_ops: Any, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    n, k = shape
    weight = random(n, k, dtype=dtype, scale=k**-0.5)
    x = random(max(ROW_COUNTS), k, dtype=dtype)
    wanted = library(x, weight)
    error = (wanted[:2].double() - x[:2].double() @ weight.double().T).norm() / wanted[:2].norm()
    assert error < (3e-3 if dtype == torch.bfloat16 else 4e-4)  # the library itself
    for rows in ROW_COUNTS:
        assert torch.equal(run(cuda_ops, x[:rows], weight), wanted[:rows]), rows
        assert torch.equal(run(cuda_ops, x[-rows:], weight), wanted[-rows:]), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", TILED_SHAPES)
def test_tiles_have_the_bits_of_the_library(
    cuda_ops: Any, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    n, k = shape
    weight = random(n, k, dtype=dtype, scale=4 * k**-0.5)
    x = random(max(MANY), k, dtype=dtype)
    x[3] = -0.0
    wanted = library(x, weight)
    gated = torch.empty(len(x), n // 2, dtype=dtype, device="cuda")
    cuda_ops.silu_mul(wanted.contiguous(), gated)
    for rows in MANY:
        assert same_bits(run(cuda_ops, x[:rows], weight), wanted[:rows]), rows
        assert same_bits(run(cuda_ops, x[-rows:], weight), wanted[-rows:]), rows
        assert same_bits(run(cuda_ops, x[:rows], weight, gated=True), gated[:rows]), rows


def test_tiles_do_not_see_their_neighbours(cuda_ops: Any) -> None:
    weight = random(1072, 576, dtype=torch.bfloat16, scale=576**-0.5)
    x = random(600, 576, dtype=torch.bfloat16)
    wanted = run(cuda_ops, x, weight)
    for kept in (0, 63, 64, 127, 128, 599):
        mixed = torch.full_like(x, torch.nan)
        mixed[kept] = x[kept]
        got = run(cuda_ops, mixed, weight)
        assert torch.equal(got[kept], wanted[kept]), kept
        assert got.isnan().any(1).sum() == len(x) - 1


@pytest.mark.parametrize("shape", HEADS)
def test_logits_are_not_rounded(cuda_ops: Any, shape: tuple[int, int]) -> None:
    n, k = shape
    weight = random(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    x = random(max(ROW_COUNTS), k, dtype=torch.bfloat16)
    wanted = library(x, weight, torch.float32)
    assert not torch.equal(wanted, wanted.bfloat16().float())
    for rows in ROW_COUNTS:
        got = run(cuda_ops, x[:rows], weight, out_dtype=torch.float32)
        assert torch.equal(got, wanted[:rows]), rows
    assert torch.equal(run(cuda_ops, x, weight), wanted.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(24576, 4096), (6144, 1024), (16, 64), (1048, 576)])
def test_gated_product_is_silu_mul_of_the_rounded_one(
    cuda_ops: Any, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    n, k = shape
    weight = random(n, k, dtype=dtype, scale=4 * k**-0.5)
    for rows in ROW_COUNTS:
        x = random(rows, k, dtype=dtype)
        product = run(cuda_ops, x, weight)
        wanted = torch.full((rows, n // 2), torch.nan, dtype=dtype, device="cuda")
        cuda_ops.silu_mul(product, wanted)
        assert torch.equal(run(cuda_ops, x, weight, gated=True), wanted), rows
        gate, up = product[:, ::2].double(), product[:, 1::2].double()
        exact = gate / (1 + torch.exp(-gate)) * up
        assert (wanted.double() - exact).norm() / exact.norm() < 3e-3


@pytest.mark.parametrize("shape", [(4096, 4096), (1024, 3072), (1000, 576)])
def test_row_does_not_see_its_neighbours(cuda_ops: Any, shape: tuple[int, int]) -> None:
    n, k = shape
    weight = random(n, k, dtype=torch.bfloat16, scale=k**-0.5)
    x = random(64, k, dtype=torch.bfloat16)
    alone = torch.cat([run(cuda_ops, row[None], weight) for row in x])
    order = torch.randperm(64, device="cuda")
    assert torch.equal(run(cuda_ops, x[order], weight), alone[order])
    for rows in (2, 8, 9, 16, 17, 32, 33, 64):
        for kept in {0, 1, rows - 1}:
            mixed = torch.full_like(x[:rows], torch.nan)
            mixed[kept] = x[kept]
            got = run(cuda_ops, mixed, weight)
            assert torch.equal(got[kept], alone[kept])
            assert got.isnan().any(1).sum() == rows - 1


@pytest.mark.parametrize("gap", [8, 72])
def test_rows_may_lie_apart(cuda_ops: Any, gap: int) -> None:
    n, k = 1008, 576
    weight = torch.full((n, k + gap), torch.nan, dtype=torch.bfloat16, device="cuda")
    weight[:, :k] = random(n, k, dtype=torch.bfloat16)
    for rows in (3, 12, 20, 40, 64, 300):
        x = torch.full((rows, k + gap), torch.nan, dtype=torch.bfloat16, device="cuda")
        x[:, :k] = random(rows, k, dtype=torch.bfloat16)
        wanted = library(x[:, :k].contiguous(), weight[:, :k].contiguous())
        assert torch.equal(run(cuda_ops, x[:, :k], weight[:, :k]), wanted)


def test_row_alone_may_have_any_stride(cuda_ops: Any) -> None:
    weight = random(1008, 576, dtype=torch.bfloat16)
    x = random(2, 577, dtype=torch.bfloat16)[:1, :576]
    assert torch.equal(run(cuda_ops, x, weight), library(x, weight))


def test_tiles_reach_beyond_2_31_values(cuda_ops: Any) -> None:
    rows, n, k = 300, 1008, 576
    wide = torch.empty(rows, 1 << 23, dtype=torch.bfloat16, device="cuda")  # 5 GB, hardly touched
    weight = random(n, k, dtype=torch.bfloat16)
    x, out = wide[:, :k], wide[:, k : k + n]
    x.copy_(random(rows, k, dtype=torch.bfloat16))
    cuda_ops.linear(x, weight, out)
    equal = torch.equal(out, library(x.contiguous(), weight))
    del wide, x, out
    torch.cuda.empty_cache()
    assert equal


@pytest.mark.parametrize("rows", [5, 20, 50])
def test_weight_may_start_inside_another(cuda_ops: Any, rows: int) -> None:
    weight = random(3000, 1024, dtype=torch.bfloat16)
    x = random(rows, 1024, dtype=torch.bfloat16)
    whole = run(cuda_ops, x, weight)
    assert torch.equal(run(cuda_ops, x, weight[1001:2009]), whole[:, 1001:2009])


@pytest.mark.parametrize("rows", [8, 20, 64, 600])
def test_products_in_a_graph_wait_for_each_other(cuda_ops: Any, rows: int) -> None:
    """Each product reads what the one before it wrote, and writes what the next but one reads."""
    widths = [1024, 3072, 1024, 4096, 1024, 1024, 24576, 1024] * 6
    weights = [
        random(n, k, dtype=torch.bfloat16, scale=k**-0.5)
        for k, n in zip([1024, *widths[:-1]], widths, strict=True)
    ]
    buffers = [
        torch.empty(rows, max(widths), dtype=torch.bfloat16, device="cuda") for _ in range(2)
    ]

    def chain(ops: Any, *, apart: bool) -> Tensor:
        x = buffers[0][:, :1024]
        for i, weight in enumerate(weights):
            out = buffers[(i + 1) % 2][:, : len(weight)]
            ops.linear(x, weight, out)
            x = out
            if apart:
                torch.cuda.synchronize()
        return x

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = chain(_native.CudaOps(0, torch.cuda.current_stream().cuda_stream), apart=False)
    for _ in range(5):
        start = random(rows, 1024, dtype=torch.bfloat16)
        buffers[0].fill_(torch.nan)[:, :1024] = start
        wanted = chain(cuda_ops, apart=True).clone()
        assert not wanted.isnan().any()
        for _ in range(20):
            buffers[1].fill_(torch.nan)
            buffers[0].fill_(torch.nan)[:, :1024] = start
            graph.replay()
            assert torch.equal(last, wanted)


def test_sizes_it_does_not_take(cuda_ops: Any) -> None:
    weight = random(64, 128, dtype=torch.bfloat16)
    assert cuda_ops.linear_supported(64, weight)
    assert cuda_ops.linear_supported(65, weight)
    assert not cuda_ops.linear_supported(1, weight[:12])
    assert cuda_ops.linear_supported(64, weight[:24])
    assert not cuda_ops.linear_supported(65, weight[:24])
    assert not cuda_ops.linear_supported(1, weight[:, :96])
    assert not cuda_ops.linear_supported(1, weight.float())
    x = random(65, 128, dtype=torch.bfloat16)
    assert run(cuda_ops, x[:0], weight).shape == (0, 64)
    with pytest.raises(ValueError, match="linear_supported"):
        run(cuda_ops, x, weight[:24])
    with pytest.raises(ValueError, match="at most 64 rows where out is float32, got 65"):
        run(cuda_ops, x, weight, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="out with rows at multiples of 16 bytes"):
        cuda_ops.linear(x, weight, torch.empty(65, 68, dtype=x.dtype, device="cuda")[:, 2:66])


def test_tiles_are_used_where_they_fill_the_device(cuda_ops: Any) -> None:
    wide = torch.empty(24576, 64, dtype=torch.bfloat16, device="cuda")
    assert [cuda_ops.linear_fills(rows, wide) for rows in (65, 128, 512, 2024, 8192)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert not cuda_ops.linear_fills(512, wide.float())
    portable = _native.CudaOps(0, torch.cuda.current_stream().cuda_stream, portable=True)
    assert not portable.linear_fills(8192, wide)
    assert not portable.linear_supported(8192, wide)
