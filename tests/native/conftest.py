import pytest
import torch

from worker import _native


def runnable_isas() -> list[str]:
    """The instruction sets that this CPU runs, best first."""
    runnable = []
    for isa in ("avx512", "avx2", "portable"):
        try:
            runnable.append(_native.CpuOps(1, isa).isa)
        except ValueError:
            continue
    return runnable


@pytest.fixture(scope="session", params=runnable_isas())
def ops(request: pytest.FixtureRequest) -> _native.CpuOps:
    """Two threads, each instruction set in turn."""
    return _native.CpuOps(2, request.param)


@pytest.fixture(scope="session")
def lone_ops(ops: _native.CpuOps) -> _native.CpuOps:
    """One thread, the instruction set of `ops`."""
    return _native.CpuOps(1, ops.isa)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1234)
