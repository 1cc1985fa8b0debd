"""What an executor hands to its device, and what comes back; CpuRunner and CudaRunner do it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from worker.batch import MAX_LOGPROBS, PrefillChunk, SlotSetup, TokenLogprobs
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
    """Decode steps of `decode_slots` (those that have stopped are skipped), or one with chunks."""

    decode_slots: tuple[int, ...]
    chunks: tuple[PrefillChunk, ...]
    num_steps: int

    @property
    def sampled_slots(self) -> tuple[int, ...]:
        """Of chunks that end prompts."""
        return tuple(chunk.slot for chunk in self.chunks if chunk.sample)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was drawn, step by step, and how long the device worked.

    `logprobs`: of the slots that want them, one for each token drawn.
    """

    steps: list[list[Drawn]]
    duration_ns: int
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class Runner(Protocol):
    """Runs the forwards of commands, in order."""

    decoder: Decoder

    def take(self, slot: int, setup: SlotSetup) -> None:
        """A new tenant; nothing of the old one stays."""

    def start(self, work: StepWork) -> Any:
        """Begins the work; may return before it is done."""

    def finish(self, started: Any) -> Outcome:
        """Waits for what `start` began, from any thread, in the order of the starts.

        Raises StepError if it failed.
        """

    def gaps_ns(self, count: int) -> list[int]:
        """Idle times of the device between the last `count` decode steps, if it tells."""


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
