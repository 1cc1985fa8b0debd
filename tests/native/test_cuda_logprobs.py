"""Logprobs on the GPU: as the oracle has them, and one row's bits whatever the company."""

from typing import Any

import pytest
import torch
from device_slots import ALWAYS, DeviceSlots
from logprob_records import COUNTS, UNTOUCHED, assert_record, empty_records, hard_logits, records_in
from torch import Tensor

pytestmark = pytest.mark.gpu
KERNELS = ("best", "portable")

REAL_VOCAB = 151936
NO_PART, CORRUPTED = -2, -1


class Step:
    """Draws a token for every row of logits [B, V], and takes the logprobs.

    `slots`: prompts that end, else decode rows of all slots. Slots with `idle` do not decode.
    """

    def __init__(
        self,
        ops: Any,
        logits: Tensor,
        counts: list[int],
        *,
        temperature: float = 3.0,
        seeds: list[int] | None = None,
        slots: list[int] | None = None,
        idle: tuple[int, ...] = (),
    ) -> None:
        num_slots = len(counts)
        self.table = DeviceSlots(num_slots, logits.shape[1])
        self.counts = torch.tensor(counts, dtype=torch.int32, device="cuda")
        seeds = list(range(num_slots)) if seeds is None else seeds
        self.table.put(
            temperature=[temperature] * num_slots,
            seed=seeds,
            active=[1] * num_slots,
            scheduled=[ALWAYS * (slot not in idle) for slot in range(num_slots)],
        )
        ops.begin_command(self.table.table)
        self.out = empty_records(3, num_slots).pin_memory()
        self.sampled_ns = 0
        self.tokens = self.run(ops, logits, slots)
        self.records = records_in(self.out)[0]

    def run(self, ops: Any, logits: Tensor, slots: list[int] | None = None) -> list[int]:
        tokens = self.table.sample(ops, logits, slots)
        self.sampled_ns = int(self.table.stamps[:, 1].max())
        chosen = None if slots is None else torch.tensor(slots, dtype=torch.int32, device="cuda")
        ops.logprobs(self.table.table, logits, chosen, self.counts, self.out)
        torch.cuda.synchronize()
        return tokens


# The last two have more logits than a team reads in one turn of batches.
@pytest.mark.parametrize(
    "vocab", [1, 3, 19, 20, 21, 63, 1000, 4097, 32001, REAL_VOCAB, 262144, 600_001]
)
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_as_the_oracle_has_them(
    cuda_ops: Any, vocab: int, temperature: float, generator: torch.Generator
) -> None:
    logits = hard_logits(18, vocab, generator)
    counts = (COUNTS * 4)[:18]
    step = Step(cuda_ops, logits.cuda(), counts, temperature=temperature)
    for row, record in enumerate(step.records):
        assert step.tokens[row] >= 0
        assert_record(record, logits[row], step.tokens[row], counts[row])
    assert (step.out[1:] == UNTOUCHED).all()


@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("rows", [8, 64])
def test_many_rows(cuda_ops: Any, rows: int, count: int, generator: torch.Generator) -> None:
    logits = torch.randn(rows, REAL_VOCAB, generator=generator) * 4
    step = Step(cuda_ops, logits.cuda(), [count] * rows)
    for row, record in enumerate(step.records):
        assert_record(record, logits[row], step.tokens[row], count)


def test_ties_come_by_id(cuda_ops: Any) -> None:
    logits = torch.zeros(3, REAL_VOCAB)
    logits[0, [90_000, 7, 140_000]] = 2.0
    logits[1, [9, 3]] = torch.tensor([0.0, -0.0])
    logits[2] = -torch.inf
    logits[2, 77_777] = 1.0
    step = Step(cuda_ops, logits.cuda(), [4, 20, 20], temperature=0.0)
    ids = step.records["best_token_ids"]
    assert ids[0, :4].tolist() == [7, 90_000, 140_000, 0]
    assert ids[1].tolist() == list(range(20))
    assert ids[2].tolist() == [77_777, *range(19)]
    assert step.records["best_logprobs"][2].tolist() == [0.0] + [-torch.inf] * 19
    assert step.records["rank"].tolist() == [1, 1, 1]


def test_prompts_and_rows_that_are_not_aligned(cuda_ops: Any, generator: torch.Generator) -> None:
    logits = hard_logits(9, 3000, generator)
    padded = torch.full((9, 3100), torch.nan, device="cuda")
    padded[:, 37:3037] = logits.cuda()
    slots = [5, 2, 11, 0, 7, 8, 1, 10, 4]
    counts = [20 - slot for slot in range(12)]
    step = Step(cuda_ops, padded[:, 37:3037], counts, slots=slots)
    for row, slot in enumerate(slots):
        assert_record(step.records[slot], logits[row], step.tokens[slot], counts[slot])
    for slot in {*range(12)} - {*slots}:
        assert step.tokens[slot] == NO_PART
        assert (step.out[0, slot] == UNTOUCHED).all()


def test_the_step_ends_with_its_logprobs(cuda_ops: Any) -> None:
    logits = torch.zeros(2, 5000, device="cuda")
    for counts in ([-1, -1], [-1, 3]):
        step = Step(cuda_ops, logits, counts)
        assert step.sampled_ns > 0
        assert (int(step.table.stamps[0, 1]) > step.sampled_ns) == (max(counts) >= 0)


def test_rows_without_a_token_harm_nobody(cuda_ops: Any, generator: torch.Generator) -> None:
    """Rows from which nothing can be drawn, and idle ones; slots that want none are left alone."""
    logits = hard_logits(12, 5000, generator)
    logits[2, 4321] = torch.nan
    logits[5] = -torch.inf
    logits[8, 3] = torch.inf
    counts = [-1 if row % 4 == 3 else 20 for row in range(12)]
    step = Step(cuda_ops, logits.cuda(), counts, idle=(1, 7))
    assert [row for row, token in enumerate(step.tokens) if token == CORRUPTED] == [2, 5, 8]
    assert (step.out[0, 3::4] == UNTOUCHED).all()
    for row in (0, 4, 6, 9, 10):
        assert_record(step.records[row], logits[row], step.tokens[row], 20)


@pytest.mark.parametrize("vocab", [5000, REAL_VOCAB])
def test_a_row_does_not_depend_on_company(
    cuda_ops: Any, vocab: int, generator: torch.Generator
) -> None:
    logits = hard_logits(27, vocab, generator).cuda()
    counts = (COUNTS * 6)[:27]

    def together(rows: list[int]) -> Tensor:
        some = [counts[row] for row in rows]
        return Step(cuda_ops, logits[rows], some, seeds=rows).out[0].clone()

    alone = torch.cat([together([row]) for row in range(27)])
    for _ in range(5):
        rows = torch.randperm(27, generator=generator)[:20].tolist()
        assert torch.equal(together(rows), alone[rows])
    # As a prompt's end, in another slot.
    for row in range(9):
        others = [-1, counts[row], -1]
        step = Step(cuda_ops, logits[[row]], others, seeds=[0, row, 0], slots=[1], temperature=0.0)
        greedy = Step(cuda_ops, logits[[row]], [counts[row]], temperature=0.0)
        assert torch.equal(step.out[0, 1], greedy.out[0, 0])


def test_steps_go_round_in_fewer_rows_than_the_ring(
    cuda_ops: Any, generator: torch.Generator
) -> None:
    """Four rows of tokens, three of logprobs; the counter of steps wraps too."""
    logits = torch.randn(7, 2, 900, generator=generator)
    step = Step(cuda_ops, logits[0].cuda(), [3, 20])
    for index in range(1, 7):
        tokens = step.run(cuda_ops, logits[index].cuda())
        for slot, record in enumerate(records_in(step.out)[index % 3]):
            assert_record(record, logits[index, slot], tokens[slot], [3, 20][slot])
    step.table.arrays["counter"].fill_(-1)
    tokens = step.run(cuda_ops, logits[0].cuda())
    last = records_in(step.out)[(2**32 - 1) % 3]
    for slot, record in enumerate(last):
        assert_record(record, logits[0, slot], tokens[slot], [3, 20][slot])


@pytest.mark.parametrize("vocab", [1, 19, 20, 1000, 4097, REAL_VOCAB])
@pytest.mark.parametrize("count", [0, 3, 20])
def test_given_tokens(cuda_ops: Any, vocab: int, count: int, generator: torch.Generator) -> None:
    """Of rows that nothing was drawn from; the bits do not depend on the company."""
    logits = hard_logits(18, vocab, generator)
    tokens = torch.randint(0, vocab, (18,), generator=generator, dtype=torch.int32)
    out = empty_records(1, 18).pin_memory()[0]
    cuda_ops.token_logprobs(logits.cuda(), tokens.cuda(), count, out)
    torch.cuda.synchronize()
    for row, record in enumerate(records_in(out)):
        assert_record(record, logits[row], int(tokens[row]), count)
    one = empty_records(1, 1).pin_memory()[0]
    for row in (0, 7, 17):
        padded = torch.full((1, vocab + 9), torch.nan, device="cuda")
        padded[:, 5 : vocab + 5] = logits[row].cuda()
        cuda_ops.token_logprobs(padded[:, 5 : vocab + 5], tokens[[row]].cuda(), count, one)
        torch.cuda.synchronize()
        assert torch.equal(one[0], out[row])


def test_refusals_of_given_tokens(cuda_ops: Any) -> None:
    logits, out = torch.zeros(2, 50, device="cuda"), empty_records(1, 2)[0]
    tokens = torch.zeros(2, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=r"count in \[0, 20\], got 21"):
        cuda_ops.token_logprobs(logits, tokens, 21, out)
    with pytest.raises(ValueError, match=r"token_ids of shape \[2\], got \[1\]"):
        cuda_ops.token_logprobs(logits, tokens[:1], 1, out)
    with pytest.raises(ValueError, match=r"out of shape \[2, 42\]"):
        cuda_ops.token_logprobs(logits, tokens, 1, out[:1])


def test_refusals(cuda_ops: Any) -> None:
    step = Step(cuda_ops, torch.zeros(2, 50, device="cuda"), [1, 1])
    table, counts, out = step.table.table, step.counts, step.out
    logits = torch.zeros(2, 50, device="cuda")
    with pytest.raises(ValueError, match=r"counts of shape \[2\], got \[1\]"):
        cuda_ops.logprobs(table, logits, None, counts[:1], out)
    with pytest.raises(ValueError, match=r"out of shape \[3, 2, 42\], got \[3, 2, 41\]"):
        cuda_ops.logprobs(table, logits, None, counts, out[..., :41])
    with pytest.raises(ValueError, match="out contiguous"):
        cuda_ops.logprobs(table, logits, None, counts, empty_records(3, 4)[:, :2])
    with pytest.raises(ValueError, match="all rows of the table, got 1 rows"):
        cuda_ops.logprobs(table, logits[:1], None, counts, out)
    with pytest.raises(TypeError, match="out"):
        cuda_ops.logprobs(table, logits, None, counts, out.cuda())
