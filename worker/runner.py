"""What an executor hands to its device, and what comes back; CpuRunner and CudaRunner do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from worker.batch import PrefillChunk, SlotSetup
from worker.decoder import Decoder

# In the place of a token id: the logits held a NaN or no finite value.
CORRUPTED = -1

# A slot and the token drawn for it.
Drawn = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StepWork:
    """Decode steps of `decode_slots` (those that have stopped are skipped), or one with chunks."""

    decode_slots: tuple[int, ...]
    chunks: tuple[PrefillChunk, ...]
    num_steps: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was drawn, step by step, and how long the device worked."""

    steps: list[list[Drawn]]
    duration_ns: int


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
