"""Forwards with prompt chunks on a GPU, those of few rows as one launch each.

A forward is some 300 launches, which take the host longer to put on the stream than the GPU works
for few rows. So the forward of a lone short chunk that ends its prompt, as most of them do behind a
cached prefix, is captured once for each size; slot, position and number of rows are then read on
the device. All other chunks are launched as they come. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.batch import ChunkSpan, ForwardBatch, PrefillChunk
from worker.cuda_backend import STREAM_ROWS, CudaBackend
from worker.cuda_slots import CudaSlots
from worker.decoder import Decoder

# The most rows of the chunks whose forwards are captured. Attention is launched for that many.
_ROOMS = (16, 32, 64, 128)
_PLACE_INTS = 3


class Capture:
    """Makes CUDA graphs of work that never runs at once: they share their memory."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` as one launch. It has to have run before, so that all it needs is loaded."""
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay


class ShortChunk:
    """The batch of a chunk that ends a prompt; its tensors keep their places.

    `num_rows`: of the forward, whose first `first` are those of the slot table, all or none.
    `room`: the most rows of the chunk.
    """

    def __init__(self, slots: CudaSlots, num_rows: int, first: int, room: int) -> None:
        self.room = room
        self._sampled = first + 1
        parts = [_PLACE_INTS, _PLACE_INTS, num_rows, self._sampled]
        self._ints = slots.send_ints([0] * sum(parts))
        place, last_place, token_ids, sample_rows = torch.split(self._ints, parts)
        self.batch = ForwardBatch(
            token_ids=token_ids,
            slots=slots.cache_slot,
            positions=slots.row_position,
            num_decode_rows=first,
            chunks=(ChunkSpan(first, first + self.room, 0, 0, place),),
            sample_rows=sample_rows,
            sampled_chunks=(ChunkSpan(first, first + 1, 0, 0, last_place),),
            table=slots.table if first else None,
        )

    def ints(self, chunk: PrefillChunk) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """What the batch's tensors hold for `chunk`, which has 1 to `room` rows."""
        count, first = len(chunk.token_ids), self._sampled - 1
        end = chunk.start + count
        ints = np.full(self._ints.shape[0], -1, dtype=np.int32)
        ints[: 2 * _PLACE_INTS] = [chunk.slot, chunk.start, count, chunk.slot, end - 1, 1]
        ints[2 * _PLACE_INTS + first :][:count] = chunk.token_ids
        ints[-self._sampled :] = [*range(first), first + count - 1]
        return ints

    def fill(self, slots: CudaSlots, chunk: PrefillChunk) -> None:
        """The batch is `chunk` from here on in the stream."""
        self._ints.copy_(slots.send(self.ints(chunk)))


@dataclass(frozen=True, slots=True)
class _Forward:
    chunk: ShortChunk
    run: Callable[[], None]
    logits: Tensor


class CudaPrefill:
    """Runs the forwards of commands that have chunks."""

    def __init__(
        self, decoder: Decoder, backend: CudaBackend, slots: CudaSlots, capture: Capture | None
    ) -> None:
        """`capture`: None where the group's sums cannot be captured."""
        self._decoder = decoder
        self._slots = slots
        self._forwards: dict[bool, list[_Forward]] = {False: [], True: []}
        limits = decoder.limits
        most = min(limits.max_seq_len, limits.max_step_tokens)
        for mixed, first in ((False, 0), (True, slots.num_rows)):
            for room in _rooms(first, most):
                chunk = ShortChunk(slots, backend.num_rows(first + room), first, room)
                self._forwards[mixed].append(self._forward(chunk, capture))

    def forward(self, chunks: tuple[PrefillChunk, ...], mixed: bool) -> tuple[ForwardBatch, Tensor]:
        """The batch and its logits [B, V]: of the whole table where `mixed`, then of the chunks."""
        forward = self._captured(chunks, mixed)
        if forward is None:
            make = self._slots.mixed_batch if mixed else self._slots.chunk_batch
            batch = make(chunks)
            return batch, self._decoder.forward(batch)
        forward.chunk.fill(self._slots, chunks[0])
        forward.run()
        return forward.chunk.batch, forward.logits

    def _captured(self, chunks: tuple[PrefillChunk, ...], mixed: bool) -> _Forward | None:
        if len(chunks) != 1 or not chunks[0].sample:
            return None
        count = len(chunks[0].token_ids)
        fits = (forward for forward in self._forwards[mixed] if count <= forward.chunk.room)
        return next(fits, None)

    def _forward(self, chunk: ShortChunk, capture: Capture | None) -> _Forward:
        """Runs once, with no row."""

        def run() -> None:
            self._decoder.forward(chunk.batch)

        logits = self._decoder.forward(chunk.batch)
        return _Forward(chunk, run if capture is None else capture(run), logits)


def _rooms(first: int, most: int) -> list[int]:
    """Of forwards that begin with `first` rows; one of them just fits the streamed products."""
    rooms = {min(room, most) for room in (*_ROOMS, STREAM_ROWS - first)}
    return sorted(room for room in rooms if room > 0)
