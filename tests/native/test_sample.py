"""Sampling: ids equal to the oracle's, whatever the company; filters at their borders."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tolerances import tolerance
from torch import Tensor

import reference
from worker import _native


@dataclass(frozen=True, slots=True)
class Row:
    """The parameters of one row; the defaults filter nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


def draw(ops: _native.CpuOps, logits: Tensor, rows: list[Row]) -> list[int]:
    out = torch.full((len(rows),), -7, dtype=torch.int32)
    ops.sample(
        logits,
        torch.tensor([row.temperature for row in rows]),
        torch.tensor([row.top_k for row in rows], dtype=torch.int32),
        torch.tensor([row.top_p for row in rows]),
        torch.tensor([row.min_p for row in rows]),
        torch.tensor([row.seed for row in rows], dtype=torch.int64),
        torch.tensor([row.position for row in rows], dtype=torch.int32),
        out,
    )
    return out.tolist()


def oracle(logits: Tensor, row: Row) -> int:
    # The library gets float32 parameters.
    temperature, top_p, min_p = (
        float(np.float32(value)) for value in (row.temperature, row.top_p, row.min_p)
    )
    return reference.sample(logits, temperature, row.top_k, top_p, min_p, row.seed, row.position)


def random_rows(count: int, vocab: int, generator: torch.Generator) -> list[Row]:
    unit = torch.rand(count, 4, generator=generator).tolist()
    whole = torch.randint(0, 2**31 - 1, (count, 3), generator=generator).tolist()
    return [
        Row(
            temperature=0.0 if i % 11 == 0 else 2 * t,
            top_k=0 if i % 3 == 0 else k % vocab,
            top_p=1.0 if i % 4 == 0 else p,
            min_p=0.0 if i % 5 == 0 else m * 0.2,
            seed=whole_seed * 4_000_000_007 - 2**62,
            position=position,
        )
        for i, ((t, p, m, _), (k, whole_seed, position)) in enumerate(zip(unit, whole, strict=True))
    ]


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 1000])
def test_ids_equal_the_oracle(ops: _native.CpuOps, vocab: int, generator: torch.Generator) -> None:
    rows = random_rows(100, vocab, generator)
    logits = torch.randn(100, vocab, generator=generator) * 4
    wanted = [oracle(one, row) for one, row in zip(logits, rows, strict=True)]
    assert draw(ops, logits, rows) == wanted


def test_ids_equal_the_oracle_with_a_real_vocabulary(
    ops: _native.CpuOps, generator: torch.Generator
) -> None:
    rows = random_rows(16, 49152, generator)
    logits = torch.randn(16, 49152, generator=generator) * 3
    logits[3] /= 1000  # nearly flat: one bucket of the histogram holds all
    logits[5, ::2] = -torch.inf
    wanted = [oracle(one, row) for one, row in zip(logits, rows, strict=True)]
    assert draw(ops, logits, rows) == wanted


def test_a_row_does_not_depend_on_company(
    ops: _native.CpuOps, lone_ops: _native.CpuOps, generator: torch.Generator
) -> None:
    rows = random_rows(17, 500, generator)
    logits = torch.randn(17, 500, generator=generator)
    alone = [draw(lone_ops, logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = torch.randperm(17, generator=generator).tolist()
    assert draw(ops, logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    strided = torch.full((17, 600), torch.nan)
    strided[:, 50:550] = logits
    assert draw(ops, strided[:, 50:550], rows) == alone


def test_greedy_takes_the_lowest_of_equal_ids(ops: _native.CpuOps) -> None:
    logits = torch.zeros(3, 100)
    logits[0, [40, 7, 99]] = 2.0
    logits[2] = -torch.inf
    logits[2, 55] = -1e30
    assert draw(ops, logits, [Row(temperature=0.0)] * 3) == [7, 0, 55]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_cannot_be_sampled(ops: _native.CpuOps, temperature: float) -> None:
    logits = torch.zeros(6, 70)
    logits[0, 69] = torch.nan
    logits[1, 0] = torch.nan
    logits[2] = -torch.inf
    logits[3, 33] = torch.inf
    logits[4] = -torch.inf
    logits[4, 68] = 3.0
    got = draw(ops, logits, [Row(temperature=temperature)] * 6)
    assert got[:5] == [-1, -1, -1, -1, 68]
    assert 0 <= got[5] < 70


def kept(ops: _native.CpuOps, logits: Tensor, row: Row, draws: int = 2000) -> set[int]:
    """Every id that comes up in many draws."""
    rows = [replace(row, seed=seed) for seed in range(draws)]
    return set(draw(ops, logits.expand(draws, -1), rows))


def test_filters_keep_exactly_what_they_should(ops: _native.CpuOps) -> None:
    # Probabilities 0.4, 0.2, 0.2, 0.1, 0.1 for ids 3, 1, 4, 0, 2.
    logits = torch.tensor([0.1, 0.2, 0.1, 0.4, 0.2]).log()
    assert kept(ops, logits, Row()) == {0, 1, 2, 3, 4}
    assert kept(ops, logits, Row(top_k=1)) == {3}
    assert kept(ops, logits, Row(top_k=2)) == {3, 1}
    assert kept(ops, logits, Row(top_k=4)) == {3, 1, 4, 0}
    assert kept(ops, logits, Row(top_k=9)) == {0, 1, 2, 3, 4}
    assert kept(ops, logits, Row(top_p=0.0)) == {3}
    assert kept(ops, logits, Row(top_p=0.39)) == {3}
    assert kept(ops, logits, Row(top_p=0.5)) == {3, 1}
    assert kept(ops, logits, Row(top_p=0.65)) == {3, 1, 4}
    assert kept(ops, logits, Row(top_p=0.85)) == {3, 1, 4, 0}
    # Of the best two, 2/3 and 1/3 after top_k.
    assert kept(ops, logits, Row(top_k=2, top_p=0.66)) == {3}
    assert kept(ops, logits, Row(top_k=2, top_p=0.67)) == {3, 1}
    assert kept(ops, logits, Row(min_p=0.3)) == {3, 1, 4}
    assert kept(ops, logits, Row(min_p=0.6)) == {3}
    assert kept(ops, logits, Row(top_k=2, min_p=0.3)) == {3, 1}
    assert kept(ops, torch.zeros(5), Row(top_k=3)) == {0, 1, 2}
    assert kept(ops, torch.zeros(5), Row(top_p=0.5)) == {0, 1, 2}
    assert kept(ops, torch.zeros(5), Row(min_p=1.0)) == {0, 1, 2, 3, 4}


def test_values_at_the_borders(ops: _native.CpuOps, generator: torch.Generator) -> None:
    logits = torch.randn(300, generator=generator) * 5
    rows = [
        Row(temperature, top_k, top_p, min_p, seed=11)
        for temperature, top_k, top_p, min_p in itertools.product(
            (0.0, 1e-38, 1e-7, 1e-4, 2.0, 1e30), (0, 1, 300, 301), (0.0, 1e-6, 1.0), (0.0, 1.0)
        )
    ]
    got = draw(ops, logits.expand(len(rows), -1), rows)
    best = int(logits.argmax())
    for row, token in zip(rows, got, strict=True):
        narrow = row.temperature < 1e-3 or row.top_k == 1 or row.top_p < 1 or row.min_p == 1
        assert token == best if narrow and row.temperature < 1e3 else 0 <= token < 300, row


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's chi-square test."""
    expected = probabilities.double() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("vary", ["seed", "position", "high half of the seed"])
def test_frequencies_follow_the_probabilities(
    ops: _native.CpuOps, vary: str, generator: torch.Generator
) -> None:
    draws, logits = 20000, torch.randn(150, generator=generator)
    rows = {
        "seed": [Row(0.7, seed=i) for i in range(draws)],
        "position": [Row(0.7, seed=5, position=i) for i in range(draws)],
        "high half of the seed": [Row(0.7, seed=i << 32) for i in range(draws)],
    }[vary]
    got = torch.tensor(draw(ops, logits.expand(draws, -1), rows))
    probabilities = (logits.double() / 0.7).softmax(0)
    assert p_value(got.bincount(minlength=150), probabilities) > tolerance("chi_square_p").absolute


def test_seed_and_position_are_different_keys(
    ops: _native.CpuOps, generator: torch.Generator
) -> None:
    logits = torch.zeros(1000).expand(3, -1)
    assert len(set(draw(ops, logits, [Row(seed=1), Row(seed=2), Row(position=1)]))) == 3


def test_philox_gives_the_published_words() -> None:
    # Known answers of the Random123 distribution, for philox4x32-10.
    zero = reference.philox(np.zeros((1, 4), np.uint32), 0)
    assert [hex(word) for word in zero[0]] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]
    ones = reference.philox(np.full((1, 4), 2**32 - 1, np.uint32), 2**64 - 1)
    assert [hex(word) for word in ones[0]] == [
        "0x408f276d",
        "0x41c83b0e",
        "0xa20bc7c6",
        "0x6d5451fd",
    ]
