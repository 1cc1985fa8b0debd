"""Commands that break the protocol are refused before anything is touched."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from worker.batch import (
    DecodeRow,
    LogitAdjustment,
    PrefillChunk,
    Prefix,
    Row,
    SlotSetup,
    StepCommand,
)
from worker.errors import ProtocolError
from worker.memory_plan import ServingLimits
from worker.slots import CommandCheck, SlotRecord

VOCAB = 50
LIMITS = ServingLimits(4, 32, 8, "float32", "float32", 4)
# Each slot has the decode row of its own number.
OWNERS = (0, 1, 2, 3)
SETUP = SlotSetup(0.0, 1.0, 0, 0.0, 0, (), 20, decode_row=3)
MASKED = replace(SETUP, masked=True)
PROMPT_LOGPROBS = replace(SETUP, num_prompt_logprobs=0)
# ceil(50 / 8) bytes.
MASK = b"\xff" * 7
NAN, INF = float("nan"), float("inf")


def slots() -> list[SlotRecord]:
    """0: decoding, 3 tokens of its prompt computed and two since, as far as results say; 1: in its
    prompt, 4 computed; 2: stopped; 3: never taken."""
    records = [SlotRecord() for _ in range(4)]
    for index, (generation, computed) in enumerate([(5, 3), (2, 4), (9, 6)]):
        records[index] = SlotRecord(
            generation, computed, max_len=SETUP.max_len, length=computed, decode_row=index
        )
    records[0].length += 2
    records[0].prompt_complete = records[2].prompt_complete = True
    return records


def first(slot: int = 3, generation: int = 1, **changes: object) -> PrefillChunk:
    chunk = PrefillChunk(slot, generation, 0, (1, 2, 3), True, SETUP)
    return replace(chunk, **changes)  # type: ignore[arg-type]


def later(start: int = 4, generation: int = 2, **changes: object) -> PrefillChunk:
    chunk = PrefillChunk(1, generation, start, (1, 2), True, None)
    return replace(chunk, **changes)  # type: ignore[arg-type]


def reusing(source: int, tenant: int, length: int, **changes: object) -> PrefillChunk:
    """A first chunk behind a prefix."""
    return first(start=length, prefix=Prefix(source, tenant, length), **changes)  # type: ignore[arg-type]


def adjusted(**fields: object) -> PrefillChunk:
    return first(setup=replace(SETUP, adjustment=LogitAdjustment(**fields)))  # type: ignore[arg-type]


def running_on(row: int, **changes: object) -> PrefillChunk:
    return first(setup=replace(SETUP, decode_row=row), **changes)


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
        # Prefixes: of a decoding slot, of one in its prompt, of one that has ended, of the own.
        command(reusing(0, 5, 1)),
        command(reusing(0, 5, 5)),
        command(reusing(1, 2, 4)),
        command(reusing(2, 9, 6)),
        command(reusing(2, 9, 6, slot=2, generation=10)),
        command(DecodeRow(0, 5), reusing(0, 5, 5)),
        command(later(), reusing(1, 2, 4)),
        # The source is taken by a later row.
        command(reusing(2, 9, 6), running_on(2, slot=2, generation=10)),
        command(running_on(0)),
        command(DecodeRow(0, 5), running_on(1)),
        command(first(setup=MASKED, allowed_tokens=MASK)),
        command(first(setup=MASKED, sample=False)),
        command(first(setup=PROMPT_LOGPROBS)),
        command(first(setup=PROMPT_LOGPROBS, sample=False, next_token_id=49)),
        command(
            adjusted(
                frequency_penalty=-2.0,
                presence_penalty=2.0,
                repetition_penalty=1e-3,
                prompt_token_ids=(0, 7, 49),
                generated_token_ids=(49, 0, 0),
                biases=((49, -100.0), (0, 1e30)),
                min_len=2**32 - 1,
            )
        ),
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
        (
            command(first(setup=replace(SETUP, num_prompt_logprobs=21))),
            r"num_prompt_logprobs 21.*\[0, 20\]",
        ),
        (command(reusing(4, 1, 1)), r"slot 3: prefix .* slot 4, which is not in \[0, 4\)"),
        (command(reusing(0, 4, 1)), "slot 3: prefix .* slot 0: generation 4 is not .*5"),
        (command(reusing(0, 6, 1)), "generation 6 is not .*5"),
        (command(reusing(0, 5, 0)), r"prefix of 0 positions of slot 0: .* \[1, 5\]"),
        (command(reusing(0, 5, 6)), r"prefix of 6 positions of slot 0: .* \[1, 5\]"),
        (command(reusing(1, 2, 5)), r"prefix of 5 positions of slot 1: .* \[1, 4\]"),
        # What an earlier row of the same command computes does not count yet.
        (command(later(), reusing(1, 2, 6)), r"prefix of 6 positions of slot 1: .* \[1, 4\]"),
        (command(DecodeRow(0, 5), reusing(0, 5, 6)), r"\[1, 5\]"),
        (command(reusing(3, 0, 1)), r"prefix of 1 positions of slot 3: .* \[1, 0\]"),
        (command(reusing(3, 1, 1)), "generation 1 is not .*0"),
        (command(reusing(2, 10, 6, slot=2, generation=10)), "generation 10 is not .*9"),
        (
            command(running_on(2, slot=2, generation=10), reusing(2, 9, 3)),
            "slot 3: prefix .* slot 2, which an earlier row of the command takes anew",
        ),
        (command(running_on(2, slot=2, generation=10), reusing(2, 10, 3)), "takes anew"),
        (command(replace(reusing(0, 5, 3), start=0)), "starts at 0, expected 3"),
        (command(replace(reusing(0, 5, 3), start=4)), "starts at 4, expected 3"),
        (command(reusing(2, 9, 6, setup=replace(SETUP, max_len=9))), "10 tokens, max_len is 9"),
        (command(later(prefix=Prefix(0, 5, 4))), "slot 1: a prefix comes with the setup only"),
        (command(reusing(0, 5, 3, setup=PROMPT_LOGPROBS)), "slot 3: prompt logprobs"),
        (command(running_on(4)), r"slot 3: decode row 4 is not in \[0, 4\)"),
        (command(DecodeRow(0, 5), running_on(0)), "slot 3: decode row 0 has another slot"),
        (command(later(), running_on(1)), "slot 3: decode row 1 has another slot"),
        (command(running_on(1), later()), "slot 1: decode row 1 has another slot"),
        (
            command(running_on(2), running_on(2, slot=2, generation=10)),
            "slot 2: decode row 2 has another slot",
        ),
        (command(first(setup=MASKED)), "slot 3: 0 bytes of allowed_tokens, 7 are due"),
        (command(first(setup=MASKED, allowed_tokens=MASK[1:])), "6 bytes .* 7 are due"),
        (command(first(setup=MASKED, allowed_tokens=MASK + b"\0")), "8 bytes .* 7 are due"),
        (command(first(allowed_tokens=MASK)), "slot 3: 7 bytes of allowed_tokens, 0 are due"),
        (
            command(first(setup=MASKED, sample=False, allowed_tokens=MASK)),
            "7 bytes of allowed_tokens, 0 are due",
        ),
        (command(DecodeRow(0, 5, MASK)), "slot 0: 7 bytes of allowed_tokens, 0 are due"),
        (command(first(next_token_id=4)), "slot 3: next_token_id"),
        (command(first(sample=False, next_token_id=4)), "slot 3: next_token_id"),
        (command(first(setup=PROMPT_LOGPROBS, next_token_id=4)), "slot 3: next_token_id"),
        (command(first(setup=PROMPT_LOGPROBS, sample=False)), "slot 3: next_token_id"),
        (command(later(sample=False, next_token_id=0)), "slot 1: next_token_id"),
        (
            command(first(setup=PROMPT_LOGPROBS, sample=False, next_token_id=50)),
            r"token id 50 is not in \[0, 50\)",
        ),
        (command(adjusted(frequency_penalty=NAN)), "slot 3: frequency_penalty nan"),
        (command(adjusted(presence_penalty=INF)), "slot 3: presence_penalty inf"),
        (command(adjusted(repetition_penalty=0.0)), "slot 3: repetition_penalty 0.0"),
        (command(adjusted(repetition_penalty=-1.0)), "repetition_penalty -1.0"),
        (command(adjusted(repetition_penalty=NAN)), "repetition_penalty nan"),
        (command(adjusted(repetition_penalty=INF)), "repetition_penalty inf"),
        (command(adjusted(biases=((3, -INF),))), "slot 3: bias of token 3 -inf"),
        (command(adjusted(biases=((3, 1.0), (4, 0.0), (3, 1.0)))), "slot 3: .*two biases"),
        (command(adjusted(biases=((50, 1.0),))), r"token id 50 is not in \[0, 50\)"),
        (command(adjusted(prompt_token_ids=(4, 50))), r"token id 50 is not in \[0, 50\)"),
        (command(adjusted(generated_token_ids=(51, 4))), r"token id 51 is not in \[0, 50\)"),
        (command(adjusted(prompt_token_ids=(4, 3))), "slot 3: prompt_token_ids .*ascending"),
        (command(adjusted(prompt_token_ids=(4, 4))), "slot 3: prompt_token_ids .*ascending"),
    ],
)
def test_refused(wrong: StepCommand, named: str) -> None:
    records = slots()
    before = copy.deepcopy(records)
    with pytest.raises(ProtocolError, match=named):
        CommandCheck(records, OWNERS, LIMITS, VOCAB).run(wrong)
    assert records == before


def test_a_tenant_that_lost_its_decode_row_runs_no_more() -> None:
    """Whoever was let in on it last has it: a row of the old tenant would change the new one's."""
    for row in (DecodeRow(0, 5), later()):
        owners = [3 if owner == row.slot else owner for owner in OWNERS]
        with pytest.raises(
            ProtocolError, match=f"slot {row.slot}: .* row {row.slot} is now slot 3"
        ):
            CommandCheck(slots(), owners, LIMITS, VOCAB).run(command(row))


def test_rows_of_masked_slots() -> None:
    """The mask is the record's tenant's business, whoever was there before."""
    records = slots()
    for record in records:
        record.masked = True

    def run(*rows: Row, num_steps: int = 1) -> None:
        CommandCheck(records, OWNERS, LIMITS, VOCAB).run(command(*rows, num_steps=num_steps))

    run(DecodeRow(0, 5, MASK), num_steps=9)
    run(DecodeRow(0, 5, MASK), later(allowed_tokens=MASK), first())
    run(later(sample=False), first(slot=2, generation=10))
    for wrong in (DecodeRow(0, 5), later(), later(sample=False, allowed_tokens=MASK)):
        with pytest.raises(ProtocolError, match=f"slot {wrong.slot}: .* of allowed_tokens"):
            run(wrong)


def test_a_record_begins_with_its_prefix() -> None:
    chunk = reusing(2, 9, 6, setup=replace(MASKED, num_prompt_logprobs=4), sample=False)
    record = SlotRecord.of(chunk)
    assert record == SlotRecord(1, 6, False, 20, 0, 3, True, 4)
    record.begin_chunk(chunk)
    assert (record.num_computed, record.length, record.prompt_complete) == (9, 9, False)
