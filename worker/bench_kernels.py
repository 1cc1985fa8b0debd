"""`python -m worker bench-kernels`: times of the CUDA operators, beside what the GPU can do.

The roofs are measured first: a copy on the device (bytes read and written) and a large matrix
product. A kernel's share is the time its bytes or its arithmetic would take at these rates, the
longer of the two, over the time it takes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from worker import _native
from worker.errors import CheckpointError
from worker.gpu_timer import GpuTimer, Launch, Timing
from worker.kernel_cases import Bench, Case, keep_bits
from worker.model_config import parse_model_config

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_COPY_BYTES = 1 << 30
_PRODUCT_SIZE = 8192
_NO_GPU = 2


@dataclass(frozen=True, slots=True)
class Roofs:
    """What the device does at best."""

    copy_bytes_per_s: float
    matrix_flops_per_s: float

    def share(self, case: Case, microseconds: float) -> tuple[float, str]:
        """Of the roof that binds, and its name: "copy" or "matrix"."""
        copy = case.num_bytes / self.copy_bytes_per_s
        matrix = case.flops / self.matrix_flops_per_s
        return max(copy, matrix) / microseconds * 1e6, "copy" if copy >= matrix else "matrix"


def main_bench_kernels(arguments: list[str]) -> int:
    """The figures as JSON on stdout; status 2 where there is no GPU to measure."""
    parser = argparse.ArgumentParser(prog="python -m worker bench-kernels")
    parser.add_argument("--config", type=Path, help="config.json of a model; needed for kernels")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bfloat16")
    parser.add_argument("--device", type=int, default=0, help="index of the GPU")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--roofs-only", action="store_true", help="copy and matrix rate alone")
    parsed = parser.parse_args(arguments)
    if min(*parsed.contexts, *parsed.chunks, 1) < 1:
        raise ValueError("--contexts and --chunks start at 1")
    if not (parsed.roofs_only or parsed.config):
        raise ValueError("--config is missing: the config.json whose shapes are measured")
    missing = _missing(need_library=not parsed.roofs_only)
    if missing:
        print(f"worker: {missing}", file=sys.stderr)
        return _NO_GPU
    print(json.dumps(_measure(parsed), indent=2))
    return 0


def _missing(need_library: bool) -> str:
    """Why nothing can be measured here; "" if it can."""
    if not torch.cuda.is_available():
        return "no GPU that torch can use; bench-kernels measures CUDA operators"
    if need_library and not _native.cuda_available():
        return "the native library was built without CUDA; with nvcc on the PATH: make build-gpu"
    return ""


def _measure(parsed: argparse.Namespace) -> dict[str, Any]:
    torch.cuda.set_device(parsed.device)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    keep_bits()
    timer = GpuTimer(parsed.device)
    roofs = _roofs(timer, torch.device("cuda", parsed.device))
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(parsed.device),
        "torch": torch.__version__,
        **asdict(roofs),
    }
    if parsed.roofs_only:
        return report
    with torch.cuda.stream(timer.stream):
        report |= {
            "dtype": parsed.dtype,
            "kernels": measure_cases(_bench(parsed, timer), timer, roofs, parsed.only),
        }
    return report


def _bench(parsed: argparse.Namespace, timer: GpuTimer) -> Bench:
    try:
        config = parse_model_config(json.loads(parsed.config.read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{parsed.config}: {error}") from error
    return Bench(
        config,
        _native.CudaOps(parsed.device, timer.stream.cuda_stream),
        torch.device("cuda", parsed.device),
        _DTYPES[parsed.dtype],
        tuple(parsed.contexts),
        tuple(parsed.chunks),
    )


def _roofs(timer: GpuTimer, device: torch.device) -> Roofs:
    return Roofs(_copy_rate(timer, device), _matrix_rate(timer, device))


def _copy_rate(timer: GpuTimer, device: torch.device) -> float:
    """By a kernel: a memory copy inside a graph may be given to the slower copy engine."""
    source = torch.zeros(_COPY_BYTES // 4, device=device, dtype=torch.int32)
    copy = timer.measure([partial(torch.neg, source, out=torch.empty_like(source))])
    return 2 * _COPY_BYTES / copy.median_us * 1e6


def _matrix_rate(timer: GpuTimer, device: torch.device) -> float:
    """For some ten milliseconds: much longer, and the limit of power lowers the clock."""
    size = (_PRODUCT_SIZE, _PRODUCT_SIZE)
    left, right = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    launch = partial(torch.mm, left, right.T, out=torch.empty_like(left))
    product = timer.measure([launch], at_least=4, seconds=0.03)
    return 2 * _PRODUCT_SIZE**3 / product.median_us * 1e6


def measure_cases(bench: Bench, timer: GpuTimer, roofs: Roofs, only: str) -> list[dict[str, Any]]:
    """A row of figures per case of the kernels whose name contains `only`."""
    return [
        {"kernel": name, **_row(make, timer, roofs)} for name, make in bench.cases() if only in name
    ]


def _row(make: Callable[[], Case], timer: GpuTimer, roofs: Roofs) -> dict[str, Any]:
    try:
        case = make()
    except RuntimeError as error:  # more memory than the device has
        return {"error": _first_line(error)}
    row: dict[str, Any] = {
        "shape": case.shape,
        "bytes": case.num_bytes,
        "flops": case.flops,
        "own": None if case.own is None else _figures(case, case.own, timer, roofs),
        "torch": {},
    }
    for name, launches in case.peers.items():
        row["torch"][name] = _figures(case, launches, timer, roofs)
    return row


def _figures(
    case: Case, launches: Sequence[Launch], timer: GpuTimer, roofs: Roofs
) -> dict[str, Any]:
    try:
        timing: Timing = timer.measure(launches)
    except RuntimeError as error:  # a size an operator does not take
        return {"error": _first_line(error)}
    share, roof = roofs.share(case, timing.median_us)
    return {
        **asdict(timing),
        "bytes_per_s": case.num_bytes / timing.median_us * 1e6,
        "flops_per_s": case.flops / timing.median_us * 1e6,
        "share": share,
        "roof": roof,
    }


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
