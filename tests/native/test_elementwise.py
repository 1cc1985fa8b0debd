"""RMSNorm, SiLU, and the rotation that appends to the slot cache."""

import pytest
import torch
from tolerances import assert_close

import reference
from worker import _native

WIDTHS = [1, 15, 16, 17, 64, 576, 1000]
EPS = 1e-5


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_equals_the_oracle(
    ops: _native.CpuOps, width: int, generator: torch.Generator
) -> None:
    x, weight = (
        torch.randn(5, width, generator=generator),
        torch.randn(width, generator=generator),
    )
    out = torch.empty(5, width)
    ops.rms_norm(x, weight, EPS, out)
    assert_close(out, reference.rms_norm(x, weight, EPS), "rms_norm")
    ops.rms_norm(x, weight, EPS, x)
    assert torch.equal(x, out)


def test_add_rms_norm_is_an_add_and_a_norm(ops: _native.CpuOps, generator: torch.Generator) -> None:
    residual, delta = torch.randn(2, 40, 100, generator=generator)
    weight, out, wanted = torch.randn(100, generator=generator), *torch.empty(2, 40, 100)
    total = residual + delta
    ops.rms_norm(total, weight, EPS, wanted)
    ops.add_rms_norm(residual, delta, weight, EPS, out)
    assert torch.equal(residual, total)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul_equals_the_oracle(
    ops: _native.CpuOps, width: int, generator: torch.Generator
) -> None:
    gate_up = torch.randn(6, 2 * width, generator=generator) * 20
    out = torch.empty(6, width)
    ops.silu_mul(gate_up, out)
    assert_close(out, reference.silu_mul(gate_up), "silu_mul")


def test_silu_at_the_ends(ops: _native.CpuOps) -> None:
    gate = torch.tensor([-1e30, -200.0, -100.0, -0.0, 100.0, 1e30, torch.nan, torch.inf])
    out = torch.empty(1, 8)
    ops.silu_mul(torch.cat([gate, torch.ones(8)])[None], out)
    assert out[0, :2].tolist() == [0, 0]
    assert abs(out[0, 2].item()) < 1e-37
    assert out[0, 3:6].tolist() == [0, 100, torch.tensor(1e30).item()]
    assert out[0, 6].isnan()
    assert out[0, 7] == torch.inf


def test_rows_do_not_depend_on_each_other(
    ops: _native.CpuOps, lone_ops: _native.CpuOps, generator: torch.Generator
) -> None:
    x, weight = (
        torch.randn(64, 200, generator=generator),
        torch.randn(200, generator=generator),
    )
    order = torch.randperm(64, generator=generator)
    half = torch.empty(64, 100)
    lone_half, normed, lone_normed = torch.empty(1, 100), torch.empty(64, 200), torch.empty(1, 200)
    ops.rms_norm(x[order], weight, EPS, normed)
    ops.silu_mul(x[order], half)
    for place, row in enumerate(order):
        lone_ops.rms_norm(x[row : row + 1], weight, EPS, lone_normed)
        lone_ops.silu_mul(x[row : row + 1], lone_half)
        assert torch.equal(normed[place], lone_normed[0])
        assert torch.equal(half[place], lone_half[0])


def test_columns_at_the_end_have_the_arithmetic_of_the_others(ops: _native.CpuOps) -> None:
    # 17 equal columns: the last is computed as a part of a vector.
    gate_up = torch.full((1, 34), 1.2345)
    out = torch.empty(1, 17)
    ops.silu_mul(gate_up, out)
    assert (out == out[0, 0]).all()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "group"), [(64, 3, 3), (2, 1, 1), (80, 2, 4), (128, 1, 8), (256, 1, 1)]
)
def test_rope_append_equals_the_oracle(
    ops: _native.CpuOps,
    head_dim: int,
    kv_heads: int,
    group: int,
    dtype: torch.dtype,
    normed: bool,
    generator: torch.Generator,
) -> None:
    rows, q_heads = 7, kv_heads * group
    qkv = torch.randn(rows, (q_heads + 2 * kv_heads) * head_dim, generator=generator)
    heads = qkv.view(rows, -1, head_dim).clone()
    norms = torch.randn(2, head_dim, generator=generator)
    cos, sin = reference.rope_tables(50, head_dim)
    slots = torch.tensor([2, 0, 2, 1, 0, 0, 2], dtype=torch.int32)
    positions = torch.tensor([4, 0, 3, 49, 1, 2, 48], dtype=torch.int32)
    keys, values = torch.full((2, 3, 50, kv_heads, head_dim), 7.0, dtype=dtype)
    q_norm, k_norm = norms if normed else (None, None)
    ops.rope_append(qkv, q_norm, k_norm, EPS, cos, sin, slots, positions, keys, values)

    q, k, v = torch.split(heads, [q_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = reference.rms_norm(q, q_norm, EPS), reference.rms_norm(k, k_norm, EPS)
    places = positions.long()
    got = qkv.view(rows, -1, head_dim)
    assert_close(got[:, :q_heads], reference.rotate(q, cos[places], sin[places]), "rope")
    wanted = reference.rotate(k, cos[places], sin[places])
    name = "rope" if dtype == torch.float32 else "kv_bfloat16"
    assert_close(keys[slots.long(), places], wanted, name)
    assert torch.equal(values[slots.long(), places], v.to(dtype))
    untouched = torch.ones(3, 50, dtype=torch.bool)
    untouched[slots.long(), places] = False
    assert (keys[untouched] == 7).all()
    assert (values[untouched] == 7).all()


def test_bfloat16_cache_rounds_to_nearest_even(ops: _native.CpuOps) -> None:
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.3895e38, torch.inf, torch.nan, -1e-40, 0.1])
    qkv = torch.zeros(1, 24)
    qkv[0, 16:23] = values
    keys, stored = torch.zeros(2, 1, 1, 1, 8, dtype=torch.bfloat16)
    zero = torch.zeros(1, dtype=torch.int32)
    cos, sin = torch.ones(1, 4), torch.zeros(1, 4)
    ops.rope_append(qkv, None, None, 0.0, cos, sin, zero, zero, keys, stored)
    assert torch.equal(stored[0, 0, 0, :7].isnan(), values.isnan())
    assert torch.equal(stored[0, 0, 0, :7].nan_to_num(), values.bfloat16().nan_to_num())
