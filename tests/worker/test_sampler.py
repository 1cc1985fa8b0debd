"""The parameters of each row reach the draw, and the draw is keyed as the protocol says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from worker_driver import Driver, same_bits, sampling

import reference
from checkpoints import make_checkpoint
from worker.batch import LogitAdjustment, SlotSetup
from worker.cpu_backend import CpuBackend
from worker.sampler import Sampler

VOCAB = 50


def draw(logits: torch.Tensor, setup: SlotSetup, position: int) -> int:
    """One row, straight from the native operator."""
    out = torch.zeros(1, dtype=torch.int32)
    seed = setup.seed - (1 << 64) if setup.seed >= 1 << 63 else setup.seed
    CpuBackend(1).sample(
        logits.view(1, -1),
        torch.tensor([setup.temperature]),
        torch.tensor([setup.top_k], dtype=torch.int32),
        torch.tensor([setup.top_p]),
        torch.tensor([setup.min_p]),
        torch.tensor([seed], dtype=torch.int64),
        torch.tensor([position], dtype=torch.int32),
        out,
    )
    return int(out[0])


def test_every_row_is_drawn_with_its_own_slots_parameters() -> None:
    setups = {
        3: SlotSetup(0.0, 1.0, 0, 0.0, 1, (), 9),
        0: SlotSetup(1.5, 1.0, 0, 0.0, 2**64 - 1, (), 9),
        5: SlotSetup(1.5, 0.5, 0, 0.0, 2**63, (), 9),
        1: SlotSetup(1.5, 1.0, 3, 0.0, 4, (), 9),
        2: SlotSetup(1.5, 1.0, 0, 0.4, 5, (), 9),
    }
    sampler = Sampler(CpuBackend(1), 6, 6, VOCAB)
    for slot, setup in setups.items():
        sampler.set_slot(slot, setup)
    for trial in range(40):
        logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(trial))
        positions = [trial + 7 * row for row in range(5)]
        tokens = sampler.sample(logits, list(setups), positions, {})
        expected = [
            draw(logits[row], setup, positions[row]) for row, setup in enumerate(setups.values())
        ]
        assert tokens == expected


def test_a_new_tenant_brings_its_parameters() -> None:
    sampler = Sampler(CpuBackend(1), 1, 1, VOCAB)
    logits = torch.zeros(1, VOCAB)
    sampler.set_slot(0, SlotSetup(2.0, 1.0, 0, 0.0, 3, (), 9))
    assert len({sampler.sample(logits, [0], [p], {})[0] for p in range(30)}) > 10
    sampler.set_slot(0, SlotSetup(0.0, 1.0, 0, 0.0, 3, (), 9))
    assert {sampler.sample(logits, [0], [p], {})[0] for p in range(30)} == {0}


def test_position_of_a_draw_is_the_index_of_its_token(tmp_path: Path) -> None:
    """A prompt of P tokens: the first token is drawn at position P, the next at P + 1."""
    driver = Driver(make_checkpoint(tmp_path, "llama"), max_seq_len=64)
    prompt, setup = (9, 8, 7, 6, 5), sampling(15, temperature=3.0, seed=12)
    tokens = driver.generate(prompt, 10, temperature=3.0, seed=12)
    logits = driver.logits_of(0)
    assert min(logits) == len(prompt)
    assert tokens == [draw(logits[p], setup, p) for p in sorted(logits)]


class Recording(CpuBackend):
    """Keeps the last logits that were sampled from."""

    last = torch.empty(0)

    def sample(self, logits: Any, *arguments: Any) -> None:
        self.last = logits
        super().sample(logits, *arguments)


def random_adjustment(rng: random.Random) -> LogitAdjustment:
    """Each part is on or off; many tokens have several."""

    def some(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.choice((0, count)))]

    return LogitAdjustment(
        frequency_penalty=rng.choice((0.0, 0.3, -1.7, 2.0)),
        presence_penalty=rng.choice((0.0, 1.1, -0.4)),
        repetition_penalty=rng.choice((1.0, 1.3, 0.7)),
        prompt_token_ids=tuple(sorted(set(some(30)))),
        generated_token_ids=tuple(some(60)),
        biases=tuple((token_id, rng.uniform(-9, 9)) for token_id in set(some(9))),
        min_len=rng.choice((0, 12, 17)),
    )


def expected_row(
    logits: Tensor, setup: SlotSetup, drawn: list[int], position: int, mask: bytes
) -> Tensor:
    """What the row's token must be drawn from; `drawn` since the set-up."""
    adjustment = setup.adjustment
    if adjustment is not None:
        logits = reference.adjusted(
            logits,
            position,
            frequency_penalty=adjustment.frequency_penalty,
            presence_penalty=adjustment.presence_penalty,
            repetition_penalty=adjustment.repetition_penalty,
            prompt=adjustment.prompt_token_ids,
            generated=(*adjustment.generated_token_ids, *drawn),
            biases=adjustment.biases,
            ends=setup.end_token_ids,
            min_len=adjustment.min_len,
        )
    if mask:
        allowed = [i for i in range(VOCAB) if mask[i // 8] >> (i % 8) & 1]
        logits = reference.masked(logits, allowed)
    return logits


def test_rows_are_adjusted_bit_for_bit() -> None:
    """Against the plain reference, draw by draw, beside rows with other parts and with none."""
    for trial in range(60):
        rng = random.Random(trial)
        ops = Recording(1)
        sampler = Sampler(ops, 6, 4, VOCAB)
        generator = torch.Generator().manual_seed(trial)
        slots = rng.sample(range(6), 4)
        setups = {
            slot: SlotSetup(
                rng.choice((0.0, 1.5)),
                1.0,
                0,
                0.0,
                rng.getrandbits(64),
                tuple(rng.sample(range(VOCAB + 20), 4)),
                99,
                adjustment=random_adjustment(rng) if rng.random() < 0.7 else None,
            )
            for slot in slots
        }
        for slot, setup in setups.items():
            sampler.set_slot(slot, setup)
        drawn: dict[int, list[int]] = {slot: [] for slot in slots}
        for step in range(8):
            rng.shuffle(slots)
            logits = 3 * torch.randn(4, VOCAB, generator=generator)
            before = logits.clone()
            positions = [10 + step] * 4
            masks = {slot: rng.randbytes(7) for slot in slots if rng.random() < 0.3}
            tokens = sampler.sample(logits, list(slots), positions, masks)
            assert same_bits(logits, before), "logprobs are of what is here"
            for row, slot in enumerate(slots):
                wanted = expected_row(
                    before[row], setups[slot], drawn[slot], positions[row], masks.get(slot, b"")
                )
                assert same_bits(ops.last[row], wanted), (trial, step, slot, setups[slot])
                assert tokens[row] == draw(wanted, setups[slot], positions[row])
                drawn[slot].append(tokens[row])


def test_who_wants_nothing_is_drawn_from_the_logits_themselves() -> None:
    ops = Recording(1)
    sampler = Sampler(ops, 2, 2, VOCAB)
    adjusted = SlotSetup(0.0, 1.0, 0, 0.0, 3, (), 9, adjustment=LogitAdjustment(1.0))
    sampler.set_slot(0, adjusted)
    sampler.set_slot(1, SlotSetup(0.0, 1.0, 0, 0.0, 3, (), 9))
    logits = torch.randn(2, VOCAB)
    sampler.sample(logits, [0, 1], [4, 4], {})
    assert ops.last.data_ptr() != logits.data_ptr()
    sampler.sample(logits[1:], [1], [4], {})
    assert ops.last.data_ptr() == logits[1:].data_ptr()
    sampler.set_slot(0, SlotSetup(0.0, 1.0, 0, 0.0, 3, (), 9))
    sampler.sample(logits, [0, 1], [4, 4], {})
    assert ops.last.data_ptr() == logits.data_ptr()


def test_counts_are_the_tenants() -> None:
    """A new tenant with the same adjustment begins with its own counts."""
    ops = Recording(1)
    sampler = Sampler(ops, 1, 1, VOCAB)
    setup = SlotSetup(0.0, 1.0, 0, 0.0, 3, (), 99, adjustment=LogitAdjustment(1.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 5.5
    for _ in range(2):
        sampler.set_slot(0, setup)
        seen = []
        for position in range(8):
            sampler.sample(logits, [0], [position], {})
            seen.append(float(ops.last[0, 7]))
        assert seen == [5.5, 4.5, 3.5, 2.5, 1.5, 0.5, -0.5, -0.5]


def test_what_cannot_be_drawn() -> None:
    """A mask of nothing, a mask of what has no finite logit, a NaN, an overflow: none draws."""
    sampler = Sampler(CpuBackend(1), 1, 1, VOCAB)
    plain = SlotSetup(0.0, 1.0, 0, 0.0, 3, (), 9)
    sampler.set_slot(0, plain)
    logits = torch.randn(1, VOCAB)
    assert sampler.sample(logits, [0], [4], {0: bytes(7)}) == [-1]
    # Bits past the vocabulary allow nothing.
    assert sampler.sample(logits, [0], [4], {0: bytes(6) + b"\xfc"}) == [-1]
    assert sampler.sample(logits, [0], [4], {0: bytes(6) + b"\xfe"}) == [VOCAB - 1]
    logits[0, :8] = -float("inf")
    assert sampler.sample(logits, [0], [4], {0: b"\xff" + bytes(6)}) == [-1]
    logits[0, 9] = float("nan")
    assert sampler.sample(logits, [0], [4], {}) == [-1]
    huge = LogitAdjustment(repetition_penalty=1e-45, prompt_token_ids=(3,))
    ends = LogitAdjustment(min_len=5)
    everything = tuple(range(VOCAB))
    logits = torch.ones(1, VOCAB)
    for setup in (
        SlotSetup(0.0, 1.0, 0, 0.0, 3, (), 9, adjustment=huge),
        SlotSetup(0.0, 1.0, 0, 0.0, 3, everything, 9, adjustment=ends),
    ):
        sampler.set_slot(0, setup)
        assert sampler.sample(logits, [0], [4], {}) == [-1]
