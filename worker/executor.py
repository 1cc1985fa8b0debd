"""Runs step commands on a rank: checked against the slots, begun on the device, then collected.

Every rank runs the same commands on the same records, so all of them take the same branches and
enter the same collectives with the same sizes.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any

from worker.batch import DecodeRow, PrefillChunk, RowResult, SlotSetup, StepCommand, StepResult
from worker.errors import PeerLostError, ProtocolError, StepError
from worker.memory_plan import ServingLimits
from worker.runner import CORRUPTED, Outcome, Runner, StepWork
from worker.slots import CommandCheck, SlotRecord

_DIGEST_ENTRY = struct.Struct("<IQIi")


@dataclass(frozen=True, slots=True)
class Submitted:
    """A command under way: its rows' records as they were, and what the runner began."""

    command: StepCommand
    records: dict[int, SlotRecord]
    started: Any


@dataclass(slots=True)
class _RowOutput:
    token_ids: list[int] = field(default_factory=list)
    corrupted: bool = False


class Executor:
    """A rank's slots under one epoch.

    `submit` is called from one thread at a time and `collect` from one, in the same order; they may
    be two threads.
    """

    def __init__(self, runner: Runner, limits: ServingLimits, vocab_size: int, epoch: int) -> None:
        self.epoch = epoch
        self.limits = limits
        self.runner = runner
        self._vocab_size = vocab_size
        self._slots = [SlotRecord() for _ in range(limits.num_slots)]
        # The slot that has each decode row.
        self._row_owners = [-1] * limits.max_running
        self._last_step_id = 0
        self._failed = False

    def run(self, command: StepCommand) -> StepResult:
        """Submits one command and collects it."""
        return self.collect(self.submit(command))

    def submit(self, command: StepCommand) -> Submitted:
        """Begins a command.

        Raises ProtocolError before anything is touched if the command does not fit, StepError if it
        failed on the way; after either the executor takes no more commands.
        """
        try:
            self._check(command)
            submitted = self._begin(command)
        except ProtocolError:
            self._failed = True
            raise
        except Exception as error:
            self._failed = True
            raise _failure(command, error) from error
        self._last_step_id = command.step_id
        return submitted

    def collect(self, submitted: Submitted) -> StepResult:
        """Waits for a command and gives its result. Raises StepError if it failed."""
        command = submitted.command
        try:
            outcome = self.runner.finish(submitted.started)
        except Exception as error:
            self._failed = True
            raise _failure(command, error) from error
        return self._result(command, submitted.records, outcome)

    def _check(self, command: StepCommand) -> None:
        if self._failed:
            raise ProtocolError("an earlier command failed; configure the rank anew")
        if command.epoch != self.epoch:
            raise ProtocolError(f"command of epoch {command.epoch}, this is epoch {self.epoch}")
        if command.step_id != self._last_step_id + 1:
            raise ProtocolError(f"step id {command.step_id} does not follow {self._last_step_id}")
        CommandCheck(self._slots, self._row_owners, self.limits, self._vocab_size).run(command)

    def _begin(self, command: StepCommand) -> Submitted:
        chunks = tuple(row for row in command.rows if isinstance(row, PrefillChunk))
        for chunk in chunks:
            if chunk.setup is not None:
                self._take(chunk, chunk.setup)
            self._slots[chunk.slot].begin_chunk(chunk)
        decode_slots = tuple(row.slot for row in command.rows if isinstance(row, DecodeRow))
        masks = {row.slot: row.allowed_tokens for row in command.rows if row.allowed_tokens}
        records = {row.slot: self._slots[row.slot] for row in command.rows}
        started = self.runner.start(StepWork(decode_slots, chunks, command.num_steps, masks))
        return Submitted(command, records, started)

    def _take(self, chunk: PrefillChunk, setup: SlotSetup) -> None:
        """A new tenant, with its prefix; in the order of the command's rows."""
        # A record of its own: results of the old tenant may still be on their way.
        self._slots[chunk.slot] = SlotRecord.of(chunk)
        self._row_owners[setup.decode_row] = chunk.slot
        prefix = chunk.prefix
        self.runner.take(chunk.slot, setup, 0 if prefix is None else prefix.length)
        if prefix is not None and prefix.source_slot != chunk.slot:
            attention = self.runner.decoder.attention
            attention.copy_prefix(prefix.source_slot, chunk.slot, prefix.length)

    def _result(
        self, command: StepCommand, records: dict[int, SlotRecord], outcome: Outcome
    ) -> StepResult:
        outputs = {row.slot: _RowOutput() for row in command.rows}
        decoding = {row.slot for row in command.rows if isinstance(row, DecodeRow)}
        digest = hashlib.blake2b(struct.pack("<Q", command.step_id), digest_size=8)
        for drawn in outcome.steps:
            for slot, token_id in drawn:
                record = records[slot]
                if slot in decoding:
                    record.length += 1
                digest.update(_DIGEST_ENTRY.pack(slot, record.generation, record.length, token_id))
                if token_id == CORRUPTED:
                    outputs[slot].corrupted = True
                else:
                    outputs[slot].token_ids.append(token_id)
        return StepResult(
            epoch=self.epoch,
            step_id=command.step_id,
            digest=int.from_bytes(digest.digest(), "little"),
            rows=tuple(
                RowResult(
                    row.slot,
                    row.generation,
                    tuple(outputs[row.slot].token_ids),
                    outputs[row.slot].corrupted,
                    tuple(outcome.logprobs.get(row.slot, ())),
                    tuple(outcome.prompt_logprobs.get(row.slot, ())),
                )
                for row in command.rows
            ),
            duration_ns=outcome.duration_ns,
        )


def _failure(command: StepCommand, error: Exception) -> StepError:
    """Tells whether the rank can go on in another group."""
    kind = PeerLostError if isinstance(error, PeerLostError) else StepError
    return kind(f"step {command.step_id} failed: {error}")
