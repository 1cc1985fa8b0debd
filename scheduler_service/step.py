"""The step protocol as plain data, and the check that a result answers its command.

slotwise/worker/v1/worker.proto says what each field means; worker_messages.py makes the messages.
What every command has of each slot is a named tuple, which is made in a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogitAdjustment:
    """What is done to a slot's logits before they are sampled from; see worker.proto.

    `biases`: (token id, bias) pairs.
    """

    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    prompt_token_ids: tuple[int, ...]
    generated_token_ids: tuple[int, ...]
    biases: tuple[tuple[int, float], ...]
    min_len: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `length` positions are those of `source_slot`, which may be the slot itself."""

    source_slot: int
    source_generation: int
    length: int


@dataclass(frozen=True, slots=True)
class SlotSetup:
    """What a slot needs until it is taken again. The slot stops by itself at max_len tokens.

    `num_logprobs`, `num_prompt_logprobs`: how many alternatives; None: no logprobs.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    end_token_ids: tuple[int, ...]
    max_len: int
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    decode_row: int = 0
    masked: bool = False
    adjustment: LogitAdjustment | None = None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Known tokens [start, start + len(token_ids)) of a slot; `setup` on the first chunk only.

    `allowed_tokens`: bits of the tokens that may be sampled, b"" for all.
    """

    slot: int
    generation: int
    start: int
    token_ids: tuple[int, ...]
    sample: bool
    setup: SlotSetup | None
    prefix: Prefix | None = None
    next_token_id: int | None = None
    allowed_tokens: bytes = b""


class DecodeRow(NamedTuple):
    """Decode from the slot's last sampled token, which stays in the worker.

    With `allowed_tokens` one token is sampled, whatever the command's num_steps.
    """

    slot: int
    generation: int
    allowed_tokens: bytes = b""


Row = PrefillChunk | DecodeRow


@dataclass(frozen=True, slots=True)
class StepCommand:
    """One command to all ranks: decode rows first, at most one row per slot."""

    epoch: int
    step_id: int
    num_steps: int
    rows: tuple[Row, ...]


class RowResult(NamedTuple):
    """Tokens sampled for one row of the command; `corrupted`: the logits held no usable value.

    `logprobs` of each token where they were asked for; `prompt_logprobs` of the chunk's tokens from
    position start + 1 on, the one after the chunk included.
    """

    slot: int
    generation: int
    token_ids: tuple[int, ...]
    corrupted: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to one command; `rows` in the order of the command's rows."""

    epoch: int
    step_id: int
    digest: int
    rows: tuple[RowResult, ...]
    duration_ns: int


class ResultError(Exception):
    """A result does not answer its command: the worker group can no longer be trusted."""


class PlannedRow(NamedTuple):
    """A row of an outstanding command: positions that a chunk and its prefix fill, tokens that may
    be sampled, and the logprobs that come beside."""

    slot: int
    generation: int
    num_filled: int
    num_tokens: int
    has_logprobs: bool = False
    num_prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A command in flight."""

    epoch: int
    step_id: int
    num_steps: int
    rows: tuple[PlannedRow, ...]
    # Computed by its chunks; 0: it has none.
    num_prefill_tokens: int

    @property
    def num_logprobs_steps(self) -> int:
        """Steps that bring logprobs of sampled tokens."""
        return self.num_steps if any(row.has_logprobs for row in self.rows) else 0

    def check(self, result: StepResult, stopped: Callable[[PlannedRow, RowResult], bool]) -> None:
        """ResultError unless the result answers this command, row by row.

        A row may bring fewer tokens than planned only if it is corrupted or `stopped` says so.
        """
        if (result.epoch, result.step_id) != (self.epoch, self.step_id):
            raise ResultError(
                f"result of epoch {result.epoch}, step {result.step_id} came where epoch "
                f"{self.epoch}, step {self.step_id} was due"
            )
        if len(result.rows) != len(self.rows):
            raise ResultError(
                f"step {self.step_id}: {len(result.rows)} rows came for {len(self.rows)} sent"
            )
        for planned, row in zip(self.rows, result.rows, strict=True):
            self._check_row(planned, row, stopped)

    def _check_row(
        self,
        planned: PlannedRow,
        row: RowResult,
        stopped: Callable[[PlannedRow, RowResult], bool],
    ) -> None:
        if (row.slot, row.generation) != (planned.slot, planned.generation):
            raise ResultError(
                f"step {self.step_id}: a row of slot {row.slot}, generation {row.generation} came "
                f"where slot {planned.slot}, generation {planned.generation} was due"
            )
        num_tokens = len(row.token_ids)
        due = (num_tokens if planned.has_logprobs else 0, planned.num_prompt_logprobs)
        if (len(row.logprobs), len(row.prompt_logprobs)) != due:
            raise ResultError(
                f"step {self.step_id}: slot {row.slot} brought {len(row.logprobs)} logprobs and "
                f"{len(row.prompt_logprobs)} of its prompt, {due[0]} and {due[1]} were due"
            )
        if num_tokens > planned.num_tokens:
            raise ResultError(
                f"step {self.step_id}: slot {row.slot} brought {num_tokens} tokens, "
                f"at most {planned.num_tokens} were asked for"
            )
        if num_tokens < planned.num_tokens and not row.corrupted and not stopped(planned, row):
            raise ResultError(
                f"step {self.step_id}: slot {row.slot} brought {num_tokens} tokens of "
                f"{planned.num_tokens} though nothing stopped it"
            )
