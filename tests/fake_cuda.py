"""A GPU made of torch on the CPU: what CudaOps does, slowly, so that the host's side can be tested.

Install it before worker.cuda_backend is imported. The arithmetic is float32; only the results'
types are the device's.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker import _native

IDLE, CORRUPTED = -2, -1
# Of `scheduled`: in the next step alone.
ONCE = 1


_MODULES = ("cuda_backend", "cuda_slots", "cuda_prefill", "cuda_runner")
REPETITION, FREQUENCY, BIASED, MIN_LEN, MASKED = (1 << bit for bit in range(5))
SEEN_IN_PROMPT = 1 << 30


class AdjustTable:
    """The native one's fields."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class SlotTable:
    """The native one's fields; ring and stamps by address."""

    def __init__(self, *, ring: int, stamps: int, ring_rows: int, **fields: Any) -> None:
        self.__dict__.update(fields)
        self.num_rows = self.length.shape[0]
        self.ring = _at(ring, np.int32, (ring_rows, self.num_rows))
        self.stamps = _at(stamps, np.int64, (ring_rows, 2))
        self.ring_rows = ring_rows


class CudaOps:
    """See worker/_native.pyi."""

    stream_rows = 64
    tiled_rows = 512

    def __init__(self, device: int | None, stream: int, portable: bool = False) -> None:
        self._cpu = _native.CpuOps(1)

    def embed(self, token_ids: Tensor, weight: Tensor, first_id: int, out: Tensor) -> None:
        ids = token_ids.long() - first_id
        held = (ids >= 0) & (ids < weight.shape[0])
        out.copy_(torch.where(held[:, None], weight[ids.clamp(0, weight.shape[0] - 1)].float(), 0))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        out.copy_(_normed(x, weight, eps))

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        residual += delta.float()
        out.copy_(_normed(residual, weight, eps))

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up[:, 0::2].float(), gate_up[:, 1::2].float()
        out.copy_(torch.nn.functional.silu(gate) * up)

    def add_bias(self, x: Tensor, bias: Tensor) -> None:
        x.copy_(x.float() + bias)

    def linear_supported(self, num_rows: int, weight: Tensor) -> bool:
        streams = weight.dtype != torch.float32 and weight.shape[0] % 8 == 0
        return streams and num_rows <= self.stream_rows

    def linear_fills(self, num_rows: int, weight: Tensor) -> bool:
        return weight.dtype != torch.float32 and num_rows >= self.tiled_rows

    def linear(self, x: Tensor, weight: Tensor, out: Tensor, gated: bool = False) -> None:
        tiled = x.shape[0] >= self.tiled_rows and out.dtype == x.dtype
        assert x.shape[0] <= self.stream_rows or tiled
        product = x.float() @ weight.float().t()
        if gated:
            self.silu_mul(product.to(x.dtype), out)
        else:
            out.copy_(product)

    @staticmethod
    def decode_attention_workspace(rows: int, positions: int, heads: int, dim: int) -> int:
        return 4

    def decode_attention(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        slots: Tensor,
        scale: float,
        states: Tensor,
        counters: Tensor,
        out: Tensor,
    ) -> None:
        assert qkv.shape[0] == positions.shape[0] == slots.shape[0] <= keys.shape[0]
        assert counters.shape[0] == qkv.shape[0] * keys.shape[2]
        out.zero_()
        for at, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
            if position < 0:
                continue
            row = qkv[at : at + 1].clone()
            self.rope_append(row, q_norm, k_norm, eps, cos, sin, keys, values, slot, position)
            self.prefill_attention(row, keys, values, slot, position, scale, out[at : at + 1])

    def rope_append(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        slot: int,
        start: int,
        place: Tensor | None = None,
    ) -> None:
        slot, start, rows = _place(place, slot, start, qkv.shape[0])
        heads, dim = keys.shape[2], keys.shape[3]
        by_head = qkv[:rows].view(rows, qkv.shape[1] // dim, dim)
        end = start + rows
        angles = cos[start:end, None], sin[start:end, None]
        q, k, v = by_head[:, : -2 * heads], by_head[:, -2 * heads : -heads], by_head[:, -heads:]
        keys[slot, start:end] = _rotated(_normed(k, k_norm, eps), *angles).to(keys.dtype)
        values[slot, start:end] = v.to(values.dtype)
        q.copy_(_rotated(_normed(q, q_norm, eps), *angles))

    def prefill_attention(
        self,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        slot: int,
        start: int,
        scale: float,
        out: Tensor,
        place: Tensor | None = None,
    ) -> None:
        slot, start, rows = _place(place, slot, start, qkv.shape[0])
        heads, dim = keys.shape[2], keys.shape[3]
        q = qkv[:rows].view(rows, qkv.shape[1] // dim, dim)[:, : -2 * heads].float()
        group = q.shape[1] // heads
        # A row at a time: its bits do not depend on the others.
        for row, end in enumerate(range(start + 1, start + rows + 1)):
            k = keys[slot, :end].float().repeat_interleave(group, 1)
            v = values[slot, :end].float().repeat_interleave(group, 1)
            weights = ((q[row] * k).sum(-1) * scale).softmax(0)
            out[row].view(-1, dim)[:] = (weights[:, :, None] * v).sum(0)

    def copy_prefix(self, cache: Tensor, source: int, target: int, length: int) -> None:
        assert source != target
        # The fake's cache is the CPU's.
        cache[:, target, :length] = cache[:, source, :length]

    def begin_command(self, table: SlotTable) -> None:
        rows = (table.scheduled != 0) & (table.active == 1)
        table.row_token.copy_(torch.where(rows, table.last_token, -1))
        table.row_position.copy_(torch.where(rows, table.length, -1))

    def embed_slots(self, table: SlotTable, weight: Tensor, first_id: int, out: Tensor) -> None:
        self.embed(table.row_token, weight, first_id, out)

    @staticmethod
    def sample_workspace(num_rows: int, vocab: int) -> int:
        return 4

    def adjust_logits(
        self,
        table: SlotTable,
        adjust: AdjustTable,
        logits: Tensor,
        rows: Tensor | None,
        out: Tensor,
    ) -> None:
        out.fill_(torch.nan)
        for part, row in self._taking_part(table, rows):
            if rows is None and adjust.flags[row] & (REPETITION | FREQUENCY):
                adjust.counts[row, table.row_token[row]] += 1
            # Of the sequence without the token to be drawn.
            length = int(table.length[row]) + int(rows is None)
            adjusted = self._adjusted(table, adjust, logits[part].numpy().copy(), row, length)
            out[part] = torch.from_numpy(adjusted)

    def _adjusted(
        self, table: SlotTable, adjust: AdjustTable, x: Any, row: int, length: int
    ) -> Any:
        flags = int(adjust.flags[row])
        seen = adjust.counts[row].numpy()
        count = seen & ~SEEN_IN_PROMPT
        frequency, presence, repetition = (
            getattr(adjust, f"{name}_penalty")[row].numpy()
            for name in ("frequency", "presence", "repetition")
        )
        if flags & REPETITION:
            x = np.where(seen != 0, np.where(x > 0, x / repetition, x * repetition), x)
        if flags & FREQUENCY:
            x = np.where(count != 0, x - frequency * count.astype(np.float32) - presence, x)
        if flags & BIASED:
            bias = adjust.bias[row].numpy()
            x = np.where(bias != 0, x + bias, x)
        if flags & MIN_LEN and length < adjust.min_len[row]:
            x = np.where(_bits(table.end_ids[row], len(x)), np.float32(-np.inf), x)
        if flags & MASKED:
            x = np.where(_bits(adjust.mask[row], len(x)), x, np.float32(-np.inf))
        return x

    def _taking_part(self, table: SlotTable, rows: Tensor | None) -> list[tuple[int, int]]:
        """(row of the logits, row of the table)."""
        if rows is not None:
            return list(enumerate(rows.tolist()))
        return [(row, row) for row, p in enumerate(table.row_position.tolist()) if p >= 0]

    def sample(
        self, table: SlotTable, logits: Tensor, rows: Tensor | None, workspace: Tensor
    ) -> None:
        drawn = np.full(table.num_rows, IDLE, dtype=np.int32)
        pairs = self._taking_part(table, rows)
        if rows is None:
            table.length[[row for _, row in pairs]] += 1
        for part, row in pairs:
            drawn[row] = self._draw(table, logits[part : part + 1], row)
            self._accept(table, row, int(drawn[row]))
        ring_row = int(table.counter) % table.ring_rows
        table.ring[ring_row] = drawn
        table.counter += 1
        self.begin_command(table)

    def logprobs(
        self, table: SlotTable, logits: Tensor, rows: Tensor | None, counts: Tensor, out: Tensor
    ) -> None:
        step = int(table.counter) - 1
        drawn = table.ring[step % table.ring_rows].tolist()
        for part, row in enumerate(range(table.num_rows) if rows is None else rows.tolist()):
            if drawn[row] >= 0 and counts[row] >= 0:
                token = torch.tensor([drawn[row]], dtype=torch.int32)
                record = out[step % len(out), row].view(1, -1)
                self._cpu.logprobs(logits[part : part + 1], token, counts[row : row + 1], record)

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, count: int, out: Tensor) -> None:
        counts = torch.full((len(out),), count, dtype=torch.int32)
        self._cpu.logprobs(logits, token_ids, counts, out)

    def _draw(self, table: SlotTable, logits: Tensor, row: int) -> int:
        out, at = torch.zeros(1, dtype=torch.int32), slice(row, row + 1)
        parameters = table.temperature, table.top_k, table.top_p, table.min_p, table.seed
        self._cpu.sample(logits, *(p[at] for p in parameters), table.length[at].clone(), out)
        return int(out)

    def _accept(self, table: SlotTable, row: int, token_id: int) -> None:
        table.active[row] = 0
        if table.scheduled[row] == ONCE:
            table.scheduled[row] = 0
        if token_id == CORRUPTED:
            return
        ends = table.end_ids[row, token_id // 32].item() >> (token_id % 32) & 1
        table.last_token[row] = token_id
        table.active[row] = int(not ends and table.length[row] + 1 < table.max_len[row])


class Event:
    """Of a stream on which everything is done at once."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...

    def elapsed_time(self, _: Event) -> float:
        return 1.0


def _place(place: Tensor | None, slot: int, start: int, rows: int) -> tuple[int, int, int]:
    return (slot, start, rows) if place is None else tuple(place.tolist())


def install(monkeypatch: Any) -> None:
    """Puts the fake in the place of the native library's GPU part, and of torch's."""
    monkeypatch.setattr(_native, "CudaOps", CudaOps, raising=False)
    monkeypatch.setattr(_native, "SlotTable", SlotTable, raising=False)
    monkeypatch.setattr(_native, "AdjustTable", AdjustTable, raising=False)
    names = [f"worker.{name}" for name in _MODULES]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    cuda_backend, cuda_slots, _, cuda_runner = map(importlib.import_module, names)
    monkeypatch.setattr(cuda_backend, "fix_arithmetic", lambda: None)
    monkeypatch.setattr(torch, "mm", _mm)
    monkeypatch.setattr(cuda_slots, "_pinned", lambda tensor: tensor.clone())
    monkeypatch.setattr(cuda_runner, "_event", Event)
    monkeypatch.setattr(cuda_runner, "_enter", lambda device: None)


def device() -> Any:
    """A device that open_device may give: the fake GPU."""
    from worker.cuda_backend import CudaBackend
    from worker.cuda_runner import CudaRunner
    from worker.cuda_slots import CudaSlots
    from worker.device import CpuDevice
    from worker.tensor_parallel import TensorParallelGroup, join_links

    class Group(TensorParallelGroup):
        """Over sockets; sums of any float type, as CudaGroup's are."""

        capturable = False

        def all_reduce(self, x: Tensor) -> None:
            wide = x.float()
            super().all_reduce(wide)
            x.copy_(wide)

    class FakeGpu(CpuDevice):
        name = "cuda:0 (none)"
        weight_dtypes = ("bfloat16", "float16", "float32")

        def backend(self, weight_dtype: str) -> Any:
            stream: Any = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
            return CudaBackend(torch.device("cpu"), stream, weight_dtype)

        def runner(self, decoder: Any) -> Any:
            slots = CudaSlots(decoder.ops, decoder.limits.max_running, decoder.config.vocab_size)
            return CudaRunner(decoder, decoder.ops, slots), slots

        def join_group(self, rendezvous: Any) -> Any:
            group = join_links(rendezvous)
            return Group(group.rank, group.world_size, group._links, group.same_machine)

    return FakeGpu(1)


def _mm(left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None, *, out: Tensor) -> None:
    """On the CPU torch gives no other type than the inputs'."""
    out.copy_(left.float() @ right.float())


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.float()
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _bits(words: Tensor, count: int) -> Any:
    """bool [count]: bit i % 32 of word i / 32."""
    return np.unpackbits(words.numpy().view(np.uint8), count=count, bitorder="little") == 1


def _at(address: int, dtype: Any, shape: tuple[int, int]) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_byte * size).from_address(address), dtype=dtype).reshape(shape)
