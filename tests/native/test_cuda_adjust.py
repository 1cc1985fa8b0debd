"""Logits adjusted on the GPU: the bits of plain float32 operations in NumPy, counts included."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from device_slots import ALWAYS, DeviceSlots
from torch import Tensor

from worker import _native

pytestmark = pytest.mark.gpu

REPETITION, FREQUENCY, BIASED, MIN_LEN, MASKED = (1 << bit for bit in range(5))
ALL_FLAGS = 31
SEEN_IN_PROMPT = 1 << 30
REAL_VOCAB = 151936
VOCABS = [1, 4, 31, 32, 33, 1000, 4095, 4096, 4097, 8191, 32001]
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass
class Rows:
    """What R rows want, and the sequences that they are of."""

    flags: Tensor  # int32 [R]
    min_len: Tensor
    frequency_penalty: Tensor  # float32 [R]
    presence_penalty: Tensor
    repetition_penalty: Tensor
    counts: Tensor  # int32 [R, V]
    bias: Tensor  # float32 [R, V]
    allowed: Tensor  # bool [R, V]
    ends: Tensor  # bool [R, V]
    length: Tensor  # int32 [R]
    last_token: Tensor  # int32 [R]

    def __len__(self) -> int:
        return len(self.flags)

    def expected(self, logits: Tensor, row: int, length: int, counted: int = -1) -> Floats:
        """Of logits [V], for the token after `length` others; `counted` is one more generated."""
        x = logits.numpy().copy()
        flags = int(self.flags[row])
        seen = self.counts[row].numpy().copy()
        if counted >= 0:
            seen[counted] += 1
        times = seen & ~SEEN_IN_PROMPT
        if flags & REPETITION:
            factor = self.repetition_penalty[row].numpy()
            x = np.where(seen != 0, np.where(x > 0, x / factor, x * factor), x)
        if flags & FREQUENCY:
            frequency, presence = (
                getattr(self, f"{name}_penalty")[row].numpy() for name in ("frequency", "presence")
            )
            x = np.where(times != 0, x - frequency * times.astype(np.float32) - presence, x)
        if flags & BIASED:
            bias = self.bias[row].numpy()
            x = np.where(bias != 0, x + bias, x)
        if flags & MIN_LEN and length < self.min_len[row]:
            x = np.where(self.ends[row].numpy(), np.float32(-np.inf), x)
        if flags & MASKED:
            x = np.where(self.allowed[row].numpy(), x, np.float32(-np.inf))
        assert x.dtype == np.float32
        return x


def random_rows(count: int, vocab: int, generator: torch.Generator) -> Rows:
    """Every combination of flags in turn; arrays hold values whether they are asked for or not."""

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def sometimes(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < 0.1

    generated = ints(40, count, vocab) * sometimes(count, vocab)
    length = ints(100, count) + 1
    return Rows(
        flags=(torch.arange(count, dtype=torch.int32) * 7 + ALL_FLAGS) % 32,
        min_len=length + ints(5, count) - 2,
        frequency_penalty=floats(count),
        presence_penalty=floats(count),
        repetition_penalty=floats(count).abs() + 0.3,
        counts=(generated + SEEN_IN_PROMPT * sometimes(count, vocab)).int(),
        bias=floats(count, vocab) * 10 * sometimes(count, vocab),
        allowed=~sometimes(count, vocab),
        ends=sometimes(count, vocab),
        length=length,
        last_token=ints(vocab, count),
    )


def packed(bits: Tensor) -> Tensor:
    """bool [R, V] -> int32 [R, ceil(V / 32)]."""
    padded = np.zeros((len(bits), -(-bits.shape[1] // 32) * 32), dtype=np.uint8)
    padded[:, : bits.shape[1]] = bits.numpy()
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


class Table:
    """Rows on the device; those in `idle` take no part."""

    def __init__(self, ops: Any, rows: Rows, idle: tuple[int, ...] = ()) -> None:
        self.ops, self.rows = ops, rows
        self.slots = DeviceSlots(len(rows), rows.counts.shape[1])
        arrays = self.slots.arrays
        arrays["length"].copy_(rows.length)
        arrays["last_token"].copy_(rows.last_token)
        arrays["end_ids"].copy_(packed(rows.ends))
        self.slots.put(
            active=[1] * len(rows), scheduled=[ALWAYS * (r not in idle) for r in range(len(rows))]
        )
        ops.begin_command(self.slots.table)
        names = ("flags", "min_len", "counts", "bias")
        names += ("frequency_penalty", "presence_penalty", "repetition_penalty")
        # Copies: a test changes `rows` alone.
        self.arrays = {name: getattr(rows, name).clone().cuda() for name in names}
        self.arrays["mask"] = packed(rows.allowed).cuda()
        self.adjust = _native.AdjustTable(**self.arrays)

    def run(self, logits: Tensor, rows: list[int] | None = None) -> Tensor:
        """Adjusted; NaN where nothing was written."""
        chosen = None if rows is None else torch.tensor(rows, dtype=torch.int32, device="cuda")
        out = torch.full_like(logits.cuda(), torch.nan)
        self.ops.adjust_logits(self.slots.table, self.adjust, logits.cuda(), chosen, out)
        return out.cpu()


def same_bits(a: Tensor, b: Floats) -> bool:
    return a.numpy().tobytes() == b.tobytes()


def random_logits(count: int, vocab: int, generator: torch.Generator) -> Tensor:
    logits = torch.randn(count, vocab, generator=generator) * 4
    logits[1::4, ::3] = -torch.inf
    logits[2::4, 1::5] = 0.0
    logits[3::4, 1::7] = -0.0
    return logits


@pytest.mark.parametrize("vocab", [*VOCABS, REAL_VOCAB])
def test_decode_rows(cuda_ops: Any, vocab: int, generator: torch.Generator) -> None:
    rows, logits = random_rows(33, vocab, generator), random_logits(33, vocab, generator)
    table = Table(cuda_ops, rows, idle=(5, 32))
    got = table.run(logits)
    for row in range(33):
        if row in (5, 32):
            assert got[row].isnan().all()
            continue
        length, token = int(rows.length[row]), int(rows.last_token[row])
        assert same_bits(got[row], rows.expected(logits[row], row, length + 1, token)), row
        if rows.flags[row] & (REPETITION | FREQUENCY):
            rows.counts[row, token] += 1
    assert torch.equal(table.arrays["counts"].cpu(), rows.counts)


@pytest.mark.parametrize("vocab", VOCABS)
def test_ends_of_prompts_count_nothing(
    cuda_ops: Any, vocab: int, generator: torch.Generator
) -> None:
    rows, logits = random_rows(32, vocab, generator), random_logits(9, vocab, generator)
    table = Table(cuda_ops, rows)
    chosen = torch.randperm(32, generator=generator)[:9].tolist()
    got = table.run(logits, chosen)
    for part, row in enumerate(chosen):
        wanted = rows.expected(logits[part], row, int(rows.length[row]))
        assert same_bits(got[part], wanted), row
    assert torch.equal(table.arrays["counts"].cpu(), rows.counts)


@pytest.mark.parametrize("vocab", [1000, 1001])
def test_rows_that_are_not_aligned(cuda_ops: Any, vocab: int, generator: torch.Generator) -> None:
    rows, logits = random_rows(32, vocab, generator), random_logits(32, vocab, generator)
    wanted = Table(cuda_ops, rows).run(logits)
    padded = torch.full((32, vocab + 80), torch.nan, device="cuda")
    padded[:, 37 : vocab + 37] = logits.cuda()
    out = torch.full((32, vocab + 80), 7.0, device="cuda")
    table = Table(cuda_ops, rows)
    cuda_ops.adjust_logits(
        table.slots.table,
        table.adjust,
        padded[:, 37 : vocab + 37],
        None,
        out[:, 3 : vocab + 3],
    )
    assert same_bits(out[:, 3 : vocab + 3].cpu().contiguous(), wanted.numpy())
    assert (out[:, :3] == 7).all()
    assert (out[:, vocab + 3 :] == 7).all()


def test_each_step_counts_its_token(cuda_ops: Any, generator: torch.Generator) -> None:
    """Steps of a table that samples what was adjusted: all tokens but the last are counted."""
    vocab, steps = 500, 40
    rows = random_rows(32, vocab, generator)
    rows.flags.fill_(FREQUENCY | REPETITION)
    rows.counts.zero_()
    rows.ends.zero_()
    table = Table(cuda_ops, rows)
    drawn = torch.zeros(32, vocab, dtype=torch.int32)
    tokens = rows.last_token.tolist()
    logits = torch.randn(32, vocab, generator=generator)
    for _ in range(steps):
        for row, token in enumerate(tokens):
            drawn[row, token] += 1
        tokens = table.slots.sample(cuda_ops, table.run(logits).cuda())
        assert torch.equal(table.arrays["counts"].cpu(), drawn)
    assert (drawn.sum(1) == steps).all()


def test_masked_tokens_are_not_sampled(cuda_ops: Any, generator: torch.Generator) -> None:
    """Only one is allowed; none in a row is a row that cannot be sampled."""
    vocab = 3001
    rows, logits = random_rows(32, vocab, generator), torch.randn(32, vocab, generator=generator)
    rows.flags.fill_(MASKED)
    rows.allowed.zero_()
    allowed = torch.randint(0, vocab, (32,), generator=generator).tolist()
    for row, token in enumerate(allowed):
        rows.allowed[row, token] = row != 3
    table = Table(cuda_ops, rows)
    table.slots.put(temperature=[float(row % 2) for row in range(32)])
    wanted = [-1 if row == 3 else token for row, token in enumerate(allowed)]
    assert table.slots.sample(cuda_ops, table.run(logits).cuda()) == wanted


def test_bad_rows_stay_bad_and_harm_nobody(cuda_ops: Any, generator: torch.Generator) -> None:
    rows, logits = random_rows(32, 4000, generator), random_logits(32, 4000, generator)
    rows.flags.fill_(REPETITION | FREQUENCY | BIASED)
    clean = Table(cuda_ops, rows).run(logits)
    logits[4, 100] = torch.nan
    logits[9, 7] = torch.inf
    table = Table(cuda_ops, rows)
    got = table.run(logits)
    others = [row for row in range(32) if row not in (4, 9)]
    assert same_bits(got[others], clean[others].numpy())
    tokens = table.slots.sample(cuda_ops, got.cuda())
    assert [row for row, token in enumerate(tokens) if token < 0] == [4, 9]


def test_refusals(cuda_ops: Any, generator: torch.Generator) -> None:
    table = Table(cuda_ops, random_rows(2, 50, generator))
    other = Table(cuda_ops, random_rows(3, 50, generator))
    slots, logits = table.slots.table, torch.zeros(2, 50, device="cuda")
    with pytest.raises(ValueError, match="two tables of as many rows and tokens"):
        cuda_ops.adjust_logits(slots, other.adjust, logits, None, logits)
    with pytest.raises(ValueError, match=r"out of shape \[2, 50\], got \[1, 50\]"):
        cuda_ops.adjust_logits(slots, table.adjust, logits, None, logits[:1])
    with pytest.raises(ValueError, match="all rows of the table, got 1 rows"):
        cuda_ops.adjust_logits(slots, table.adjust, logits[:1], None, logits[:1])
    with pytest.raises(ValueError, match=r"mask of shape \[2, 2\], got \[2, 1\]"):
        _native.AdjustTable(**{**table.arrays, "mask": table.arrays["mask"][:, :1]})
