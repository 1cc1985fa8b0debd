"""Times of the matrix product of few rows: python tests/native/bench_cuda_linear.py [--rows 8].

Each shape alone (a graph of many launches, weights in turn so that none is in L2) and as the chain
of a model's layers, where each product waits for the one before.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from worker import _native
from worker.cuda_backend import fix_arithmetic
from worker.gpu_timer import GpuTimer, Launch

COPY_RATE = 4.19e12  # bytes a second that a device-to-device copy reads and writes
ROTATED_BYTES = 400e6  # of weights, several times L2
GATE_UP = "gate_up"

Linear = Callable[[Tensor, Tensor, Tensor, bool], None]


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    layers: int
    hidden: int
    heads: int  # H_q D
    qkv: int
    inner: int
    vocab: int = 151936

    def shapes(self) -> dict[str, tuple[int, int]]:
        """[N, K] of each product of a layer, in order, and of the head."""
        shapes = {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.heads),
            GATE_UP: (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }
        return shapes | ({"head": (self.vocab, self.hidden)} if self.vocab else {})


MODELS = [
    Model("8B", 12, 4096, 4096, 6144, 12288),
    Model("8B/2", 12, 4096, 2048, 3072, 6144, 0),
    Model("0.6B", 28, 1024, 2048, 4096, 3072),
]


def random(n: int, k: int) -> Tensor:
    return torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5


def native(x: Tensor, weight: Tensor, out: Tensor, gated: bool) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    _native.CudaOps(0, stream).linear(x, weight, out, gated)


def library(x: Tensor, weight: Tensor, out: Tensor, gated: bool) -> None:
    """torch's product; out [T, N] is as wide as the weight, also for a gated one."""
    if out.dtype == torch.float32:
        torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
    else:
        torch.mm(x, weight.T, out=out)


def weights_in_turn(n: int, k: int) -> list[Tensor]:
    return [random(n, k) for _ in range(max(2, round(ROTATED_BYTES / (2 * n * k))))]


def alone(
    timer: GpuTimer, linear: Linear, rows: int, name: str, weights: Sequence[Tensor], gates: bool
) -> float:
    """Microseconds of one product."""
    n, k = weights[0].shape
    gated = gates and name == GATE_UP
    dtype = torch.float32 if name == "head" else torch.bfloat16
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, n // 2 if gated else n, device="cuda", dtype=dtype)
    return timer.measure([partial(linear, x, weight, out, gated) for weight in weights]).median_us


def chain(
    timer: GpuTimer, linear: Linear, rows: int, model: Model, gates: bool
) -> tuple[float, float]:
    """Microseconds of a layer, and bytes of its weights."""
    shapes = {name: shape for name, shape in model.shapes().items() if name != "head"}
    buffers = [
        torch.empty(rows, n, device="cuda", dtype=torch.bfloat16) for n, _ in shapes.values()
    ]
    buffers[-1].normal_()
    inner = torch.empty(rows, model.inner, device="cuda", dtype=torch.bfloat16)
    if not gates:
        inner = buffers[2][:, : model.inner]
    launches: list[Launch] = []
    for _ in range(model.layers):
        qkv, o, gate_up, down = (random(n, k) for n, k in shapes.values())
        launches += [
            partial(linear, buffers[3], qkv, buffers[0], False),
            partial(linear, buffers[0][:, : model.heads], o, buffers[1], False),
            partial(linear, buffers[1], gate_up, inner if gates else buffers[2], gates),
            partial(linear, inner, down, buffers[3], False),
        ]
    one = timer.measure(launches).median_us
    return len(shapes) * one, sum(2 * n * k for n, k in shapes.values())


def line(what: str, us: float, size: float) -> str:
    rate = size / us * 1e6
    return f"{what:24} {us:9.2f} us {rate / 1e12:6.2f} TB/s {rate / COPY_RATE:6.1%}"


def bench_model(timer: GpuTimer, linear: Linear, rows: int, model: Model, gates: bool) -> None:
    for name, (n, k) in model.shapes().items():
        us = alone(timer, linear, rows, name, weights_in_turn(n, k), gates)
        print(line(f"{model.name} {name} {n}x{k}", us, 2 * n * k))
    print(line(f"{model.name} layer", *chain(timer, linear, rows, model, gates)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--library-rows", type=int, nargs="*", default=[128])
    args = parser.parse_args()
    fix_arithmetic()
    timer = GpuTimer(0)
    for model in MODELS:
        for rows in args.rows:
            print(f"-- {rows} rows")
            bench_model(timer, native, rows, model, gates=True)
        for rows in args.library_rows:
            print(f"-- torch.mm, {rows} rows")
            bench_model(timer, library, rows, model, gates=False)


if __name__ == "__main__":
    main()
