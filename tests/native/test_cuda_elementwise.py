"""Embedding, norm, silu and bias on the GPU: against float64, and the same bits at any size."""

from typing import Any

import pytest
import torch
from tolerances import tolerance
from torch import Tensor

import reference

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Half a unit in the last place: relative, and of the smallest numbers.
ROUNDING = {
    torch.bfloat16: (2**-8, 0.0),
    torch.float16: (2**-11, 2**-25),
    torch.float32: (0.0, 0.0),
}
# In whole vectors and not, one or more to a thread.
WIDTHS = [1, 8, 130, 1001, 1024, 4096, 5120, 8192, 9002, 20480]
EPS = 1e-6


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(1234)


def assert_rounded(got: Tensor, wanted: Tensor, name: str) -> None:
    """got is wanted (float64) within the tolerance called `name`, then rounded to its type."""
    allowed, (relative, smallest) = tolerance(name), ROUNDING[got.dtype]
    bound = allowed.absolute + smallest + (allowed.relative + relative) * wanted.abs()
    worst = ((got.double() - wanted).abs() / bound).max()
    assert worst <= 1, f"{worst} times the bound"


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def shifted(x: Tensor) -> Tensor:
    """The same values, one element past a border of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def random(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device="cuda")


def norm(ops: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    out = poisoned(*x.shape, dtype=dtype)
    ops.rms_norm(x, weight, EPS, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_equals_the_oracle(
    cuda_ops: Any, dtype: torch.dtype, width: int, generator: torch.Generator
) -> None:
    x, weight = random(5, width, generator=generator), random(width, generator=generator)
    x *= torch.tensor([1, 1e-3, 100, 0, 3], device="cuda")[:, None]
    wanted = reference.rms_norm(x.double(), weight.double(), EPS)
    assert_rounded(norm(cuda_ops, x, weight, dtype), wanted, "rms_norm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_and_norm_is_an_add_and_a_norm(
    cuda_ops: Any, dtype: torch.dtype, width: int, generator: torch.Generator
) -> None:
    residual, weight = random(9, width, generator=generator), random(width, generator=generator)
    delta = random(9, width, generator=generator).to(dtype)
    total, out = residual + delta.float(), poisoned(9, width, dtype=dtype)
    cuda_ops.add_rms_norm(residual, delta, weight, EPS, out)
    assert torch.equal(residual, total)
    assert torch.equal(out, norm(cuda_ops, total, weight, dtype))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_norm_among_any_rows(
    cuda_ops: Any, width: int, generator: torch.Generator
) -> None:
    x, weight = random(400, width, generator=generator), random(width, generator=generator)
    together = norm(cuda_ops, x, weight, torch.float32)
    for first, last in [(0, 1), (7, 8), (399, 400), (3, 20), (100, 356)]:
        rows = norm(cuda_ops, x[first:last].contiguous(), weight, torch.float32)
        assert torch.equal(rows, together[first:last])
    assert torch.equal(norm(cuda_ops, shifted(x), shifted(weight), torch.float32), together)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (3, 7), (1, 3072), (8, 12288), (700, 1000)])
def test_silu_equals_the_oracle(
    cuda_ops: Any, dtype: torch.dtype, rows: int, inner: int, generator: torch.Generator
) -> None:
    gate_up = (random(rows, inner, 2, generator=generator) * 5).to(dtype)
    out = poisoned(rows, inner, dtype=dtype)
    cuda_ops.silu_mul(gate_up.view(rows, -1), out)
    halves = torch.cat([gate_up[..., 0], gate_up[..., 1]], 1).double()
    assert_rounded(out, reference.silu_mul(halves), "silu_mul")
    alone = poisoned(rows, inner, dtype=dtype)
    for row in range(0, rows, 97):
        cuda_ops.silu_mul(shifted(gate_up[row]).view(1, -1), alone[row : row + 1])
        assert torch.equal(alone[row], out[row])


def test_silu_at_the_ends(cuda_ops: Any) -> None:
    gate = torch.tensor([-1e30, -200.0, -100.0, -0.0, 100.0, 1e30, torch.nan, torch.inf])
    out = poisoned(1, 8, dtype=torch.float32)
    cuda_ops.silu_mul(torch.stack([gate, torch.ones(8)], 1).view(1, 16).cuda(), out)
    assert out[0, :2].tolist() == [0, 0]
    assert abs(out[0, 2].item()) < 1e-37
    assert out[0, 3:6].tolist() == [0, 100, torch.tensor(1e30).item()]
    assert out[0, 6].isnan()
    assert out[0, 7] == torch.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_bias_is_added_in_float32(
    cuda_ops: Any, dtype: torch.dtype, width: int, generator: torch.Generator
) -> None:
    x = random(11, width, generator=generator).to(dtype)
    bias = random(width, generator=generator)
    wanted = (x.float() + bias).to(dtype)
    cuda_ops.add_bias(x, bias)
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("first_id", [0, 100])
def test_embedding_copies_rows(
    cuda_ops: Any, dtype: torch.dtype, width: int, first_id: int, generator: torch.Generator
) -> None:
    weight = random(50, width, generator=generator).to(dtype)
    ids = torch.tensor([0, 49, 50, -1, 7, 7, 99, 100, 149, 150, 2**31 - 1], dtype=torch.int32)
    out = poisoned(len(ids), width, dtype=torch.float32)
    cuda_ops.embed(ids.cuda(), weight, first_id, out)
    for row, token in zip(out, ids.tolist(), strict=True):
        known = 0 <= token - first_id < 50
        assert torch.equal(row, weight[token - first_id].float() if known else row.new_zeros(width))


def test_no_rows_are_no_work(cuda_ops: Any) -> None:
    none, weight = torch.zeros(0, 16, device="cuda"), torch.ones(16, device="cuda")
    cuda_ops.embed(torch.zeros(0, dtype=torch.int32, device="cuda"), weight[None], 0, none)
    cuda_ops.rms_norm(none, weight, EPS, none.clone())
    cuda_ops.silu_mul(none, torch.zeros(0, 8, device="cuda"))
    cuda_ops.add_bias(none, weight)
    torch.cuda.synchronize()
    assert torch.equal(weight, torch.ones_like(weight))
