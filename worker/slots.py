"""What a rank knows of each slot, and the check of a command against it.

The scheduler owns the slot table; these records only hold what a step needs and refuse a command
that does not fit them, before anything is touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from worker.batch import (
    MAX_LOGPROBS,
    DecodeRow,
    LogitAdjustment,
    PrefillChunk,
    Prefix,
    SlotSetup,
    StepCommand,
)
from worker.errors import ProtocolError
from worker.memory_plan import ServingLimits


@dataclass(slots=True)
class SlotRecord:
    """A slot's tenant: `num_computed` of its prompt's tokens are in the cache or on the way.

    `length`: of the whole sequence, tokens that decode steps have computed as far as results have
    been collected; the last one sampled is never among them.
    """

    generation: int = 0
    num_computed: int = 0
    prompt_complete: bool = False
    max_len: int = 0
    length: int = 0
    decode_row: int = -1
    masked: bool = False
    num_prompt_logprobs: int = -1

    @classmethod
    def of(cls, chunk: PrefillChunk) -> SlotRecord:
        """The record of a first chunk's tenant, before the chunk."""
        assert chunk.setup is not None
        setup = chunk.setup
        return cls(
            generation=chunk.generation,
            num_computed=0 if chunk.prefix is None else chunk.prefix.length,
            max_len=setup.max_len,
            decode_row=setup.decode_row,
            masked=setup.masked,
            num_prompt_logprobs=setup.num_prompt_logprobs,
        )

    def begin_chunk(self, chunk: PrefillChunk) -> None:
        """The chunk will be computed."""
        self.num_computed += len(chunk.token_ids)
        self.prompt_complete = chunk.sample
        self.length = self.num_computed


class CommandCheck:
    """Checks one command against the slots as they were before it.

    `row_owners`: the slot that has each decode row, -1 for none.
    """

    def __init__(
        self,
        slots: Sequence[SlotRecord],
        row_owners: Sequence[int],
        limits: ServingLimits,
        vocab_size: int,
    ) -> None:
        self._slots = slots
        self._row_owners = row_owners
        self._limits = limits
        self._vocab_size = vocab_size
        # Slots with a row in the command; those taken anew by it; decode rows of all of them.
        self._seen: set[int] = set()
        self._taken: set[int] = set()
        self._rows: set[int] = set()

    def run(self, command: StepCommand) -> None:
        """Raises ProtocolError if the command does not fit the slots or the limits."""
        if not command.rows:
            raise ProtocolError("a command needs at least one row")
        if command.num_steps < 1:
            raise ProtocolError(f"num_steps must be at least 1, not {command.num_steps}")
        num_tokens = 0
        chunks_began = False
        for row in command.rows:
            self._check_slot(row.slot)
            if isinstance(row, DecodeRow):
                if chunks_began:
                    raise ProtocolError(
                        f"slot {row.slot}: decode rows must come before prefill chunks"
                    )
                self._check_decode(row)
                num_tokens += 1
            else:
                chunks_began = True
                self._check_chunk(row)
                num_tokens += len(row.token_ids)
        if chunks_began and command.num_steps > 1:
            raise ProtocolError(f"num_steps is {command.num_steps}, but a row is a prefill chunk")
        if num_tokens > self._limits.max_step_tokens:
            raise ProtocolError(
                f"{num_tokens} tokens in one forward, max_step_tokens is "
                f"{self._limits.max_step_tokens}"
            )

    def _check_slot(self, slot: int) -> None:
        if slot >= len(self._slots):
            raise ProtocolError(f"slot {slot} is not in [0, {len(self._slots)})")
        if slot in self._seen:
            raise ProtocolError(f"slot {slot} has two rows in one command")
        self._seen.add(slot)

    def _check_decode(self, row: DecodeRow) -> None:
        record = self._slots[row.slot]
        _check_generation(row, record)
        if not record.prompt_complete:
            raise ProtocolError(f"slot {row.slot}: decode before its prompt was sampled from")
        self._check_owner(row.slot, record.decode_row)
        self._check_mask(row.slot, row.allowed_tokens, samples=True, masked=record.masked)

    def _check_chunk(self, chunk: PrefillChunk) -> None:
        slot = chunk.slot
        record = self._slots[slot]
        self._check_tokens(chunk)
        if chunk.setup is not None:
            self._check_first(chunk, chunk.setup)
            record = SlotRecord.of(chunk)
        else:
            _check_generation(chunk, record)
            if chunk.prefix is not None:
                raise ProtocolError(f"slot {slot}: a prefix comes with the setup only")
            if record.prompt_complete or not record.max_len:
                raise ProtocolError(f"slot {slot}: its prompt is complete; a new one needs a setup")
            self._check_owner(slot, record.decode_row)
        if chunk.start != record.num_computed:
            raise ProtocolError(
                f"slot {slot}: chunk starts at {chunk.start}, expected {record.num_computed}"
            )
        end = chunk.start + len(chunk.token_ids)
        if end + chunk.sample > record.max_len:
            raise ProtocolError(
                f"slot {slot}: {end + chunk.sample} tokens, max_len is {record.max_len}"
            )
        self._check_mask(slot, chunk.allowed_tokens, samples=chunk.sample, masked=record.masked)
        if (chunk.next_token_id >= 0) != (record.num_prompt_logprobs >= 0 and not chunk.sample):
            raise ProtocolError(
                f"slot {slot}: next_token_id comes where prompt logprobs are wanted and the chunk "
                "does not sample, and only there"
            )

    def _check_tokens(self, chunk: PrefillChunk) -> None:
        if not chunk.token_ids:
            raise ProtocolError(f"slot {chunk.slot}: a prefill chunk needs at least one token")
        worst = max(chunk.next_token_id, *chunk.token_ids)
        if worst >= self._vocab_size:
            raise ProtocolError(
                f"slot {chunk.slot}: token id {worst} is not in [0, {self._vocab_size})"
            )

    def _check_first(self, chunk: PrefillChunk, setup: SlotSetup) -> None:
        slot, generation = chunk.slot, self._slots[chunk.slot].generation
        if chunk.generation <= generation:
            raise ProtocolError(
                f"slot {slot}: a first chunk needs a generation above {generation}, "
                f"not {chunk.generation}"
            )
        _check_setup(slot, setup, self._limits, self._vocab_size)
        if chunk.prefix is not None:
            self._check_prefix(slot, chunk.prefix)
            if setup.num_prompt_logprobs >= 0:
                raise ProtocolError(
                    f"slot {slot}: prompt logprobs are wanted of a prefix that is not computed"
                )
        self._taken.add(slot)
        self._use_row(slot, setup.decode_row)

    def _check_owner(self, slot: int, decode_row: int) -> None:
        """The slot still has its decode row, and no earlier row of the command takes it."""
        owner = self._row_owners[decode_row]
        if owner != slot:
            raise ProtocolError(f"slot {slot}: its decode row {decode_row} is now slot {owner}'s")
        self._use_row(slot, decode_row)

    def _use_row(self, slot: int, decode_row: int) -> None:
        if decode_row in self._rows:
            raise ProtocolError(
                f"slot {slot}: decode row {decode_row} has another slot in this command"
            )
        self._rows.add(decode_row)

    def _check_prefix(self, slot: int, prefix: Prefix) -> None:
        name = f"slot {slot}: prefix of {prefix.length} positions of slot {prefix.source_slot}"
        if prefix.source_slot >= len(self._slots):
            raise ProtocolError(f"{name}, which is not in [0, {len(self._slots)})")
        if prefix.source_slot in self._taken:
            raise ProtocolError(f"{name}, which an earlier row of the command takes anew")
        source = self._slots[prefix.source_slot]
        if prefix.source_generation != source.generation:
            raise ProtocolError(
                f"{name}: generation {prefix.source_generation} is not its last tenant's "
                f"({source.generation})"
            )
        if not 1 <= prefix.length <= source.length:
            raise ProtocolError(f"{name}: it must be in [1, {source.length}], what is computed")

    def _check_mask(self, slot: int, allowed: bytes, *, samples: bool, masked: bool) -> None:
        expected = -(-self._vocab_size // 8) if samples and masked else 0
        if len(allowed) != expected:
            raise ProtocolError(
                f"slot {slot}: {len(allowed)} bytes of allowed_tokens, {expected} are due"
            )


def _check_generation(row: DecodeRow | PrefillChunk, record: SlotRecord) -> None:
    if row.generation != record.generation:
        raise ProtocolError(
            f"slot {row.slot}: generation {row.generation} is not the present tenant's "
            f"({record.generation})"
        )


def _check_setup(slot: int, setup: SlotSetup, limits: ServingLimits, vocab_size: int) -> None:
    if not 0 <= setup.decode_row < limits.max_running:
        raise ProtocolError(
            f"slot {slot}: decode row {setup.decode_row} is not in [0, {limits.max_running})"
        )
    if not 1 <= setup.max_len <= limits.max_seq_len:
        raise ProtocolError(
            f"slot {slot}: max_len {setup.max_len} is not in [1, {limits.max_seq_len}]"
        )
    if not (math.isfinite(setup.temperature) and setup.temperature >= 0):
        raise ProtocolError(f"slot {slot}: temperature {setup.temperature} must be finite, >= 0")
    for name, value in (("top_p", setup.top_p), ("min_p", setup.min_p)):
        if not 0 <= value <= 1:
            raise ProtocolError(f"slot {slot}: {name} {value} is not in [0, 1]")
    for name, count in (
        ("num_logprobs", setup.num_logprobs),
        ("num_prompt_logprobs", setup.num_prompt_logprobs),
    ):
        if not -1 <= count <= MAX_LOGPROBS:
            raise ProtocolError(
                f"slot {slot}: {name} {count} is not in [0, {MAX_LOGPROBS}]; leave it out for none"
            )
    if setup.adjustment is not None:
        _check_adjustment(slot, setup.adjustment, vocab_size)


def _check_adjustment(slot: int, adjustment: LogitAdjustment, vocab_size: int) -> None:
    for name, value in (
        ("frequency_penalty", adjustment.frequency_penalty),
        ("presence_penalty", adjustment.presence_penalty),
        *((f"bias of token {token_id}", bias) for token_id, bias in adjustment.biases),
    ):
        if not math.isfinite(value):
            raise ProtocolError(f"slot {slot}: {name} {value} must be finite")
    penalty = adjustment.repetition_penalty
    if not (math.isfinite(penalty) and penalty > 0):
        raise ProtocolError(f"slot {slot}: repetition_penalty {penalty} must be finite, > 0")
    prompt = adjustment.prompt_token_ids
    if prompt != tuple(sorted(set(prompt))):
        raise ProtocolError(f"slot {slot}: prompt_token_ids must be distinct and ascending")
    biased = [token_id for token_id, _ in adjustment.biases]
    if len(set(biased)) != len(biased):
        raise ProtocolError(f"slot {slot}: a token has two biases")
    ids = (*prompt[-1:], *adjustment.generated_token_ids, *biased)
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise ProtocolError(f"slot {slot}: token id {worst} is not in [0, {vocab_size})")
