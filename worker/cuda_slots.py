"""The slot table in GPU memory: decode steps read and change it without the host.

S slots, V vocabulary. Everything here is put on the device's stream; nothing waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker._native import SlotTable
from worker.batch import ChunkSpan, ForwardBatch, PrefillChunk, SlotSetup, last_rows
from worker.cuda_backend import CudaBackend
from worker.runner import LOGPROBS_RECORD, LOGPROBS_WORDS

# Steps whose results may wait to be read: 16 commands of 1,024, the most the scheduler can ask for.
RING_ROWS = 16 * 1024
# With logprobs a step takes 168 bytes a slot: up to 12 slots all of these fit, with 64 an eighth.
_LOGPROBS_BYTES = 32 << 20
# What a new tenant sets, a row of 32-bit words each; and what is written only on the device.
_TENANT_INTS = ("last_token", "length", "active", "max_len", "top_k")
_TENANT_FLOATS = ("temperature", "top_p", "min_p")
_STEP_INTS = ("scheduled", "row_token", "row_position")


class CudaSlots:
    """Owns the tensors behind a native SlotTable, and the batches made of it."""

    def __init__(self, backend: CudaBackend, num_slots: int, vocab_size: int) -> None:
        device = backend.device
        self._ops = backend
        self._vocab_size = vocab_size
        num_fields = len(_TENANT_INTS) + len(_TENANT_FLOATS) + 1
        self._tenants = torch.zeros(num_fields, num_slots, dtype=torch.int32, device=device)
        # Not of the native table: only the kernel of logprobs reads it.
        self.num_logprobs = self._tenants[-1]
        self.num_logprobs.fill_(-1)
        self._ints = dict(zip(_TENANT_INTS, self._tenants, strict=False))
        for name in _STEP_INTS:
            self._ints[name] = torch.zeros(num_slots, dtype=torch.int32, device=device)
        floats = self._tenants[len(_TENANT_INTS) : -1].view(torch.float32)
        self._floats = dict(zip(_TENANT_FLOATS, floats, strict=True))
        self._seed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        words = -(-vocab_size // 32)
        self._end_ids = torch.zeros(num_slots, words, dtype=torch.int32, device=device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._ring = _pinned(torch.zeros(RING_ROWS, num_slots, dtype=torch.int32))
        self._stamps = _pinned(torch.zeros(RING_ROWS, 2, dtype=torch.int64))
        self.ring = self._ring.numpy()
        rows = _logprobs_rows(num_slots)
        # TokenLogprobs of slot s and step i in row i % rows, also through `logprobs`, [rows, S].
        self.logprobs_out = _pinned(torch.zeros(rows, num_slots, LOGPROBS_WORDS, dtype=torch.int32))
        self.logprobs = self.logprobs_out.numpy().view(LOGPROBS_RECORD)[..., 0]
        self._scheduled: frozenset[int] | None = None
        self._next_row = 0
        self.num_slots = num_slots
        self.table = SlotTable(
            vocab=vocab_size,
            **self._ints,
            **self._floats,
            seed=self._seed,
            end_ids=self._end_ids,
            counter=self._counter,
            ring=self._ring.data_ptr(),
            stamps=self._stamps.data_ptr(),
            ring_rows=RING_ROWS,
        )
        self.schedule(())

    def take(self, slot: int, setup: SlotSetup) -> None:
        """A new tenant, not active yet; nothing of the old one stays."""
        # More than the vocabulary keeps everything, as 0 does.
        top_k = setup.top_k if setup.top_k < self._vocab_size else 0
        floats = np.array([getattr(setup, name) for name in _TENANT_FLOATS], dtype=np.float32)
        ints = np.array([0, 0, 0, setup.max_len, top_k], dtype=np.int32)
        num_logprobs = np.array([setup.num_logprobs], dtype=np.int32)
        # Copies of single numbers would each wait for the device.
        tenant = np.concatenate([ints, floats.view(np.int32), num_logprobs])
        self._tenants[:, slot].copy_(self._send(tenant))
        # The native side reads the same 64 bits as unsigned.
        seed = np.array([setup.seed], dtype=np.uint64).view(np.int64)
        self._seed[slot : slot + 1].copy_(self._send(seed))
        self._end_ids[slot].copy_(self._send(_bitmap(setup.end_token_ids, self._vocab_size)))
        self._scheduled = None

    def schedule(self, slots: tuple[int, ...]) -> None:
        """These slots decode in the steps to come, as long as they are active."""
        wanted = frozenset(slots)
        if wanted == self._scheduled:
            return
        mask = np.zeros(self.num_slots, dtype=np.int32)
        mask[list(slots)] = 1
        self._ints["scheduled"].copy_(self._send(mask))
        self._ops.begin_command(self.table)
        self._scheduled = wanted

    def decode_batch(self) -> ForwardBatch:
        """All slots as rows; the tensors keep their places, so the batch serves for ever."""
        return self._batch(self.num_slots, ())

    def row_batch(self, slot: int, position: int, token_id: int) -> tuple[ForwardBatch, int]:
        """A decode step of one slot, whatever the table says, and the row it has in it."""
        for name, value in (("row_position", position), ("row_token", token_id)):
            self._ints[name].fill_(-1)
            self._ints[name][slot] = value
        self._scheduled = None
        return self.decode_batch(), slot

    def chunk_batch(self, chunks: tuple[PrefillChunk, ...]) -> ForwardBatch:
        """The rows of the chunks, one chunk after another."""
        return self._batch(0, chunks)

    def mixed_batch(self, chunks: tuple[PrefillChunk, ...]) -> ForwardBatch:
        """All slots as decode rows, then the chunks: the weights are read once for both."""
        return self._batch(self.num_slots, chunks)

    def _batch(self, num_decode: int, chunks: tuple[PrefillChunk, ...]) -> ForwardBatch:
        spans, sample_rows, first = [], list(range(num_decode)), num_decode
        for chunk in chunks:
            end = first + len(chunk.token_ids)
            spans.append(ChunkSpan(first, end, chunk.slot, chunk.start))
            if chunk.sample:
                sample_rows.append(end - 1)
            first = end
        # One copy for both, before which nothing can run. Rows that nobody asked for are idle, as
        # the table's are here.
        num_rows = self._ops.num_rows(first)
        array = np.full(num_rows + len(sample_rows), -1, dtype=np.int32)
        for chunk, span in zip(chunks, spans, strict=True):
            array[span.first_row : span.end_row] = chunk.token_ids
        array[num_rows:] = sample_rows
        sent = self._send(array)
        return ForwardBatch(
            token_ids=sent[:num_rows],
            slots=torch.empty(0, dtype=torch.int32),
            positions=self._ints["row_position"],
            num_decode_rows=num_decode,
            chunks=tuple(spans),
            sample_rows=sent[num_rows:] if chunks else None,
            sampled_chunks=last_rows(num_decode, chunks),
            table=self.table if num_decode else None,
        )

    def arrive(self, chunks: list[PrefillChunk]) -> Tensor:
        """The prompts of these chunks' slots are in the cache; their slots, int32 [B]."""
        slots = self._send(np.array([chunk.slot for chunk in chunks], dtype=np.int32))
        ends = np.array([chunk.start + len(chunk.token_ids) for chunk in chunks], dtype=np.int32)
        self._ints["length"].index_copy_(0, slots.long(), self._send(ends))
        return slots

    def next_ring_row(self) -> int:
        """The row of the ring that the next call of `sample` writes."""
        row = self._next_row
        self._next_row = (row + 1) % RING_ROWS
        return row

    def last_stamps(self, count: int) -> np.ndarray[Any, Any]:
        """Begin and end of the last `count` steps, or as many as the ring holds.

        int64 [count, 2], ns of the device's clock.
        """
        rows = (np.arange(-min(count, RING_ROWS), 0) + self._next_row) % RING_ROWS
        return self._stamps.numpy()[rows]

    def _send(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A copy on the device; the pinned one lives until the device has read it."""
        pinned = _pinned(torch.from_numpy(array))
        return pinned.to(self._ops.device, non_blocking=True)


def _logprobs_rows(num_slots: int) -> int:
    """RING_ROWS, or a part of them, so that the ring's row gives the row of the logprobs."""
    rows = RING_ROWS
    while rows > 1 and rows * num_slots * LOGPROBS_RECORD.itemsize > _LOGPROBS_BYTES:
        rows //= 2
    return rows


def _pinned(tensor: Tensor) -> Tensor:
    """A copy in memory that the device reads and writes by itself."""
    return tensor.pin_memory()


def _bitmap(token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray[Any, Any]:
    """int32 [ceil(V / 32)], bit id % 32 of word id / 32. None past the vocabulary is drawn."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[[token_id for token_id in token_ids if token_id < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
