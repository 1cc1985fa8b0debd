"""Times of the native operators for SmolLM2-135M: `python tests/native/bench_native.py`.

Each figure is the smallest and the middle of several runs: other programs disturb upwards only.
Bandwidth counts what must be read from memory once; its share is of the best product of the run.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from worker import _native

LAYERS, HIDDEN, INNER, Q_HEADS, KV_HEADS, HEAD_DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
SLOTS, POSITIONS = 8, 2048
QKV = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call."""

    least: float
    middle: float


def measure(run: Callable[[], object], seconds: float = 1.0, fewest: int = 5) -> Timing:
    """Runs once to warm up, then for about `seconds`."""
    run()
    times: list[float] = []
    while len(times) < fewest or sum(times) < seconds:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return Timing(min(times), statistics.median(times))


class Model:
    """The operators of one forward, on random weights."""

    def __init__(self, ops: _native.CpuOps, dtype: torch.dtype, rows: int) -> None:
        self.ops, self.rows = ops, rows
        self.layers = [
            [self._weight(*shape, dtype) for shape in self._shapes()] for _ in range(LAYERS)
        ]
        self.head = self._weight(VOCAB, HIDDEN, dtype)
        self.resize(rows)
        cache = (LAYERS, SLOTS, POSITIONS, KV_HEADS, HEAD_DIM)
        self.keys, self.values = (
            [torch.randn(cache[1:]).to(dtype) for _ in range(LAYERS)] for _ in range(2)
        )
        self.cos = self.sin = torch.randn(POSITIONS, HEAD_DIM // 2)
        self.norm = torch.ones(HIDDEN)

    def resize(self, rows: int) -> None:
        """Buffers for a forward of `rows` rows."""
        self.rows = rows
        self.x, self.normed, self.delta = (torch.randn(rows, HIDDEN) for _ in range(3))
        self.qkv, self.attended = torch.randn(rows, QKV), torch.randn(rows, Q_HEADS * HEAD_DIM)
        self.gate_up, self.inner = torch.randn(rows, 2 * INNER), torch.randn(rows, INNER)
        self.logits = torch.randn(rows, VOCAB)

    @property
    def weight_bytes(self) -> int:
        return self.head.num_bytes + sum(w.num_bytes for layer in self.layers for w in layer)

    def _weight(self, n: int, k: int, dtype: torch.dtype) -> _native.PackedWeight:
        return self.ops.pack((torch.randn(n, k) / 30).to(dtype))

    @staticmethod
    def _shapes() -> list[tuple[int, int]]:
        attended = Q_HEADS * HEAD_DIM
        return [(QKV, HIDDEN), (HIDDEN, attended), (2 * INNER, HIDDEN), (HIDDEN, INNER)]

    def products(self) -> None:
        for qkv, out, gate_up, down in self.layers:
            self.ops.linear(self.normed, qkv, self.qkv)
            self.ops.linear(self.attended, out, self.delta)
            self.ops.linear(self.normed, gate_up, self.gate_up)
            self.ops.linear(self.inner, down, self.delta)
        self.ops.linear(self.normed, self.head, self.logits)

    def decode(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        self._forward(slots, positions, decode=True)

    def prefill(self, start: int) -> None:
        positions = torch.arange(start, start + self.rows, dtype=torch.int32)
        self._forward(torch.zeros(self.rows, dtype=torch.int32), positions, decode=False)

    def _forward(self, slots: torch.Tensor, positions: torch.Tensor, decode: bool) -> None:
        ops, norm, scale = self.ops, self.norm, HEAD_DIM**-0.5
        start = int(positions[0])
        self.x.normal_()
        ops.rms_norm(self.x, norm, 1e-5, self.normed)
        for (qkv, out, gate_up, down), k, v in zip(
            self.layers, self.keys, self.values, strict=True
        ):
            ops.linear(self.normed, qkv, self.qkv)
            ops.rope_append(self.qkv, None, None, 0.0, self.cos, self.sin, slots, positions, k, v)
            if decode:
                ops.decode_attention(self.qkv, k, v, slots, positions, scale, self.attended)
            else:
                ops.prefill_attention(self.qkv, k, v, 0, start, scale, self.attended)
            ops.linear(self.attended, out, self.delta)
            ops.add_rms_norm(self.x, self.delta, norm, 1e-5, self.normed)
            ops.linear(self.normed, gate_up, self.gate_up)
            ops.silu_mul(self.gate_up, self.inner)
            ops.linear(self.inner, down, self.delta)
            ops.add_rms_norm(self.x, self.delta, norm, 1e-5, self.normed)
        ops.linear(self.normed, self.head, self.logits)


def sample_call(
    ops: _native.CpuOps, rows: int, temperature: float, top_k: int, top_p: float
) -> Callable[[], None]:
    """A call that samples rows of normal logits."""
    logits = torch.randn(rows, VOCAB) * 3
    seeds, out = torch.arange(rows), torch.empty(rows, dtype=torch.int32)
    ints = torch.full((rows,), top_k, dtype=torch.int32)
    floats = [torch.full((rows,), value) for value in (temperature, top_p, 0.0)]
    return lambda: ops.sample(logits, floats[0], ints, floats[1], floats[2], seeds, ints, out)


def read_bandwidth(model: Model) -> float:
    """Bytes per second of the product of one row: it reads every weight once."""
    model.resize(1)
    return model.weight_bytes / measure(model.products).least


def line(name: str, timing: Timing, note: str = "") -> None:
    print(f"{name:<34}{timing.least * 1e3:9.3f}{timing.middle * 1e3:9.3f} ms  {note}")


def report_model(model: Model, best: float) -> None:
    """Products, decode steps and prefill of one weight type."""
    decode_times: dict[int, Timing] = {}
    for rows in (1, 2, 4, 8):
        model.resize(rows)
        timing = measure(model.products)
        rate = model.weight_bytes / timing.least
        line(f"products, {rows} rows", timing, f"{rate / 1e9:.1f} GB/s, {rate / best:.0%} of best")
    for rows in (1, 2, 4, 8):
        model.resize(rows)
        slots = torch.arange(rows, dtype=torch.int32)
        for position in (128, 1024):
            positions = torch.full((rows,), position, dtype=torch.int32)
            timing = measure(partial(model.decode, slots, positions))
            decode_times.setdefault(position, timing)
            ratio = rows * decode_times[position].least / timing.least
            note = f"{rows / timing.least:.0f} tokens/s, {ratio:.2f} x one row"
            line(f"decode step, {rows} rows at {position}", timing, note)
    for rows in (64, 256):
        model.resize(rows)
        timing = measure(lambda: model.prefill(0))
        line(f"prefill, {rows} rows", timing, f"{rows / timing.least:.0f} tokens/s")


def report_small(ops: _native.CpuOps) -> None:
    """Sampling, and what a call costs when there is nothing to do."""
    for name, temperature, top_k, top_p in (
        ("greedy", 0.0, 0, 1.0),
        ("temperature", 1.0, 0, 1.0),
        ("top_k 50, top_p 0.9", 0.8, 50, 0.9),
        ("top_p 0.95", 1.0, 0, 0.95),
    ):
        line(f"sample 8 rows, {name}", measure(sample_call(ops, 8, temperature, top_k, top_p), 0.3))
    x, weight = torch.zeros(0, 64), torch.ones(64)
    call = measure(lambda: ops.rms_norm(x, weight, 1e-5, x), 0.1)
    line("a call without rows, 3 arrays", call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ops = _native.CpuOps(arguments.threads, arguments.isa)
    print(f"{ops.isa}, {ops.num_threads} threads; least and middle time")
    report_small(ops)
    for name in arguments.dtypes.split(","):
        model = Model(ops, getattr(torch, name), 1)
        best = read_bandwidth(model)
        print(f"\n{name}: {model.weight_bytes / 1e6:.0f} MB of weights")
        report_model(model, best)


if __name__ == "__main__":
    main()
