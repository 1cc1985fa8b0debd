"""The sampler on the GPU: the same ids as the CPU's, and one row's id whatever the company.

Both have the same arithmetic but for the sum of weights of top_p, so that an id may differ where a
token's share lies at the border; such a row must be a tie to within TIE.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from device_slots import ALWAYS, DeviceSlots
from tolerances import tolerance
from torch import Tensor

import reference
from worker import _native

pytestmark = pytest.mark.gpu
KERNELS = ("best", "portable")

REAL_VOCAB = 151936
TIE = 1e-5
NO_PART = -2


@dataclass(frozen=True, slots=True)
class Rows:
    """Parameters of B rows; the defaults filter nothing."""

    temperature: Tensor  # float32 [B]
    top_k: Tensor  # int32
    top_p: Tensor
    min_p: Tensor
    seed: Tensor  # int64
    position: Tensor  # int32

    def __len__(self) -> int:
        return len(self.seed)

    def take(self, index: Tensor) -> "Rows":
        return Rows(*(getattr(self, name)[index] for name in self.__slots__))

    def on_cpu(self, logits: Tensor) -> list[int]:
        out = torch.full((len(self),), -7, dtype=torch.int32)
        ops = _native.CpuOps(2)
        parameters = (self.temperature, self.top_k, self.top_p, self.min_p)
        ops.sample(logits, *parameters, self.seed, self.position, out)
        return out.tolist()

    def put(self, slots: DeviceSlots) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            slots.arrays[name].copy_(getattr(self, name))

    def decode(self, ops: Any, logits: Tensor) -> list[int]:
        """Row b is slot b, and draws the token after its growth by one."""
        slots = DeviceSlots(len(self), logits.shape[1])
        self.put(slots)
        slots.put(active=[1] * len(self), scheduled=[ALWAYS] * len(self))
        slots.arrays["length"].copy_(self.position - 1)
        ops.begin_command(slots.table)
        return slots.sample(ops, logits.cuda() if logits.device.type == "cpu" else logits)


def make_rows(count: int, **values: Any) -> Rows:
    """Each value is one for all rows or a sequence of them."""
    kinds = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 9}
    types = {"top_k": torch.int32, "position": torch.int32, "seed": torch.int64}
    arrays = []
    for name, default in kinds.items():
        value = torch.as_tensor(values.get(name, default), dtype=types.get(name, torch.float32))
        arrays.append(value.expand(count).contiguous())
    return Rows(*arrays)


def random_rows(count: int, vocab: int, generator: torch.Generator) -> Rows:
    """Every mixture of filters, some of them off; small and large top_k."""
    index = torch.arange(count)
    unit = torch.rand(4, count, generator=generator)
    whole = torch.randint(0, 2**31 - 1, (4, count), generator=generator)
    small = whole[0] % 64 + 1
    top_k = torch.where(index % 2 == 0, small.clamp(max=vocab), whole[0] % vocab)
    return make_rows(
        count,
        temperature=torch.where(index % 11 == 0, 0, 2 * unit[0] + 1e-3),
        top_k=torch.where(index % 3 == 0, 0, top_k),
        top_p=torch.where(index % 4 == 0, 1, unit[1]),
        min_p=torch.where(index % 5 > 0, 0, unit[2] * 0.2),
        seed=whole[1] * 4_000_000_007 - 2**62,
        position=whole[2] + 1,
    )


def random_logits(count: int, vocab: int, generator: torch.Generator) -> Tensor:
    """In turn normal, wide, flat, rounded to many ties, half without a value, and all equal."""
    logits = torch.randn(count, vocab, generator=generator) * 3
    logits[1::7] *= 5
    logits[2::7] /= 1000
    logits[3::7] = (logits[3::7] * 2).round() / 2
    logits[4::7, ::2] = -torch.inf
    logits[5::7] = logits[5::7].bfloat16().float()
    logits[6::49] = 1.5
    return logits


def is_tie(logits: Tensor, rows: Rows, row: int, got: int) -> bool:
    """Whether the oracle takes `got` for a top_p within TIE, or its noise is as good within TIE."""
    one = {name: getattr(rows, name)[row].item() for name in Rows.__slots__}
    wide = logits[row].double().numpy()
    scaled = (wide - wide.max()) / one["temperature"]
    noisy = scaled + reference.gumbel(len(wide), one["seed"] % 2**64, one["position"])
    for top_p in (one["top_p"] * (1 - TIE), one["top_p"] * (1 + TIE)):
        kept = reference.kept_tokens(scaled, one["top_k"], top_p, one["min_p"])
        best = np.where(kept, noisy, -np.inf).max()
        if kept[got] and noisy[got] >= best - TIE:
            return True
    return False


def assert_twins(logits: Tensor, rows: Rows, got: list[int]) -> None:
    wanted = rows.on_cpu(logits)
    differing = [row for row in range(len(rows)) if got[row] != wanted[row]]
    print(f"{len(rows)} rows of {logits.shape[1]}: {len(differing)} ids differ")
    assert len(differing) <= len(rows) / 1000 + 1
    for row in differing:
        assert is_tie(logits, rows, row, got[row]), (row, got[row], wanted[row], rows)


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 1000, 16384, 16385])
def test_ids_equal_those_of_the_cpu(cuda_ops: Any, vocab: int, generator: torch.Generator) -> None:
    rows = random_rows(1500, vocab, generator)
    logits = random_logits(1500, vocab, generator)
    assert_twins(logits, rows, rows.decode(cuda_ops, logits))


# The last has more logits than shared memory holds.
@pytest.mark.parametrize(("vocab", "count"), [(REAL_VOCAB, 400), (262144, 50), (600_000, 30)])
def test_ids_equal_those_of_the_cpu_with_a_real_vocabulary(
    cuda_ops: Any, vocab: int, count: int, generator: torch.Generator
) -> None:
    rows = random_rows(count, vocab, generator)
    logits = random_logits(count, vocab, generator)
    assert_twins(logits, rows, rows.decode(cuda_ops, logits))


def test_ids_equal_those_of_the_cpu_about_the_longest_list(
    cuda_ops: Any, generator: torch.Generator
) -> None:
    """Up to 512 candidates are sorted; more, or ties that do not fit, are counted."""
    count, vocab = 300, 20000
    index = torch.arange(count)
    logits = random_logits(count, vocab, generator)
    logits[index % 10 == 0, 100:1200] = 20.0
    rows = make_rows(
        count,
        top_k=torch.tensor([1, 2, 500, 511, 512, 513, 514, 600, 1100, 8192])[index // 30],
        top_p=torch.where(index % 3 == 0, 1, torch.rand(count, generator=generator)),
        min_p=torch.where(index % 4 == 0, 0.01, 0),
        seed=index,
    )
    assert_twins(logits, rows, rows.decode(cuda_ops, logits))


def test_prompts_draw_at_their_length(cuda_ops: Any, generator: torch.Generator) -> None:
    rows, logits = random_rows(60, 3000, generator), random_logits(60, 3000, generator)
    wanted = rows.on_cpu(logits)
    slots = DeviceSlots(60, 3000)
    rows.put(slots)
    slots.arrays["length"].copy_(rows.position)
    for count in (60, 1, 7):
        chosen = torch.randperm(60, generator=generator)[:count]
        padded = torch.full((count, 3100), torch.nan, device="cuda")
        padded[:, 37:3037] = logits[chosen].cuda()
        got = slots.sample(cuda_ops, padded[:, 37:3037], chosen.tolist())
        assert got == [wanted[slot] if slot in chosen else NO_PART for slot in range(60)]


def test_a_row_does_not_depend_on_company(cuda_ops: Any, generator: torch.Generator) -> None:
    rows, logits = random_rows(40, 5000, generator), random_logits(40, 5000, generator)
    alone = [
        rows.take(torch.tensor([row])).decode(cuda_ops, logits[row : row + 1])[0]
        for row in range(40)
    ]
    for _ in range(5):
        order = torch.randperm(40, generator=generator)
        assert rows.take(order).decode(cuda_ops, logits[order]) == [alone[row] for row in order]
    spoilt = logits.clone()
    spoilt[1::2] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0])[torch.arange(20) % 4, None]
    got = rows.decode(cuda_ops, spoilt)
    assert got[::2] == alone[::2]
    assert [token for row, token in enumerate(got[1::2]) if row % 4 < 3] == [-1] * 15
    assert [rows.decode(cuda_ops, logits) for _ in range(5)] == [alone] * 5


def test_idle_rows_are_not_read(cuda_ops: Any, generator: torch.Generator) -> None:
    rows, logits = random_rows(16, 5000, generator), random_logits(16, 5000, generator)
    wanted = rows.decode(cuda_ops, logits)
    slots = DeviceSlots(16, 5000)
    rows.put(slots)
    slots.put(active=[1] * 16, scheduled=[ALWAYS * (row % 3 == 1) for row in range(16)])
    slots.arrays["length"].copy_(rows.position - 1)
    cuda_ops.begin_command(slots.table)
    logits[torch.arange(16) % 3 != 1] = torch.nan
    got = slots.sample(cuda_ops, logits.cuda())
    assert got == [wanted[row] if row % 3 == 1 else NO_PART for row in range(16)]


@pytest.mark.parametrize("vocab", [100, REAL_VOCAB])
def test_greedy_takes_the_lowest_of_equal_ids(cuda_ops: Any, vocab: int) -> None:
    logits = torch.zeros(5, vocab)
    logits[0, [40, 7, 99]] = 2.0
    logits[2] = -torch.inf
    logits[2, 55] = -1e30
    logits[3] = -1.0
    logits[3, [90, 20]] = torch.tensor([0.0, -0.0])
    logits[4, [vocab - 1, vocab - 2]] = 2.0
    rows = make_rows(5, temperature=0.0)
    assert rows.decode(cuda_ops, logits) == [7, 0, 55, 20, vocab - 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [70, REAL_VOCAB])
def test_rows_that_cannot_be_sampled(cuda_ops: Any, temperature: float, vocab: int) -> None:
    logits = torch.zeros(8, vocab)
    logits[0, vocab - 1] = torch.nan
    logits[1, 0] = -torch.tensor(torch.nan)
    logits[2] = -torch.inf
    logits[3, 33] = torch.inf
    logits[4] = -torch.inf
    logits[4, 68] = 3.0
    logits[6] = torch.nan
    logits[7, :] = 3e38
    logits[7, 5] = -3e38
    got = make_rows(8, temperature=temperature, top_p=0.9).decode(cuda_ops, logits)
    assert got[:5] == [-1, -1, -1, -1, 68]
    assert 0 <= got[5] < vocab
    assert got[6] == -1
    assert 0 <= got[7] < vocab
    assert got[7] != 5


def kept(ops: Any, logits: Tensor, **filters: float) -> set[int]:
    """Every id that comes up in many draws."""
    rows = make_rows(2000, seed=range(2000), **filters)
    return set(rows.decode(ops, logits.cuda().expand(2000, -1)))


def test_filters_keep_exactly_what_they_should(cuda_ops: Any) -> None:
    # Probabilities 0.4, 0.2, 0.2, 0.1, 0.1 for ids 3, 1, 4, 0, 2.
    logits = torch.tensor([0.1, 0.2, 0.1, 0.4, 0.2]).log()
    assert kept(cuda_ops, logits) == {0, 1, 2, 3, 4}
    assert kept(cuda_ops, logits, top_k=1) == {3}
    assert kept(cuda_ops, logits, top_k=2) == {3, 1}
    assert kept(cuda_ops, logits, top_k=4) == {3, 1, 4, 0}
    assert kept(cuda_ops, logits, top_k=9) == {0, 1, 2, 3, 4}
    assert kept(cuda_ops, logits, top_p=0.0) == {3}
    assert kept(cuda_ops, logits, top_p=0.39) == {3}
    assert kept(cuda_ops, logits, top_p=0.5) == {3, 1}
    assert kept(cuda_ops, logits, top_p=0.65) == {3, 1, 4}
    assert kept(cuda_ops, logits, top_p=0.85) == {3, 1, 4, 0}
    # Of the best two, 2/3 and 1/3 after top_k.
    assert kept(cuda_ops, logits, top_k=2, top_p=0.66) == {3}
    assert kept(cuda_ops, logits, top_k=2, top_p=0.67) == {3, 1}
    assert kept(cuda_ops, logits, min_p=0.3) == {3, 1, 4}
    assert kept(cuda_ops, logits, min_p=0.6) == {3}
    assert kept(cuda_ops, logits, top_k=2, min_p=0.3) == {3, 1}
    assert kept(cuda_ops, torch.zeros(5), top_k=3) == {0, 1, 2}
    assert kept(cuda_ops, torch.zeros(5), top_p=0.5) == {0, 1, 2}
    assert kept(cuda_ops, torch.zeros(5), min_p=1.0) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("vocab", [300, REAL_VOCAB])
def test_values_at_the_borders(cuda_ops: Any, vocab: int, generator: torch.Generator) -> None:
    grid = list(
        itertools.product(
            (0.0, 1e-38, 1e-7, 1e-4, 2.0, 1e30),
            (0, 1, vocab - 1, vocab, vocab + 1),
            (0.0, 1e-6, 0.9999999, 1.0),
            (0.0, 1e-38, 1.0),
        )
    )
    temperature, top_k, top_p, min_p = zip(*grid, strict=True)
    rows = make_rows(
        len(grid), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=11
    )
    logits = torch.randn(vocab, generator=generator) * 5
    got = rows.decode(cuda_ops, logits.cuda().expand(len(grid), -1))
    assert_twins(logits.expand(len(grid), -1), rows, got)
    best = int(logits.argmax())
    for values, token in zip(grid, got, strict=True):
        narrow = values[0] < 1e-3 or values[1] == 1 or values[2] < 0.5 or values[3] == 1
        assert token == best if narrow and values[0] < 1e3 else 0 <= token < vocab, values


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's chi-square test."""
    expected = probabilities.double() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("vary", ["seed", "position", "high half of the seed"])
def test_frequencies_follow_the_probabilities(
    cuda_ops: Any, vary: str, generator: torch.Generator
) -> None:
    draws, logits = 20000, torch.randn(150, generator=generator)
    index = torch.arange(draws)
    rows = {
        "seed": make_rows(draws, temperature=0.7, seed=index),
        "position": make_rows(draws, temperature=0.7, seed=5, position=index + 1),
        "high half of the seed": make_rows(draws, temperature=0.7, seed=index << 32),
    }[vary]
    got = torch.tensor(rows.decode(cuda_ops, logits.cuda().expand(draws, -1)))
    probabilities = (logits.double() / 0.7).softmax(0)
    assert p_value(got.bincount(minlength=150), probabilities) > tolerance("chi_square_p").absolute
