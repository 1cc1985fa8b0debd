"""One real prefill and one real decode on all ranks, before anyone is served."""

from __future__ import annotations

from .slots import WARM_UP_GENERATION
from .step import DecodeRow, PrefillChunk, SlotSetup, StepCommand

NUM_WARM_UP_STEPS = 2


def warm_up_commands(epoch: int, max_seq_len: int) -> tuple[StepCommand, StepCommand]:
    """Prefills one token in slot 0 and decodes another.

    A slot's tenants have higher generations, so the slot need not be cleaned.
    """
    setup = SlotSetup(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=0,
        end_token_ids=(),
        max_len=min(3, max_seq_len),
    )
    chunk = PrefillChunk(0, WARM_UP_GENERATION, 0, (0,), sample=True, setup=setup)
    decode = DecodeRow(0, WARM_UP_GENERATION)
    return (StepCommand(epoch, 1, 1, (chunk,)), StepCommand(epoch, 2, 1, (decode,)))
