"""The thread pool: any number of threads, short tasks, several callers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from worker import _native


def product(ops: _native.CpuOps, x: Tensor, weight: _native.PackedWeight) -> Tensor:
    out = torch.full((len(x), weight.num_rows), torch.nan)
    ops.linear(x, weight, out)
    return out


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_every_task_is_done_once_whatever_the_threads(
    num_threads: int, generator: torch.Generator
) -> None:
    weight = torch.randn(1000, 64, generator=generator)
    x = torch.randn(3, 64, generator=generator)
    one = _native.CpuOps(1)
    wanted = product(one, x, one.pack(weight))
    ops = _native.CpuOps(num_threads)
    packed = ops.pack(weight)
    for _ in range(300):
        assert torch.equal(product(ops, x, packed), wanted)


def test_several_callers_of_one_object(generator: torch.Generator) -> None:
    ops = _native.CpuOps(2)
    weight = ops.pack(torch.randn(500, 64, generator=generator))
    inputs = torch.randn(4, 5, 64, generator=generator)
    wanted = [product(ops, x, weight) for x in inputs]

    def repeat(index: int) -> bool:
        return all(
            torch.equal(product(ops, inputs[index], weight), wanted[index]) for _ in range(200)
        )

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(repeat, range(4)))


def test_pools_come_and_go() -> None:
    weight = torch.ones(200, 8)
    for _ in range(50):
        ops = _native.CpuOps(3)
        assert (product(ops, torch.ones(1, 8), ops.pack(weight)) == 8).all()
