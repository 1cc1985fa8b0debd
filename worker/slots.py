"""What a rank knows of each slot, and the check of a command against it.

The scheduler owns the slot table; these records only hold what a step needs and refuse a command
that does not fit them, before anything is touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from worker.batch import MAX_LOGPROBS, DecodeRow, PrefillChunk, SlotSetup, StepCommand
from worker.errors import ProtocolError
from worker.memory_plan import ServingLimits


@dataclass(slots=True)
class SlotRecord:
    """A slot's tenant: `num_computed` of its prompt's tokens are in the cache or on the way.

    `length`: tokens of the sequence as far as results have been collected.
    """

    generation: int = 0
    num_computed: int = 0
    prompt_complete: bool = False
    max_len: int = 0
    length: int = 0

    def begin_chunk(self, chunk: PrefillChunk) -> None:
        """The chunk will be computed."""
        self.num_computed += len(chunk.token_ids)
        self.prompt_complete = chunk.sample
        self.length = self.num_computed


def check_command(
    command: StepCommand, slots: list[SlotRecord], limits: ServingLimits, vocab_size: int
) -> None:
    """Raises ProtocolError if the command does not fit the slots or the limits."""
    if not command.rows:
        raise ProtocolError("a command needs at least one row")
    if command.num_steps < 1:
        raise ProtocolError(f"num_steps must be at least 1, not {command.num_steps}")
    seen: set[int] = set()
    num_tokens = 0
    chunks_began = False
    for row in command.rows:
        if row.slot >= len(slots):
            raise ProtocolError(f"slot {row.slot} is not in [0, {len(slots)})")
        if row.slot in seen:
            raise ProtocolError(f"slot {row.slot} has two rows in one command")
        seen.add(row.slot)
        if isinstance(row, DecodeRow):
            if chunks_began:
                raise ProtocolError(f"slot {row.slot}: decode rows must come before prefill chunks")
            _check_decode(row, slots[row.slot])
            num_tokens += 1
        else:
            chunks_began = True
            _check_chunk(row, slots[row.slot], limits, vocab_size)
            num_tokens += len(row.token_ids)
    if chunks_began and command.num_steps > 1:
        raise ProtocolError(f"num_steps is {command.num_steps}, but a row is a prefill chunk")
    if num_tokens > limits.max_step_tokens:
        raise ProtocolError(
            f"{num_tokens} tokens in one forward, max_step_tokens is {limits.max_step_tokens}"
        )


def _check_decode(row: DecodeRow, record: SlotRecord) -> None:
    _check_generation(row, record)
    if not record.prompt_complete:
        raise ProtocolError(f"slot {row.slot}: decode before its prompt was sampled from")


def _check_chunk(
    chunk: PrefillChunk, record: SlotRecord, limits: ServingLimits, vocab_size: int
) -> None:
    slot = chunk.slot
    if not chunk.token_ids:
        raise ProtocolError(f"slot {slot}: a prefill chunk needs at least one token")
    worst = max(chunk.token_ids)
    if worst >= vocab_size:
        raise ProtocolError(f"slot {slot}: token id {worst} is not in [0, {vocab_size})")
    if chunk.setup is not None:
        if chunk.generation <= record.generation:
            raise ProtocolError(
                f"slot {slot}: a first chunk needs a generation above {record.generation}, "
                f"not {chunk.generation}"
            )
        _check_setup(slot, chunk.setup, limits)
        expected, max_len = 0, chunk.setup.max_len
    else:
        _check_generation(chunk, record)
        if record.prompt_complete or not record.max_len:
            raise ProtocolError(f"slot {slot}: its prompt is complete; a new one needs a setup")
        expected, max_len = record.num_computed, record.max_len
    if chunk.start != expected:
        raise ProtocolError(f"slot {slot}: chunk starts at {chunk.start}, expected {expected}")
    end = chunk.start + len(chunk.token_ids)
    if end + chunk.sample > max_len:
        raise ProtocolError(f"slot {slot}: {end + chunk.sample} tokens, max_len is {max_len}")


def _check_generation(row: DecodeRow | PrefillChunk, record: SlotRecord) -> None:
    if row.generation != record.generation:
        raise ProtocolError(
            f"slot {row.slot}: generation {row.generation} is not the present tenant's "
            f"({record.generation})"
        )


def _check_setup(slot: int, setup: SlotSetup, limits: ServingLimits) -> None:
    if not 1 <= setup.max_len <= limits.max_seq_len:
        raise ProtocolError(
            f"slot {slot}: max_len {setup.max_len} is not in [1, {limits.max_seq_len}]"
        )
    if not (math.isfinite(setup.temperature) and setup.temperature >= 0):
        raise ProtocolError(f"slot {slot}: temperature {setup.temperature} must be finite, >= 0")
    for name, value in (("top_p", setup.top_p), ("min_p", setup.min_p)):
        if not 0 <= value <= 1:
            raise ProtocolError(f"slot {slot}: {name} {value} is not in [0, 1]")
    if not -1 <= setup.num_logprobs <= MAX_LOGPROBS:
        raise ProtocolError(
            f"slot {slot}: num_logprobs {setup.num_logprobs} is not in [0, {MAX_LOGPROBS}]; "
            "leave it out for none"
        )
