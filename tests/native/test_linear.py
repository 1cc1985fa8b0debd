"""Packed weights, matrix products and embeddings."""

import pytest
import torch
from tolerances import assert_close
from torch import Tensor

import reference
from worker import _native

ROW_COUNTS = [*range(1, 18), 64]
SHAPES = [(1, 1), (31, 7), (32, 64), (33, 100), (70, 576), (96, 1536)]
DTYPES = [torch.float32, torch.bfloat16]


def run(ops: _native.CpuOps, x: Tensor, weight: _native.PackedWeight) -> Tensor:
    out = torch.full((len(x), weight.num_rows), torch.nan)
    ops.linear(x, weight, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_product_equals_the_oracle(
    ops: _native.CpuOps, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight = torch.randn(shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator)
    x = torch.randn(9, shape[1], generator=generator)
    assert_close(run(ops, x, ops.pack(weight)), reference.linear(x, weight), "linear")
    biased = run(ops, x, ops.pack(weight, bias))
    assert_close(biased, reference.linear(x, weight, bias), "linear")


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_has_the_same_bits_at_any_number_of_rows(
    ops: _native.CpuOps,
    lone_ops: _native.CpuOps,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    weight = ops.pack(torch.randn(200, 300, generator=generator).to(dtype))
    x = torch.randn(max(ROW_COUNTS), 300, generator=generator)
    alone = torch.cat([run(lone_ops, row[None], weight) for row in x])
    for count in ROW_COUNTS:
        for first in (0, len(x) - count):
            part = slice(first, first + count)
            assert torch.equal(run(ops, x[part], weight), alone[part]), count
            assert torch.equal(run(lone_ops, x[part], weight), alone[part]), count
    order = torch.randperm(len(x), generator=generator)
    assert torch.equal(run(ops, x[order], weight), alone[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(
    ops: _native.CpuOps, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight = ops.pack(torch.randn(40, 50, generator=generator).to(dtype))
    x = torch.randn(9, 50, generator=generator)
    clean = run(ops, x, weight)
    x[4, 7] = torch.nan
    spoilt = run(ops, x, weight)
    assert spoilt[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(spoilt[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_instruction_sets_agree(dtype: torch.dtype, generator: torch.Generator) -> None:
    try:
        both = [_native.CpuOps(1, isa) for isa in ("avx512", "avx2")]
    except ValueError:
        pytest.skip("this CPU has not both")
    weight = torch.randn(70, 576, generator=generator).to(dtype)
    x = torch.randn(11, 576, generator=generator)
    first, second = (run(ops, x, ops.pack(weight)) for ops in both)
    assert torch.equal(first, second)


def test_only_the_rows_and_columns_of_out_are_written(
    ops: _native.CpuOps, generator: torch.Generator
) -> None:
    weight = ops.pack(torch.randn(33, 20, generator=generator))
    wide = torch.full((7, 50), 7.0)
    ops.linear(torch.randn(5, 20, generator=generator), weight, wide[1:6, 4:37])
    assert (wide[[0, 6]] == 7).all()
    assert (wide[:, :4] == 7).all()
    assert (wide[:, 37:] == 7).all()
    assert (wide[1:6, 4:37] != 7).all()


def test_strided_input_and_bias(ops: _native.CpuOps, generator: torch.Generator) -> None:
    weight = torch.randn(40, 60, generator=generator)[:, 10:50]
    bias = torch.randn(80, generator=generator)
    x = torch.randn(6, 90, generator=generator)[::2, 5:45]
    got = run(ops, x, ops.pack(weight, bias[:40]))
    assert_close(got, reference.linear(x, weight, bias[:40]), "linear")


def test_no_rows(ops: _native.CpuOps) -> None:
    assert run(ops, torch.zeros(0, 4), ops.pack(torch.ones(3, 4))).shape == (0, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_reads_exact_rows(
    ops: _native.CpuOps, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight = torch.randn(70, 33, generator=generator).to(dtype)
    ids = torch.tensor([105, 100, 131, 132, 169, 115, 116], dtype=torch.int32)
    out = torch.empty(len(ids), 33)
    ops.embed(ids, ops.pack(weight), 100, out)
    assert torch.equal(out, weight[ids.long() - 100].float())


def test_embedding_outside_its_share_is_zero(ops: _native.CpuOps) -> None:
    ids = torch.tensor([9, 10, 12, 13, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    out = torch.full((len(ids), 4), torch.nan)
    ops.embed(ids, ops.pack(torch.ones(3, 4)), 10, out)
    assert torch.equal(out, torch.tensor([0.0, 1, 1, 0, 0, 0, 0])[:, None].expand(7, 4))


@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_packed_weight_tells_what_it_is(dtype: torch.dtype, bytes_each: int) -> None:
    weight = _native.CpuOps(1).pack(torch.ones(40, 8, dtype=dtype))
    assert (weight.num_rows, weight.num_cols) == (40, 8)
    assert weight.dtype == str(dtype).removeprefix("torch.")
    assert weight.num_bytes == 64 * 8 * bytes_each + 64 * 4
