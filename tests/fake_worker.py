"""A worker without a model: keeps the step protocol to the letter, and its tokens can be predicted.

A token is a function of all tokens before it, its position and the slot's sampling, so a swapped
slot, a wrong position or a stale state changes it.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler_service.request import Request
from scheduler_service.step import (
    DecodeRow,
    PrefillChunk,
    RowResult,
    SlotSetup,
    StepCommand,
    StepResult,
)

_MASK = (1 << 64) - 1

# Given a slot's tokens so far, the next token; None: the fake's own; CORRUPTED: bad logits.
Script = Callable[[Sequence[int]], int | None]
CORRUPTED = -1


class ProtocolViolation(Exception):  # noqa: N818
    """The scheduler sent what worker.proto forbids."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ProtocolViolation(message)


def fold(state: int, token_id: int) -> int:
    return ((state ^ (token_id + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK


@functools.lru_cache(maxsize=1024)
def sampling_key(setup: SlotSetup) -> int:
    """Equal for equal sampling, also after a way over the wire in float32."""
    packed = struct.pack("<ffIf", setup.temperature, setup.top_p, setup.top_k, setup.min_p)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def draw(state: int, position: int, setup: SlotSetup, vocab_size: int) -> int:
    """The fake's token at `position` after tokens folded into `state`."""
    value = fold(fold(fold(state, position), setup.seed), sampling_key(setup))
    return (value >> 33) % vocab_size


@dataclass(slots=True)
class FakeSlot:
    generation: int = 0
    setup: SlotSetup | None = None
    # Tokens computed ("in the cache"), and the last sampled one, which is not yet.
    tokens: list[int] = field(default_factory=list)
    pending: int | None = None
    state: int = 0
    active: bool = False

    def consume(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.state = fold(self.state, token_id)


class FakeWorker:
    """Runs StepCommands as a rank does. `script` forces tokens. Time is counted, not taken."""

    def __init__(
        self,
        num_slots: int,
        max_seq_len: int = 4096,
        max_step_tokens: int = 256,
        vocab_size: int = 1000,
        script: Script | None = None,
        step_ns: int = 1_000_000,
        prompt_token_ns: int = 0,
    ) -> None:
        self.max_seq_len = max_seq_len
        self.max_step_tokens = max_step_tokens
        self.vocab_size = vocab_size
        self.script = script
        self.step_ns = step_ns
        self.prompt_token_ns = prompt_token_ns
        self.slots = [FakeSlot() for _ in range(num_slots)]
        self.last_step_id = 0
        self.num_prefills = 0
        self.num_forwards = 0

    def run(self, command: StepCommand) -> StepResult:
        """ProtocolViolation, with nothing done, for a command that breaks the protocol."""
        self._check(command)
        self.last_step_id = command.step_id
        results = [self._start_row(row) for row in command.rows]
        for _ in range(command.num_steps):
            for row, sampled in zip(command.rows, results, strict=True):
                if isinstance(row, DecodeRow):
                    self._decode(self.slots[row.slot], sampled)
        self.num_forwards += command.num_steps
        rows = tuple(
            RowResult(
                row.slot,
                row.generation,
                tuple(token for token in sampled if token != CORRUPTED),
                CORRUPTED in sampled,
            )
            for row, sampled in zip(command.rows, results, strict=True)
        )
        digest = step_digest(command.step_id, rows)
        num_prefill = sum(
            len(row.token_ids) for row in command.rows if isinstance(row, PrefillChunk)
        )
        duration_ns = command.num_steps * self.step_ns + num_prefill * self.prompt_token_ns
        return StepResult(command.epoch, command.step_id, digest, rows, duration_ns)

    def _check(self, command: StepCommand) -> None:
        _require(command.step_id == self.last_step_id + 1, f"step id {command.step_id}")
        _require(command.num_steps >= 1, "num_steps below 1")
        _require(len(command.rows) >= 1, "no rows")
        slots = [row.slot for row in command.rows]
        _require(len(set(slots)) == len(slots), "two rows for a slot")
        kinds = [isinstance(row, PrefillChunk) for row in command.rows]
        _require(kinds == sorted(kinds), "a decode row after a chunk")
        _require(command.num_steps == 1 or not any(kinds), "several steps with a chunk")
        num_tokens = sum(
            len(row.token_ids) if isinstance(row, PrefillChunk) else 1 for row in command.rows
        )
        _require(num_tokens <= self.max_step_tokens, f"{num_tokens} tokens in a step")
        for row in command.rows:
            if isinstance(row, PrefillChunk):
                self._check_chunk(self.slots[row.slot], row)
            else:
                slot = self.slots[row.slot]
                _require(row.generation == slot.generation, "decode of another generation")
                _require(slot.pending is not None, "decode of a slot that has sampled nothing")

    def _check_chunk(self, slot: FakeSlot, row: PrefillChunk) -> None:
        _require(len(row.token_ids) >= 1, "empty chunk")
        if row.setup is not None:
            _require(row.generation > slot.generation, "first chunk without a new generation")
            _require(row.start == 0, "first chunk does not start at 0")
            _require(row.setup.max_len <= self.max_seq_len, "max_len above max_seq_len")
            return
        _require(row.generation == slot.generation, "chunk of another generation")
        _require(row.start == len(slot.tokens), f"chunk at {row.start}, not {len(slot.tokens)}")
        _require(slot.pending is None, "chunk after the prompt's end")

    def _start_row(self, row: PrefillChunk | DecodeRow) -> list[int]:
        sampled: list[int] = []
        if isinstance(row, DecodeRow):
            return sampled
        slot = self.slots[row.slot]
        if row.setup is not None:
            slot = FakeSlot(row.generation, row.setup, active=True)
            self.slots[row.slot] = slot
            self.num_prefills += 1
        for token_id in row.token_ids:
            slot.consume(token_id)
        if row.sample:
            self._sample(slot, sampled)
        return sampled

    def _decode(self, slot: FakeSlot, sampled: list[int]) -> None:
        if not slot.active:
            return
        assert slot.pending is not None
        slot.consume(slot.pending)
        self._sample(slot, sampled)

    def _sample(self, slot: FakeSlot, sampled: list[int]) -> None:
        assert slot.setup is not None
        token_id = self.script(slot.tokens) if self.script is not None else None
        if token_id is None:
            token_id = draw(slot.state, len(slot.tokens), slot.setup, self.vocab_size)
        sampled.append(token_id)
        slot.pending = token_id
        at_limit = len(slot.tokens) + 1 >= slot.setup.max_len
        if token_id == CORRUPTED or token_id in slot.setup.end_token_ids or at_limit:
            slot.active = False


def step_digest(step_id: int, rows: Sequence[RowResult]) -> int:
    digest = hashlib.blake2b(struct.pack("<Q", step_id), digest_size=8)
    for row in rows:
        digest.update(struct.pack("<IQ?", row.slot, row.generation, row.corrupted))
        digest.update(struct.pack(f"<{len(row.token_ids)}I", *row.token_ids))
    return int.from_bytes(digest.digest(), "little")


def tokens_alone(
    request: Request, vocab_size: int = 1000, script: Script | None = None
) -> list[int]:
    """The tokens that the fake gives this request when nothing else runs."""
    sampling = request.sampling
    setup = SlotSetup(
        sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed, (), 0
    )
    tokens = list(request.prompt_token_ids)
    state = 0
    for token_id in tokens:
        state = fold(state, token_id)
    generated: list[int] = []
    while len(generated) < request.max_new_tokens:
        token_id = script(tokens) if script is not None else None
        if token_id is None:
            token_id = draw(state, len(tokens), setup, vocab_size)
        generated.append(token_id)
        tokens.append(token_id)
        state = fold(state, token_id)
        if token_id in request.end_token_ids:
            break
    return generated
