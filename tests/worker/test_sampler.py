"""The parameters of each row reach the draw, and the draw is keyed as the protocol says."""

from __future__ import annotations

from pathlib import Path

import torch
from worker_driver import Driver, sampling

from checkpoints import make_checkpoint
from worker.batch import SlotSetup
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
    sampler = Sampler(CpuBackend(1), 6, VOCAB)
    for slot, setup in setups.items():
        sampler.set_slot(slot, setup)
    for trial in range(40):
        logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(trial))
        positions = [trial + 7 * row for row in range(5)]
        tokens = sampler.sample(logits, list(setups), positions)
        expected = [
            draw(logits[row], setup, positions[row]) for row, setup in enumerate(setups.values())
        ]
        assert tokens == expected


def test_a_new_tenant_brings_its_parameters() -> None:
    sampler = Sampler(CpuBackend(1), 1, VOCAB)
    logits = torch.zeros(1, VOCAB)
    sampler.set_slot(0, SlotSetup(2.0, 1.0, 0, 0.0, 3, (), 9))
    assert len({sampler.sample(logits, [0], [p])[0] for p in range(30)}) > 10
    sampler.set_slot(0, SlotSetup(0.0, 1.0, 0, 0.0, 3, (), 9))
    assert {sampler.sample(logits, [0], [p])[0] for p in range(30)} == {0}


def test_position_of_a_draw_is_the_index_of_its_token(tmp_path: Path) -> None:
    """A prompt of P tokens: the first token is drawn at position P, the next at P + 1."""
    driver = Driver(make_checkpoint(tmp_path, "llama"), max_seq_len=64)
    prompt, setup = (9, 8, 7, 6, 5), sampling(15, temperature=3.0, seed=12)
    tokens = driver.generate(prompt, 10, temperature=3.0, seed=12)
    logits = driver.logits_of(0)
    assert min(logits) == len(prompt)
    assert tokens == [draw(logits[p], setup, p) for p in sorted(logits)]
