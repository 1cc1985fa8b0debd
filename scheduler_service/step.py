"""The step protocol as plain data; worker_pool.py turns it into messages and back.

slotwise/worker/v1/worker.proto says what each field means.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotSetup:
    """What a slot needs until it is taken again. The slot stops by itself at max_len tokens."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    end_token_ids: tuple[int, ...]
    max_len: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Known tokens [start, start + len(token_ids)) of a slot; `setup` on the first chunk only."""

    slot: int
    generation: int
    start: int
    token_ids: tuple[int, ...]
    sample: bool
    setup: SlotSetup | None


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Decode from the slot's last sampled token, which stays in the worker."""

    slot: int
    generation: int


Row = PrefillChunk | DecodeRow


@dataclass(frozen=True, slots=True)
class StepCommand:
    """One command to all ranks: decode rows first, at most one row per slot."""

    epoch: int
    step_id: int
    num_steps: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class RowResult:
    """Tokens sampled for one row of the command; `corrupted`: the logits held no usable value."""

    slot: int
    generation: int
    token_ids: tuple[int, ...]
    corrupted: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to one command; `rows` in the order of the command's rows."""

    epoch: int
    step_id: int
    digest: int
    rows: tuple[RowResult, ...]
    duration_ns: int
