"""Runs step commands on a rank: one forward for all rows, then the draw, then the slots' records.

Every rank runs the same commands on the same records, so all of them take the same branches and
enter the same collectives with the same sizes.
"""

from __future__ import annotations

import hashlib
import struct
import time
from dataclasses import dataclass, field

from torch import Tensor

from worker.batch import (
    BatchBuffers,
    DecodeRow,
    ForwardBatch,
    PrefillChunk,
    RowResult,
    StepCommand,
    StepResult,
)
from worker.decoder import Decoder
from worker.errors import ProtocolError, StepError
from worker.sampler import Sampler
from worker.slots import SlotRecord, check_command

_DIGEST_ENTRY = struct.Struct("<IQIi")


@dataclass(slots=True)
class _RowOutput:
    slot: int
    generation: int
    token_ids: list[int] = field(default_factory=list)
    corrupted: bool = False


class Executor:
    """A rank's slots and decoder under one epoch. Not thread-safe: one command at a time."""

    def __init__(self, decoder: Decoder, epoch: int) -> None:
        self.decoder = decoder
        self.epoch = epoch
        self.limits = decoder.limits
        self._vocab_size = decoder.config.vocab_size
        self._slots = [SlotRecord() for _ in range(self.limits.num_slots)]
        self._sampler = Sampler(decoder.ops, self.limits.num_slots, self._vocab_size)
        self._buffers = BatchBuffers(self.limits.max_step_tokens)
        self._last_step_id = 0
        self._failed = False

    def run(self, command: StepCommand) -> StepResult:
        """Runs one command.

        Raises ProtocolError before anything is touched if the command does not fit, StepError if it
        failed on the way; after either the executor takes no more commands.
        """
        started_ns = time.perf_counter_ns()
        try:
            self._check(command)
            outputs, digest = self._run(command)
        except ProtocolError:
            self._failed = True
            raise
        except Exception as error:
            self._failed = True
            raise StepError(f"step {command.step_id} failed: {error}") from error
        self._last_step_id = command.step_id
        return StepResult(
            epoch=self.epoch,
            step_id=command.step_id,
            digest=digest,
            rows=tuple(
                RowResult(row.slot, row.generation, tuple(row.token_ids), row.corrupted)
                for row in outputs
            ),
            duration_ns=time.perf_counter_ns() - started_ns,
        )

    def _check(self, command: StepCommand) -> None:
        if self._failed:
            raise ProtocolError("an earlier command failed; configure the rank anew")
        if command.epoch != self.epoch:
            raise ProtocolError(f"command of epoch {command.epoch}, this is epoch {self.epoch}")
        if command.step_id != self._last_step_id + 1:
            raise ProtocolError(f"step id {command.step_id} does not follow {self._last_step_id}")
        check_command(command, self._slots, self.limits, self._vocab_size)

    def _run(self, command: StepCommand) -> tuple[list[_RowOutput], int]:
        outputs = [_RowOutput(row.slot, row.generation) for row in command.rows]
        digest = hashlib.blake2b(struct.pack("<Q", command.step_id), digest_size=8)
        chunks = [row for row in command.rows if isinstance(row, PrefillChunk)]
        decode = [
            out
            for row, out in zip(command.rows, outputs, strict=True)
            if isinstance(row, DecodeRow)
        ]
        sampled_chunks = [
            out
            for row, out in zip(command.rows, outputs, strict=True)
            if isinstance(row, PrefillChunk) and row.sample
        ]
        for chunk in chunks:
            self._begin_chunk(chunk)
        for _ in range(command.num_steps):
            rows = [row for row in decode if self._slots[row.slot].active]
            if not rows and not chunks:
                break
            batch = self._batch(rows, chunks)
            logits = self.decoder.forward(batch)
            self._advance(rows, chunks)
            sampling = rows + sampled_chunks
            if sampling:
                self._sample(logits, sampling, digest)
        return outputs, int.from_bytes(digest.digest(), "little")

    def _begin_chunk(self, chunk: PrefillChunk) -> None:
        if chunk.setup is not None:
            self._slots[chunk.slot].take(chunk.generation, chunk.setup)
            self._sampler.set_slot(chunk.slot, chunk.setup)

    def _batch(self, rows: list[_RowOutput], chunks: list[PrefillChunk]) -> ForwardBatch:
        records = ((row.slot, self._slots[row.slot]) for row in rows)
        decode = [(slot, record.num_computed, record.last_token) for slot, record in records]
        return self._buffers.fill(decode, chunks)

    def _advance(self, rows: list[_RowOutput], chunks: list[PrefillChunk]) -> None:
        """What the forward consumed is in the cache now."""
        for row in rows:
            self._slots[row.slot].num_computed += 1
        for chunk in chunks:
            self._slots[chunk.slot].num_computed += len(chunk.token_ids)

    def _sample(self, logits: Tensor, rows: list[_RowOutput], digest: hashlib.blake2b) -> None:
        slots = [row.slot for row in rows]
        # A token's position is its index in the sequence: the number of tokens before it.
        positions = [self._slots[slot].num_computed for slot in slots]
        token_ids = self._sampler.sample(logits, slots, positions)
        for row, position, token_id in zip(rows, positions, token_ids, strict=True):
            digest.update(_DIGEST_ENTRY.pack(row.slot, row.generation, position, token_id))
            if token_id < 0:
                self._corrupt(row)
            else:
                row.token_ids.append(token_id)
                self._slots[row.slot].accept(token_id)

    def _corrupt(self, row: _RowOutput) -> None:
        """Ends a row whose logits hold a NaN; its cache is zeroed, so that nothing can spread."""
        row.corrupted = True
        self._slots[row.slot].stop()
        self.decoder.cache.clear(row.slot)
