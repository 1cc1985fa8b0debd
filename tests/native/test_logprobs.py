"""Logprobs on the CPU: as the oracle has them, and one row's bits whatever the company."""

import pytest
import torch
from logprob_records import COUNTS, assert_record, empty_records, hard_logits, records_in
from torch import Tensor

from worker import _native

INTS = torch.int32


def logprobs(ops: _native.CpuOps, logits: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    out = empty_records(len(logits))
    ops.logprobs(logits, tokens.to(INTS), counts.to(INTS), out)
    return out


def drawable(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A token of each row that is not masked."""
    return torch.multinomial(logits.isfinite().float(), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("vocab", [1, 3, 19, 20, 21, 64, 1000, 49152])
def test_as_the_oracle_has_them(
    ops: _native.CpuOps, vocab: int, generator: torch.Generator
) -> None:
    logits = hard_logits(18, vocab, generator)
    counts = torch.tensor(COUNTS * 4)[:18]
    for tokens in (drawable(logits, generator), logits.argmax(1)):
        records = records_in(logprobs(ops, logits, tokens, counts))
        for row, record in enumerate(records):
            assert_record(record, logits[row], int(tokens[row]), int(counts[row]))


def test_ties_come_by_id(ops: _native.CpuOps) -> None:
    logits = torch.zeros(2, 50)
    logits[0, [40, 7, 30]] = 2.0
    logits[1, [9, 3]] = torch.tensor([0.0, -0.0])
    out = logprobs(ops, logits, torch.tensor([30, 9]), torch.tensor([4, 20]))
    records = records_in(out)
    assert records["best_token_ids"][0, :4].tolist() == [7, 30, 40, 0]
    assert records["best_token_ids"][1].tolist() == list(range(20))
    assert records["rank"].tolist() == [2, 10]


def test_a_row_does_not_depend_on_company(
    ops: _native.CpuOps, lone_ops: _native.CpuOps, generator: torch.Generator
) -> None:
    logits = hard_logits(17, 500, generator)
    tokens, counts = drawable(logits, generator), torch.tensor(COUNTS * 4)[:17]
    alone = torch.cat(
        [
            logprobs(lone_ops, logits[i : i + 1], tokens[i : i + 1], counts[i : i + 1])
            for i in range(17)
        ]
    )
    order = torch.randperm(17, generator=generator)
    assert torch.equal(logprobs(ops, logits[order], tokens[order], counts[order]), alone[order])
    strided = torch.full((17, 600), torch.nan)
    strided[:, 50:550] = logits
    assert torch.equal(logprobs(ops, strided[:, 50:550], tokens, counts), alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": 50}, r"token_ids\[0\] in \[0, 50\), got 50"),
        ({"token_ids": -1}, r"token_ids\[0\] in \[0, 50\), got -1"),
        ({"counts": 21}, r"counts\[0\] in \[0, 21\), got 21"),
        ({"counts": -1}, r"counts\[0\] in \[0, 21\), got -1"),
        ({"words": 41}, r"out of shape \[1, 42\], got \[1, 41\]"),
    ],
)
def test_refusals(ops: _native.CpuOps, change: dict[str, int], message: str) -> None:
    values = {"token_ids": 0, "counts": 0, "words": 42, **change}
    token_ids, counts = (
        torch.tensor([values[name]], dtype=INTS) for name in ("token_ids", "counts")
    )
    out = torch.zeros(1, values["words"], dtype=INTS)
    with pytest.raises(ValueError, match=rf"\[logprobs\] expected {message}"):
        ops.logprobs(torch.zeros(1, 50), token_ids, counts, out)
