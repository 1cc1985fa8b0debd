"""Runs the forwards of commands on a GPU: decode steps as replays of one CUDA graph.

`start` only puts work on the stream, so several commands can be under way and the GPU goes from one
to the next without the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from worker._native import CudaOps
from worker.batch import SlotSetup, TokenLogprobs
from worker.cuda_backend import CudaBackend
from worker.cuda_slots import CudaSlots
from worker.decoder import Decoder
from worker.errors import StepError
from worker.runner import CORRUPTED, Drawn, Outcome, StepWork, read_logprobs

_IDLE = -2


@dataclass(frozen=True, slots=True)
class Started:
    """Work on the stream: between two events; the rows of the ring its steps write.

    `num_logprobs`: of its slots that want any, as their tenants want them.
    """

    work: StepWork
    begin: torch.cuda.Event
    end: torch.cuda.Event
    decode_rows: list[int]
    sample_row: int | None
    num_logprobs: dict[int, int]

    @property
    def rows(self) -> list[int]:
        """Of the ring, in the order of the steps."""
        return self.decode_rows + ([] if self.sample_row is None else [self.sample_row])


class CudaRunner:
    """The twin of CpuRunner; used from the thread that made its stream current."""

    def __init__(self, decoder: Decoder, backend: CudaBackend, slots: CudaSlots) -> None:
        limits = decoder.limits
        self.decoder = decoder
        self._ops = backend
        self._slots = slots
        self._batch = slots.decode_batch()
        self._taken: list[tuple[int, SlotSetup]] = []
        self._num_logprobs = [-1] * limits.num_slots
        # Rows of the ring, ever: asked for by `start`, and read by `finish`.
        self._rows_begun = self._rows_read = 0
        size = CudaOps.sample_workspace(limits.num_slots, decoder.config.vocab_size)
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=backend.device)
        # A decode step without logprobs and one with them: who wants none pays nothing.
        self._steps: dict[bool, Callable[[], None]] = {
            wanted: partial(self._decode_step, wanted) for wanted in (False, True)
        }
        if decoder.group.capturable:
            self._steps = self._captured()

    def take(self, slot: int, setup: SlotSetup) -> None:
        """A new tenant with the next work; nothing of the old one stays."""
        self._taken.append((slot, setup))
        self._num_logprobs[slot] = setup.num_logprobs

    def start(self, work: StepWork) -> Started:
        """Puts the work on the stream. StepError if results that nobody has read would be lost."""
        num_logprobs = self._wanted_logprobs(work)
        self._claim_rows(2 if work.chunks else work.num_steps, bool(num_logprobs))
        begin, end = _event(), _event()
        begin.record()
        decode_rows: list[int] = []
        sample_row = None
        if work.decode_slots:
            self._slots.schedule(work.decode_slots)
        if work.chunks:
            decode_rows, sample_row = self._prefill(work, bool(num_logprobs))
        else:
            step = self._steps[bool(num_logprobs)]
            for _ in range(work.num_steps):
                step()
                decode_rows.append(self._slots.next_ring_row())
        end.record()
        started = Started(work, begin, end, decode_rows, sample_row, num_logprobs)
        self._rows_begun += len(started.rows)
        return started

    def finish(self, started: Started) -> Outcome:
        """Waits for the device and reads the ring."""
        _enter(self._ops.device)
        started.end.synchronize()
        self.decoder.group.check()
        work, ring = started.work, self._slots.ring
        steps = [_drawn(ring[row].tolist(), work.decode_slots) for row in started.decode_rows]
        if started.sample_row is not None:
            steps.append(_drawn(ring[started.sample_row].tolist(), work.sampled_slots))
        logprobs = self._read_logprobs(started, steps)
        self._rows_read += len(started.rows)
        duration_ns = int(started.begin.elapsed_time(started.end) * 1e6)
        return Outcome(steps, duration_ns, logprobs)

    def gaps_ns(self, count: int) -> list[int]:
        """By the device's clock; the last `count` steps must have been nothing but decode steps."""
        stamps = self._slots.last_stamps(count)
        return list((stamps[1:, 0] - stamps[:-1, 1]).tolist())

    def _wanted_logprobs(self, work: StepWork) -> dict[int, int]:
        """By slot, where it wants logprobs: how many of the best tokens."""
        counts = self._num_logprobs
        slots = (*work.decode_slots, *work.sampled_slots)
        return {slot: counts[slot] for slot in slots if counts[slot] >= 0}

    def _read_logprobs(
        self, started: Started, steps: list[list[Drawn]]
    ) -> dict[int, list[TokenLogprobs]]:
        """From the rows of the ring that `steps` were read from."""
        if not started.num_logprobs:
            return {}
        records = self._slots.logprobs
        found: dict[int, list[int]] = {slot: [] for slot in started.num_logprobs}
        for row, drawn in zip(started.rows, steps, strict=True):
            for slot, token_id in drawn:
                if slot in found and token_id != CORRUPTED:
                    found[slot].append(row % len(records))
        vocab_size = self.decoder.config.vocab_size
        return {
            slot: read_logprobs(records[rows, slot], min(started.num_logprobs[slot], vocab_size))
            for slot, rows in found.items()
        }

    def _claim_rows(self, count: int, logprobs: bool) -> None:
        under_way = self._rows_begun - self._rows_read
        most = len(self._slots.logprobs if logprobs else self._slots.ring)
        if under_way + count > most:
            raise StepError(
                f"{count} steps{' with logprobs' if logprobs else ''} after {under_way} whose "
                f"results were not read; at most {most}"
            )

    def _prefill(self, work: StepWork, logprobs: bool) -> tuple[list[int], int | None]:
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
            self._sample(logits[: self._slots.num_slots], None, logprobs)
            decode_rows.append(self._slots.next_ring_row())
            logits = logits[self._slots.num_slots :]
        sampled = [chunk for chunk in work.chunks if chunk.sample]
        if not sampled:
            return decode_rows, None
        self._sample(logits[: len(sampled)], self._slots.arrive(sampled), logprobs)
        return decode_rows, self._slots.next_ring_row()

    def _sample(self, logits: Tensor, slots: Tensor | None, logprobs: bool) -> None:
        table = self._slots.table
        self._ops.sample(table, logits, slots, self._workspace)
        if logprobs:
            out = self._slots.logprobs_out
            self._ops.logprobs(table, logits, slots, self._slots.num_logprobs, out)

    def _captured(self) -> dict[bool, Callable[[], None]]:
        """The decode steps as one launch each."""
        # Both before, so that libraries and kernels are loaded and their memory is there.
        for step in self._steps.values():
            step()
            self._slots.next_ring_row()
        self._ops.stream.synchronize()
        # They never run at once, so they share their memory.
        pool = torch.cuda.graph_pool_handle()
        replays: dict[bool, Callable[[], None]] = {}
        for wanted, step in self._steps.items():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool, stream=self._ops.stream, capture_error_mode="thread_local"
            ):
                step()
            replays[wanted] = graph.replay
        return replays

    def _decode_step(self, logprobs: bool) -> None:
        logits = self.decoder.forward(self._batch)[: self._slots.num_slots]
        self._sample(logits, None, logprobs)


def _enter(device: torch.device) -> None:
    """A thread that was never told its GPU may open GPU 0 when it waits, and take memory there."""
    torch.cuda.set_device(device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _drawn(tokens: list[int], slots: tuple[int, ...]) -> list[Drawn]:
    return [(slot, tokens[slot]) for slot in slots if tokens[slot] != _IDLE]
