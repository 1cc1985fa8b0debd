"""B45: a GPU's memory is reckoned right, refused with numbers, and does not grow while serving."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_driver import DEVICE, GpuDriver, needs_gpus
from worker_driver import sampling

from checkpoints import make_checkpoint
from worker.errors import MemoryPlanError
from worker.rank import RankSetup

pytestmark = [pytest.mark.gpu, needs_gpus()]

GIB = 1 << 30
LONGEST = 40960
# 8 KiB of K and V per position.
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": LONGEST,
}


SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_checkpoint(folder, "qwen3", dtype="bfloat16", device=DEVICE, **SHAPE)


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Nothing of other tests is left, in use or kept by torch."""
    give_back()
    yield
    give_back()


def give_back() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def used_bytes() -> int:
    """Of the card, by everybody."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def hold_all_but(num_bytes: int) -> torch.Tensor:
    """What another process does to this one: only `num_bytes` stay free."""
    free, _ = torch.cuda.mem_get_info()
    assert free > num_bytes, "somebody else holds this card"
    return torch.empty(free - num_bytes, dtype=torch.uint8, device=DEVICE)


def test_predicted_is_measured(folder: Path) -> None:
    """Within 5 %: by the driver's count of the whole card, and by what the rank says."""
    before = used_bytes()
    driver = GpuDriver(folder, num_slots=64, max_seq_len=LONGEST)
    torch.cuda.synchronize()
    taken, plan = used_bytes() - before, driver.info.plan
    print(f"needed {plan.needed_bytes:,}, taken {taken:,}, measured {driver.info.measured_bytes:,}")
    assert plan.needed_bytes > 20 * GIB
    assert abs(taken - plan.needed_bytes) <= 0.05 * plan.needed_bytes
    assert abs(driver.info.measured_bytes - plan.predicted_bytes) <= 0.05 * plan.predicted_bytes


OF_CARD = r" of [\d,]+ MiB \(the rest is in use or kept free\); "
ADVICE = rf"available: ([\d,]+) MiB{OF_CARD}fits: (\d+) slots x (\d+), or (\d+) slots x (\d+)"


def test_refused_beside_another_process_and_what_is_advised_fits(folder: Path) -> None:
    """Before anything is loaded, with numbers; either advice can be followed to the letter."""
    held = hold_all_but(3 * GIB)
    for which in range(2):
        before = used_bytes()
        with pytest.raises(MemoryPlanError) as caught:
            GpuDriver(folder, num_slots=8, max_seq_len=LONGEST)
        message = str(caught.value)
        assert used_bytes() - before < 64 << 20, "refused before anything is allocated"
        assert f"8 slots x {LONGEST} positions need" in message
        assert f"8 x {LONGEST} x 8,192 bytes = 2,560 MiB" in message
        found = re.search(ADVICE, message)
        assert found is not None, message
        available, *numbers = (int(text.replace(",", "")) for text in found.groups())
        # 3 GiB are free; some is left for the driver.
        assert 2.5 * 1024 <= available <= 3 * 1024
        assert (numbers[1], numbers[2]) == (LONGEST, 8)
        num_slots, max_seq_len = numbers[2 * which : 2 * which + 2]
        driver = GpuDriver(folder, num_slots=num_slots, max_seq_len=max_seq_len)
        assert len(driver.generate((5, 6, 7), 4, num_slots - 1)) == 4
        del driver
        give_back()
    assert held.numel() > 0


def test_nothing_fits(folder: Path) -> None:
    held = hold_all_but(300 << 20)
    with pytest.raises(
        MemoryPlanError, match=rf"available: \d+ MiB{OF_CARD}no number of slots fits"
    ):
        GpuDriver(folder, num_slots=8, max_seq_len=1024)
    assert held.numel() > 0


def test_serving_takes_no_more_memory(folder: Path) -> None:
    """Longest prompts in every slot, chunks beside decode rows: on a card that is full besides."""
    length = 8192
    driver = GpuDriver(folder, num_slots=8, max_seq_len=length)
    driver.watched = False
    most = driver.info.limits.max_step_tokens
    prompt = tuple(3 + (index * index) % 32000 for index in range(length - 3))
    # What the first large and the first small command take they keep: it is in the plan's reserve.
    driver.generate(prompt[:most], 4)
    driver.generate((5, 6, 7), 4)
    held = hold_all_but(256 << 20)
    reserved, used = torch.cuda.memory_reserved(), used_bytes()
    decoding: list[Any] = []
    for slot in range(8):
        start = 0
        while start < len(prompt):
            piece = prompt[start : start + most - len(decoding)]
            last = start + len(piece) == len(prompt)
            row = (
                driver.chunk(slot, start, piece, sample=last)
                if start
                else driver.first_chunk(slot, piece, sampling(length, **SAMPLED), sample=last)
            )
            driver.run(*decoding, row)
            start += len(piece)
        decoding.append(driver.decode(slot))
    last_result = driver.run(*decoding, num_steps=8)
    assert not any(row.corrupted for row in last_result.rows)
    assert last_result.rows[-1].token_ids, "the last slot still had room"
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - reserved <= 4 << 20
    assert used_bytes() - used < 64 << 20
    assert held.numel() > 0


def test_configured_again_with_other_limits(folder: Path) -> None:
    """The weights stay, the slots of before do not."""
    driver = GpuDriver(folder, num_slots=8, max_seq_len=LONGEST)
    rank, info, before = driver.rank, driver.info, used_bytes()
    # The driver's notes of logits would hold the decoder.
    del driver.decoder.forward, driver
    gc.collect()
    setup = RankSetup(epoch=2, num_slots=2, max_seq_len=1024)
    again = rank.configure(setup, lambda *_: None, lambda: False)
    torch.cuda.synchronize()
    assert before - used_bytes() > 2 * GIB
    assert again.fingerprint == info.fingerprint
    assert all(result.passed for result in again.self_tests)
    assert again.measured_bytes <= again.plan.predicted_bytes * 1.05
