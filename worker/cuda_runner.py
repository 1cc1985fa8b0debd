"""Runs the forwards of commands on a GPU: decode steps as replays of one CUDA graph.

`start` only puts work on the stream, so several commands can be under way and the GPU goes from one
to the next without the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker._native import CudaOps
from worker.batch import SlotSetup
from worker.cuda_backend import CudaBackend
from worker.cuda_slots import CudaSlots
from worker.decoder import Decoder
from worker.errors import StepError
from worker.runner import Drawn, Outcome, StepWork

_IDLE = -2


@dataclass(frozen=True, slots=True)
class Started:
    """Work on the stream: between two events; the rows of the ring its steps write."""

    work: StepWork
    begin: torch.cuda.Event
    end: torch.cuda.Event
    decode_rows: list[int]
    sample_row: int | None

    @property
    def num_rows(self) -> int:
        """Of the ring."""
        return len(self.decode_rows) + (self.sample_row is not None)


class CudaRunner:
    """The twin of CpuRunner; used from the thread that made its stream current."""

    def __init__(self, decoder: Decoder, backend: CudaBackend, slots: CudaSlots) -> None:
        limits = decoder.limits
        self.decoder = decoder
        self._ops = backend
        self._slots = slots
        self._batch = slots.decode_batch()
        self._taken: list[tuple[int, SlotSetup]] = []
        # Rows of the ring, ever: asked for by `start`, and read by `finish`.
        self._rows_begun = self._rows_read = 0
        size = CudaOps.sample_workspace(limits.num_slots, decoder.config.vocab_size)
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=backend.device)
        self._step = self._capture() if decoder.group.capturable else self._decode_step

    def take(self, slot: int, setup: SlotSetup) -> None:
        """A new tenant with the next work; nothing of the old one stays."""
        self._taken.append((slot, setup))

    def start(self, work: StepWork) -> Started:
        """Puts the work on the stream. StepError if results that nobody has read would be lost."""
        self._claim_rows(2 if work.chunks else work.num_steps)
        begin, end = _event(), _event()
        begin.record()
        decode_rows: list[int] = []
        sample_row = None
        if work.decode_slots:
            self._slots.schedule(work.decode_slots)
        if work.chunks:
            decode_rows, sample_row = self._prefill(work)
        else:
            for _ in range(work.num_steps):
                self._step()
                decode_rows.append(self._slots.next_ring_row())
        end.record()
        started = Started(work, begin, end, decode_rows, sample_row)
        self._rows_begun += started.num_rows
        return started

    def finish(self, started: Started) -> Outcome:
        """Waits for the device and reads the ring."""
        _enter(self._ops.device)
        started.end.synchronize()
        self.decoder.group.check()
        work, ring = started.work, self._slots.ring
        steps = [_drawn(ring[row].tolist(), work.decode_slots) for row in started.decode_rows]
        if started.sample_row is not None:
            sampled = tuple(chunk.slot for chunk in work.chunks if chunk.sample)
            steps.append(_drawn(ring[started.sample_row].tolist(), sampled))
        self._rows_read += started.num_rows
        return Outcome(steps, int(started.begin.elapsed_time(started.end) * 1e6))

    def gaps_ns(self, count: int) -> list[int]:
        """By the device's clock; the last `count` steps must have been nothing but decode steps."""
        stamps = self._slots.last_stamps(count)
        return list((stamps[1:, 0] - stamps[:-1, 1]).tolist())

    def _claim_rows(self, count: int) -> None:
        under_way, most = self._rows_begun - self._rows_read, len(self._slots.ring)
        if under_way + count > most:
            raise StepError(
                f"{count} steps after {under_way} whose results were not read; at most {most}"
            )

    def _prefill(self, work: StepWork) -> tuple[list[int], int | None]:
        """One forward of the chunks, and of all slots if some decode; the rows of the ring."""
        decode_rows: list[int] = []
        mixed = bool(work.decode_slots)
        batch = self._slots.mixed_batch if mixed else self._slots.chunk_batch
        logits = self.decoder.forward(batch(work.chunks))
        # Not before: a chunk's forward does not read the table, and it is waited for.
        for slot, setup in self._taken:
            self._slots.take(slot, setup)
        self._taken.clear()
        if mixed:
            self._sample(logits[: self._slots.num_slots], None)
            decode_rows.append(self._slots.next_ring_row())
            logits = logits[self._slots.num_slots :]
        sampled = [chunk for chunk in work.chunks if chunk.sample]
        if not sampled:
            return decode_rows, None
        self._sample(logits[: len(sampled)], self._slots.arrive(sampled))
        return decode_rows, self._slots.next_ring_row()

    def _sample(self, logits: Tensor, slots: Tensor | None) -> None:
        self._ops.sample(self._slots.table, logits, slots, self._workspace)

    def _capture(self) -> Callable[[], None]:
        """A decode step as one launch."""
        # Twice before, so that libraries and kernels are loaded and their memory is there.
        for _ in range(2):
            self._decode_step()
            self._slots.next_ring_row()
        self._ops.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._ops.stream, capture_error_mode="thread_local"):
            self._decode_step()
        return graph.replay

    def _decode_step(self) -> None:
        self._sample(self.decoder.forward(self._batch)[: self._slots.num_slots], None)


def _enter(device: torch.device) -> None:
    """A thread that was never told its GPU may open GPU 0 when it waits, and take memory there."""
    torch.cuda.set_device(device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _drawn(tokens: list[int], slots: tuple[int, ...]) -> list[Drawn]:
    return [(slot, tokens[slot]) for slot in slots if tokens[slot] != _IDLE]
