"""Times of the matrix product of decode: python tests/native/bench_cuda_linear.py [--rows 8].

Each shape alone (a graph of many launches, weights in turn so that none is in L2) and as the chain
of a model's layers, where each product waits for the one before.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker import _native

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


def seconds_of(graph: torch.cuda.CUDAGraph, replays: int = 9) -> float:
    """The median of `replays` replays, after two."""
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


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


def alone(linear: Linear, rows: int, name: str, weights: Sequence[Tensor], gates: bool) -> float:
    """Seconds of one product."""
    n, k = weights[0].shape
    gated = gates and name == GATE_UP
    dtype = torch.float32 if name == "head" else torch.bfloat16
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, n // 2 if gated else n, device="cuda", dtype=dtype)
    turns = max(1, 30 // len(weights))

    def work() -> None:
        for weight in list(weights) * turns:
            linear(x, weight, out, gated)

    return seconds_of(captured(work)) / (turns * len(weights))


def chain(linear: Linear, rows: int, model: Model, gates: bool) -> tuple[float, float]:
    """Seconds of a layer, and bytes of its weights."""
    shapes = {name: shape for name, shape in model.shapes().items() if name != "head"}
    layers = [[random(n, k) for n, k in shapes.values()] for _ in range(model.layers)]
    buffers = [
        torch.empty(rows, n, device="cuda", dtype=torch.bfloat16) for n, _ in shapes.values()
    ]
    buffers[-1].normal_()
    gated = torch.empty(rows, model.inner, device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        for qkv, o, gate_up, down in layers:
            linear(buffers[3], qkv, buffers[0], False)
            linear(buffers[0][:, : model.heads], o, buffers[1], False)
            linear(buffers[1], gate_up, gated if gates else buffers[2], gates)
            linear(gated if gates else buffers[2][:, : model.inner], down, buffers[3], False)

    seconds = seconds_of(captured(work)) / model.layers
    return seconds, sum(2 * n * k for n, k in shapes.values())


def line(what: str, seconds: float, size: float) -> str:
    rate = size / seconds
    return f"{what:24} {seconds * 1e6:9.2f} us {rate / 1e12:6.2f} TB/s {rate / COPY_RATE:6.1%}"


def bench_model(linear: Linear, rows: int, model: Model, gates: bool) -> None:
    for name, (n, k) in model.shapes().items():
        seconds = alone(linear, rows, name, weights_in_turn(n, k), gates)
        print(line(f"{model.name} {name} {n}x{k}", seconds, 2 * n * k))
    print(line(f"{model.name} layer", *chain(linear, rows, model, gates)))


def use_plain_library() -> None:
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--library-rows", type=int, nargs="*", default=[32, 128])
    args = parser.parse_args()
    use_plain_library()
    for model in MODELS:
        for rows in args.rows:
            print(f"-- {rows} rows")
            bench_model(native, rows, model, gates=True)
        for rows in args.library_rows:
            print(f"-- torch.mm, {rows} rows")
            bench_model(library, rows, model, gates=False)


if __name__ == "__main__":
    main()
