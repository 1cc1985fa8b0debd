"""The slot table in GPU memory: decode steps read and change it without the host.

R rows, one for each slot that may decode; V vocabulary. Everything here is put on the device's
stream; nothing waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker._native import AdjustTable, SlotTable
from worker.batch import (
    ChunkSpan,
    ForwardBatch,
    LogitAdjustment,
    PrefillChunk,
    SlotSetup,
    last_rows,
)
from worker.cuda_backend import CudaBackend
from worker.runner import LOGPROBS_RECORD, LOGPROBS_WORDS

# Steps whose results may wait to be read: 16 commands of 1,024, the most the scheduler can ask for.
RING_ROWS = 16 * 1024
# With logprobs a step takes 168 bytes a row: up to 12 rows all of these fit, with 64 an eighth.
_LOGPROBS_BYTES = 32 << 20
# What a new tenant sets, 32 bits each; and what is written only on the device.
_TENANT_INTS = ("last_token", "length", "active", "max_len", "top_k")
_TENANT_FLOATS = ("temperature", "top_p", "min_p")
_ADJUST_INTS = ("flags", "min_len")
_ADJUST_FLOATS = ("frequency_penalty", "presence_penalty", "repetition_penalty")
_STEP_INTS = ("scheduled", "row_token", "row_position")
# Flags of AdjustTable.
_REPETITION, _FREQUENCY, _BIASED, _MIN_LEN, _MASKED = (1 << bit for bit in range(5))
_SEEN_IN_PROMPT = 1 << 30
# `scheduled` of a row that decodes in one step alone, and in all to come.
_ONCE, _ALWAYS = 1, 2
_NEUTRAL = LogitAdjustment()


class CudaSlots:
    """Owns the tensors behind a native SlotTable and AdjustTable, and the batches made of it."""

    def __init__(self, backend: CudaBackend, num_rows: int, vocab_size: int) -> None:
        device = backend.device
        self._ops = backend
        self._vocab_size = vocab_size
        names = (
            *_TENANT_INTS,
            *_ADJUST_INTS,
            "cache_slot",
            "num_logprobs",
            *_TENANT_FLOATS,
            *_ADJUST_FLOATS,
        )
        # A column for each row of the table.
        self._tenants = torch.zeros(len(names), num_rows, dtype=torch.int32, device=device)
        fields = dict(zip(names, self._tenants, strict=True))
        fields |= {
            name: torch.zeros(num_rows, dtype=torch.int32, device=device) for name in _STEP_INTS
        }
        for name in (*_TENANT_FLOATS, *_ADJUST_FLOATS):
            fields[name] = fields[name].view(torch.float32)
        self.row_position = fields["row_position"]
        # Not of the native tables: other kernels read these.
        self.cache_slot, self.num_logprobs = fields["cache_slot"], fields["num_logprobs"]
        self.num_logprobs.fill_(-1)
        self._ints = {name: fields[name] for name in (*_TENANT_INTS, *_STEP_INTS)}
        self._seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        words = -(-vocab_size // 32)
        self._end_ids = torch.zeros(num_rows, words, dtype=torch.int32, device=device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._ring = _pinned(torch.zeros(RING_ROWS, num_rows, dtype=torch.int32))
        self._stamps = _pinned(torch.zeros(RING_ROWS, 2, dtype=torch.int64))
        self.ring = self._ring.numpy()
        ring_rows = _logprobs_rows(num_rows)
        # TokenLogprobs of row r and step i in [i % N, r], also through `logprobs`, [N, R].
        self.logprobs_out = _pinned(
            torch.zeros(ring_rows, num_rows, LOGPROBS_WORDS, dtype=torch.int32)
        )
        self.logprobs = self.logprobs_out.numpy().view(LOGPROBS_RECORD)[..., 0]
        self._scheduled: dict[int, int] | None = None
        self._next_row = 0
        self.num_rows = num_rows
        self.table = SlotTable(
            vocab=vocab_size,
            **self._ints,
            **{name: fields[name] for name in _TENANT_FLOATS},
            seed=self._seed,
            end_ids=self._end_ids,
            counter=self._counter,
            ring=self._ring.data_ptr(),
            stamps=self._stamps.data_ptr(),
            ring_rows=RING_ROWS,
        )
        self._counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self._bias = torch.zeros(num_rows, vocab_size, device=device)
        self._mask = torch.zeros(num_rows, words, dtype=torch.int32, device=device)
        self.adjust = AdjustTable(
            **{name: fields[name] for name in (*_ADJUST_INTS, *_ADJUST_FLOATS)},
            counts=self._counts,
            bias=self._bias,
            mask=self._mask,
        )
        self.schedule({})

    def take(self, slot: int, setup: SlotSetup) -> None:
        """A new tenant of `slot` in its decode row, not active yet; nothing of an old one stays."""
        row = setup.decode_row
        # More than the vocabulary keeps everything, as 0 does.
        top_k = setup.top_k if setup.top_k < self._vocab_size else 0
        adjustment = setup.adjustment or _NEUTRAL
        ints = [0, 0, 0, setup.max_len, top_k]
        ints += [adjust_flags(setup), adjustment.min_len, slot, setup.num_logprobs]
        floats = [getattr(setup, name) for name in _TENANT_FLOATS]
        floats += [getattr(adjustment, name) for name in _ADJUST_FLOATS]
        # Copies of single numbers would each wait for the device.
        tenant = [np.array(ints, dtype=np.int32), np.array(floats, dtype=np.float32).view(np.int32)]
        self._tenants[:, row].copy_(self.send(np.concatenate(tenant)))
        # The native side reads the same 64 bits as unsigned.
        seed = np.array([setup.seed], dtype=np.uint64).view(np.int64)
        self._seed[row : row + 1].copy_(self.send(seed))
        self._end_ids[row].copy_(self.send(_bitmap(setup.end_token_ids, self._vocab_size)))
        self._adjust(row, adjust_flags(setup), adjustment)
        self._scheduled = None

    def _adjust(self, row: int, flags: int, adjustment: LogitAdjustment) -> None:
        """What the row's flags do not name stays as it was, and is not read."""
        if flags & (_REPETITION | _FREQUENCY):
            counts = np.zeros(self._vocab_size, dtype=np.int32)
            counts[np.array(adjustment.prompt_token_ids, dtype=np.int64)] = _SEEN_IN_PROMPT
            np.add.at(counts, np.array(adjustment.generated_token_ids, dtype=np.int64), 1)
            self._counts[row].copy_(self.send(counts))
        if flags & _BIASED:
            bias = np.zeros(self._vocab_size, dtype=np.float32)
            for token_id, value in adjustment.biases:
                bias[token_id] = value
            self._bias[row].copy_(self.send(bias))

    def allow(self, masks: Mapping[int, bytes]) -> None:
        """The tokens that these rows may sample next, as worker.proto packs them."""
        if not masks:
            return
        words = self._mask.shape[1]
        array = np.zeros((len(masks), words + 1), dtype=np.int32)
        array[:, words] = list(masks)
        bits = array[:, :words].view(np.uint8)
        for index, mask in enumerate(masks.values()):
            bits[index, : len(mask)] = np.frombuffer(mask, dtype=np.uint8)
        sent = self.send(array)
        self._mask.index_copy_(0, sent[:, words].long(), sent[:, :words])

    def schedule(self, rows: Mapping[int, bool]) -> None:
        """These rows decode as long as they are active; those that are True in one step alone."""
        wanted = {row: _ONCE if once else _ALWAYS for row, once in rows.items()}
        if wanted == self._scheduled:
            return
        scheduled = np.zeros(self.num_rows, dtype=np.int32)
        for row, how in wanted.items():
            scheduled[row] = how
        self._ints["scheduled"].copy_(self.send(scheduled))
        self._ops.begin_command(self.table)
        # The device takes those that were to decode once off by itself.
        self._scheduled = None if _ONCE in wanted.values() else wanted

    def decode_batch(self) -> ForwardBatch:
        """All rows of the table; the tensors keep their places, so the batch serves for ever."""
        return self._batch(self.num_rows, ())

    def row_batch(self, slot: int, position: int, token_id: int) -> tuple[ForwardBatch, int]:
        """A decode step of one slot, whatever the table says, and the row it has in it."""
        row = slot % self.num_rows
        for name, value in (("row_position", position), ("row_token", token_id)):
            self._ints[name].fill_(-1)
            self._ints[name][row] = value
        self.cache_slot[row] = slot
        self._scheduled = None
        return self.decode_batch(), row

    def chunk_batch(self, chunks: tuple[PrefillChunk, ...]) -> ForwardBatch:
        """The rows of the chunks, one chunk after another."""
        return self._batch(0, chunks)

    def mixed_batch(self, chunks: tuple[PrefillChunk, ...]) -> ForwardBatch:
        """All rows of the table, then the chunks: the weights are read once for both."""
        return self._batch(self.num_rows, chunks)

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
        sent = self.send(array)
        return ForwardBatch(
            token_ids=sent[:num_rows],
            slots=self.cache_slot,
            positions=self.row_position,
            num_decode_rows=num_decode,
            chunks=tuple(spans),
            sample_rows=sent[num_rows:] if chunks else None,
            sampled_chunks=last_rows(num_decode, chunks),
            table=self.table if num_decode else None,
        )

    def arrive(self, lengths: Mapping[int, int]) -> Tensor:
        """So many tokens of these rows' slots, their prompts, are in the cache; int32 [B] rows."""
        sent = self.send_ints([*lengths, *lengths.values()]).view(2, -1)
        self._ints["length"].index_copy_(0, sent[0].long(), sent[1])
        return sent[0]

    def empty_records(self, count: int) -> Tensor:
        """Memory of TokenLogprobs that the device writes, int32 [count, LOGPROBS_WORDS]."""
        return _pinned(torch.zeros(count, LOGPROBS_WORDS, dtype=torch.int32))

    def send_ints(self, values: Sequence[int]) -> Tensor:
        """int32 on the device."""
        return self.send(np.array(values, dtype=np.int32))

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

    def send(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A copy on the device; the pinned one lives until the device has read it."""
        pinned = _pinned(torch.from_numpy(array))
        return pinned.to(self._ops.device, non_blocking=True)


def adjust_flags(setup: SlotSetup) -> int:
    """What is done to the slot's logits: the flags of AdjustTable."""
    wanted = setup.adjustment or _NEUTRAL
    return (
        _REPETITION * (wanted.repetition_penalty != 1)
        + _FREQUENCY * (wanted.frequency_penalty != 0 or wanted.presence_penalty != 0)
        + _BIASED * bool(wanted.biases)
        + _MIN_LEN * (wanted.min_len > 0)
        + _MASKED * setup.masked
    )


def _logprobs_rows(num_rows: int) -> int:
    """RING_ROWS, or a part of them, so that the ring's row gives the row of the logprobs."""
    rows = RING_ROWS
    while rows > 1 and rows * num_rows * LOGPROBS_RECORD.itemsize > _LOGPROBS_BYTES:
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
