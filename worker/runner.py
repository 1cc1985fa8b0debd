"""What an executor hands to its device, and what comes back; CpuRunner and CudaRunner do it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from worker.batch import MAX_LOGPROBS, ChunkSpan, PrefillChunk, SlotSetup, TokenLogprobs
from worker.decoder import Decoder

# In the place of a token id: the logits held a NaN or no finite value.
CORRUPTED = -1

# A slot and the token drawn for it.
Drawn = tuple[int, int]

# TokenLogprobs of params.h, as the native library writes it.
LOGPROBS_RECORD = np.dtype(
    [
        ("logprob", np.float32),
        ("rank", np.int32),
        ("best_token_ids", np.int32, MAX_LOGPROBS),
        ("best_logprobs", np.float32, MAX_LOGPROBS),
    ]
)
LOGPROBS_WORDS = LOGPROBS_RECORD.itemsize // 4


@dataclass(frozen=True, slots=True)
class StepWork:
    """Decode steps of `decode_slots` (those that have stopped are skipped), or one with chunks.

    `masks`: by slot, the tokens that its row may sample, as worker.proto packs them; a decode row
    with one samples once.
    """

    decode_slots: tuple[int, ...]
    chunks: tuple[PrefillChunk, ...]
    num_steps: int
    masks: dict[int, bytes] = field(default_factory=dict)

    @property
    def sampled_slots(self) -> tuple[int, ...]:
        """Of chunks that end prompts."""
        return tuple(chunk.slot for chunk in self.chunks if chunk.sample)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was drawn, step by step, and how long the device worked.

    `logprobs`: of the slots that want them, one for each token drawn. `prompt_logprobs`: of the
    slots that want them, one for each token of the chunk that has one after it.
    """

    steps: list[list[Drawn]]
    duration_ns: int
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class Runner(Protocol):
    """Runs the forwards of commands, in order."""

    decoder: Decoder

    @property
    def max_logprobs_steps(self) -> int:
        """The most steps of slots with logprobs that may be begun and not finished."""

    def take(self, slot: int, setup: SlotSetup, num_kept: int) -> None:
        """A new tenant; nothing of the old one stays but K and V of the first `num_kept` positions.

        Others may be copied there before the next start.
        """

    def start(self, work: StepWork) -> Any:
        """Begins the work; may return before it is done."""

    def finish(self, started: Any) -> Outcome:
        """Waits for what `start` began, from any thread, in the order of the starts.

        Raises StepError if it failed.
        """

    def gaps_ns(self, count: int) -> list[int]:
        """Idle times of the device between the last `count` decode steps, if it tells."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of a forward whose logits give logprobs of a prompt: at most `limit` together.

    `rows`: of the forward; `token_ids`: the token after each; `span`: their positions, in rows of
    their own from 0.
    """

    slot: int
    rows: range
    token_ids: tuple[int, ...]
    span: ChunkSpan


def prompt_rows(chunk: PrefillChunk, first_row: int, limit: int) -> Iterator[PromptRows]:
    """A chunk's rows, the first of which is `first_row` of the forward, in parts of `limit`."""
    following = chunk.token_ids[1:]
    if not chunk.sample:
        following += (chunk.next_token_id,)
    for begin in range(0, len(following), limit):
        tokens = following[begin : begin + limit]
        rows = range(first_row + begin, first_row + begin + len(tokens))
        span = ChunkSpan(0, len(tokens), chunk.slot, chunk.start + begin)
        yield PromptRows(chunk.slot, rows, tokens, span)


def read_logprobs(records: np.ndarray[Any, Any], count: int) -> list[TokenLogprobs]:
    """Records [K] of LOGPROBS_RECORD, with `count` best tokens in each."""
    best_ids = records["best_token_ids"][:, :count].tolist()
    best_logprobs = records["best_logprobs"][:, :count].tolist()
    return [
        TokenLogprobs(logprob, rank, tuple(ids), tuple(logprobs))
        for logprob, rank, ids, logprobs in zip(
            records["logprob"].tolist(),
            records["rank"].tolist(),
            best_ids,
            best_logprobs,
            strict=True,
        )
    ]
