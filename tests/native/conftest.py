import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def use_build(folder: Path) -> None:
    """Puts the library built in `folder` in the place of the installed one."""
    (library,) = folder.glob("_native.*.so")
    spec = importlib.util.spec_from_file_location("worker._native", library)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["worker._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["worker._native"])


# A build with sanitizers, see docs/native.md.
if "SLOTWISE_NATIVE" in os.environ:
    use_build(Path(os.environ["SLOTWISE_NATIVE"]))

from worker import _native  # noqa: E402


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


@pytest.fixture
def gpu_ops() -> Callable[[str], Any]:
    """The operators of the first GPU, on torch's current stream, with a kind of kernels.

    best: this GPU's own where there are any; portable: those of every GPU.
    """
    if not (_native.BUILT_WITH_CUDA and torch.cuda.is_available()):
        pytest.skip("needs an NVIDIA GPU and a build with SLOTWISE_CUDA=ON")
    torch.manual_seed(1234)
    stream = torch.cuda.current_stream().cuda_stream
    return lambda kernels: _native.CudaOps(0, stream, portable=kernels == "portable")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module names the kinds of kernels that all its tests run with."""
    if "cuda_ops" in metafunc.fixturenames:
        kinds = getattr(metafunc.module, "KERNELS", ("best",))
        metafunc.parametrize("cuda_ops", kinds, indirect=True)


@pytest.fixture
def cuda_ops(request: pytest.FixtureRequest, gpu_ops: Callable[[str], Any]) -> Any:
    """The operators with the kind of kernels that is the test's parameter."""
    return gpu_ops(request.param)
