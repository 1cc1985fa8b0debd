"""Commands that break the protocol are refused before anything is touched."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from worker.batch import DecodeRow, PrefillChunk, Row, SlotSetup, StepCommand
from worker.errors import ProtocolError
from worker.memory_plan import ServingLimits
from worker.slots import CommandCheck, SlotRecord

VOCAB = 50
LIMITS = ServingLimits(4, 32, 8, "float32", "float32", 4)
# Each slot has the decode row of its own number.
OWNERS = (0, 1, 2, 3)
SETUP = SlotSetup(0.0, 1.0, 0, 0.0, 0, (), 20)
NAN = float("nan")


def slots() -> list[SlotRecord]:
    """0: decoding, 3 tokens computed; 1: in its prompt, 4 computed; 2: stopped; 3: never taken."""
    records = [SlotRecord() for _ in range(4)]
    for index, (generation, computed) in enumerate([(5, 3), (2, 4), (9, 6)]):
        records[index] = SlotRecord(generation, computed, max_len=SETUP.max_len, decode_row=index)
    records[0].prompt_complete = records[2].prompt_complete = True
    return records


def first(slot: int = 3, generation: int = 1, **changes: object) -> PrefillChunk:
    chunk = PrefillChunk(slot, generation, 0, (1, 2, 3), True, SETUP)
    return replace(chunk, **changes)  # type: ignore[arg-type]


def later(start: int = 4, generation: int = 2, **changes: object) -> PrefillChunk:
    chunk = PrefillChunk(1, generation, start, (1, 2), True, None)
    return replace(chunk, **changes)  # type: ignore[arg-type]


def command(*rows: Row, num_steps: int = 1) -> StepCommand:
    return StepCommand(1, 1, num_steps, rows)


@pytest.mark.parametrize(
    "fine",
    [
        command(DecodeRow(0, 5), num_steps=16),
        command(DecodeRow(0, 5), DecodeRow(2, 9), later(), first()),
        command(later(sample=False)),
        command(first(slot=0, generation=6)),
        command(first(setup=replace(SETUP, max_len=4))),
        command(first(setup=replace(SETUP, max_len=3), sample=False)),
        command(first(token_ids=tuple(range(8)))),
        command(first(setup=replace(SETUP, num_logprobs=20))),
    ],
)
def test_accepted(fine: StepCommand) -> None:
    CommandCheck(slots(), OWNERS, LIMITS, VOCAB).run(fine)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (command(), "at least one row"),
        (command(DecodeRow(0, 5), num_steps=0), "num_steps.*0"),
        (command(DecodeRow(0, 5), first(), num_steps=2), "num_steps is 2"),
        (command(DecodeRow(4, 1)), r"slot 4 is not in \[0, 4\)"),
        (command(DecodeRow(0, 5), DecodeRow(0, 5)), "slot 0 has two rows"),
        (command(DecodeRow(0, 5), first(slot=0, generation=6)), "slot 0 has two rows"),
        (command(first(), DecodeRow(0, 5)), "before prefill"),
        (command(DecodeRow(0, 4)), "slot 0: generation 4.*5"),
        (command(DecodeRow(0, 6)), "slot 0: generation 6.*5"),
        (command(DecodeRow(1, 2)), "slot 1: decode before its prompt"),
        (command(DecodeRow(3, 0)), "slot 3: decode before its prompt"),
        (command(later(start=3)), "starts at 3, expected 4"),
        (command(later(start=5)), "starts at 5, expected 4"),
        (command(later(generation=1)), "slot 1: generation 1"),
        (command(later(token_ids=())), "at least one token"),
        (command(later(token_ids=(49, 50))), r"token id 50 is not in \[0, 50\)"),
        (command(first(start=1)), "starts at 1, expected 0"),
        (command(first(slot=0, generation=5)), "above 5, not 5"),
        (command(first(generation=0)), "above 0, not 0"),
        (command(first(setup=None)), "slot 3: generation 1"),
        (command(first(setup=None, generation=0)), "slot 3.*setup"),
        (command(first(slot=0, generation=5, setup=None, start=3)), "slot 0.*complete"),
        (command(first(token_ids=tuple(range(9)))), "9 tokens.*max_step_tokens is 8"),
        (command(DecodeRow(0, 5), first(token_ids=tuple(range(8)))), "9 tokens"),
        (command(first(setup=replace(SETUP, max_len=0))), "max_len 0"),
        (command(first(setup=replace(SETUP, max_len=33))), "max_len 33"),
        (command(first(setup=replace(SETUP, max_len=3))), "4 tokens, max_len is 3"),
        (command(first(setup=replace(SETUP, temperature=NAN))), "temperature nan"),
        (command(first(setup=replace(SETUP, temperature=-0.5))), "temperature -0.5"),
        (command(first(setup=replace(SETUP, top_p=1.5))), "top_p 1.5"),
        (command(first(setup=replace(SETUP, min_p=NAN))), "min_p nan"),
        (command(first(setup=replace(SETUP, num_logprobs=21))), r"num_logprobs 21.*\[0, 20\]"),
    ],
)
def test_refused(wrong: StepCommand, named: str) -> None:
    records = slots()
    before = copy.deepcopy(records)
    with pytest.raises(ProtocolError, match=named):
        CommandCheck(records, OWNERS, LIMITS, VOCAB).run(wrong)
    assert records == before
