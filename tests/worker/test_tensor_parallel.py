"""Ranks on threads of this process, over real sockets: same tokens, same bits, same digests."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerances import assert_close
from worker_driver import Driver, free_address, on_ranks, same_bits, sampling

import worker.rank
from checkpoints import make_checkpoint
from worker import device
from worker.batch import StepResult
from worker.errors import MemoryPlanError, SetupCancelledError, SetupError, StepError
from worker.rank import Rank, RankSetup
from worker.sharding import Part
from worker.tensor_parallel import Rendezvous, join_links

SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 77}


def drivers(folder: Path, world_size: int, **setup: Any) -> list[Driver]:
    address = free_address() if world_size > 1 else ""
    return on_ranks(
        world_size,
        lambda rank: Driver(
            folder, rank=rank, world_size=world_size, rendezvous_address=address, **setup
        ),
    )


# Heads, KV heads, feed-forward and vocabulary that do not divide evenly, or must be replicated.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen3-tp2": ("qwen3", 2, {"vocab_size": 321, "intermediate_size": 113}),
    "llama-tp3": (
        "llama",
        3,
        {
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "vocab_size": 320,
        },
    ),
    "qwen2-tp4-replicated": (
        "qwen2",
        4,
        {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "vocab_size": 323,
            "intermediate_size": 110,
        },
    ),
    # The demo model's heads: rank 0 holds one KV group, rank 1 two.
    "llama-tp2-uneven-groups": (
        "llama",
        2,
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "llama-tp2-mqa": (
        "llama",
        2,
        {"num_key_value_heads": 1, "tie_word_embeddings": False, "vocab_size": 319},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_one_rank(tmp_path: Path, name: str) -> None:
    family, world_size, overrides = MODELS[name]
    folder = make_checkpoint(tmp_path, family, seed=3, **overrides)
    prompt = tuple(range(7, 30))
    single = Driver(folder, max_seq_len=64)
    expected = [single.generate(prompt, 16, slot, **SEEDED) for slot in (0, 1)]
    expected.append(single.generate(prompt, 16, 2))
    ranks = drivers(folder, world_size, max_seq_len=64)
    for driver in ranks:
        assert all(test.passed for test in driver.info.self_tests)

    def generate(rank: int) -> list[list[int]]:
        driver = ranks[rank]
        tokens = [driver.generate(prompt, 16, slot, num_steps=3, **SEEDED) for slot in (0, 1)]
        return [*tokens, driver.generate(prompt, 16, 2, cuts=(5, 9))]

    for tokens in on_ranks(world_size, generate):
        assert tokens == expected
    for slot in range(3):
        for position, row in ranks[0].logits_of(slot).items():
            for driver in ranks[1:]:
                assert same_bits(driver.logits_of(slot)[position], row)
            assert_close(row, single.logits_of(slot)[position], "logits_tp")


def test_each_rank_holds_its_share(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    whole = Driver(folder).info.plan
    parts = [driver.info.plan for driver in drivers(folder, 2)]
    assert sum(plan.kv_bytes for plan in parts) == whole.kv_bytes
    replicated = parts[0].weight_bytes + parts[1].weight_bytes - whole.weight_bytes
    assert replicated < 0.05 * whole.weight_bytes


def test_ranks_of_one_machine_share_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, "qwen2")
    needed = drivers(folder, 2)[0].info.plan.needed_bytes
    monkeypatch.setattr(device, "available_bytes", lambda: int(needed * 1.9))
    with pytest.raises(MemoryPlanError, match="4 slots x 640"):
        drivers(folder, 2)
    monkeypatch.setattr(device, "available_bytes", lambda: int(needed * 2.1))
    drivers(folder, 2)


def test_company_changes_no_bit_at_tp2(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    ranks = drivers(folder, 2, num_slots=4, max_seq_len=64)
    prompt = tuple(range(40, 61))

    def alone_and_in_company(rank: int) -> None:
        driver = ranks[rank]
        tokens = driver.generate(prompt, 10, 0, **SEEDED)
        expected = driver.logits_of(0)
        rows = [
            driver.first_chunk(slot, tuple(range(3, 8 + slot)), sampling(60, **SEEDED))
            for slot in (0, 1, 3)
        ]
        result = driver.run(*rows, driver.first_chunk(2, prompt, sampling(31, **SEEDED)))
        again = list(result.rows[3].token_ids)
        for count in (3, 1, 4, 4):
            slots = [3, 2, 1, 0][:count] if count > 1 else [2]
            result = driver.run(*(driver.decode(slot) for slot in slots), num_steps=3)
            again += next(row.token_ids for row in result.rows if row.slot == 2)
        assert again == tokens
        for position, row in expected.items():
            assert same_bits(driver.logits_of(2)[position], row)

    on_ranks(2, alone_and_in_company)


def test_ranks_draw_the_same_tokens(tmp_path: Path) -> None:
    """B24: temperature 1, 8 slots, hundreds of steps; the digests of every command agree."""
    folder = make_checkpoint(tmp_path, "llama", hidden_size=24, intermediate_size=32)
    ranks = drivers(folder, 2, num_slots=8, max_seq_len=128)

    def serve(rank: int) -> list[StepResult]:
        driver, rng = ranks[rank], random.Random(4)
        results = []
        for _ in range(5):
            for slot in range(8):
                prompt = tuple(rng.randrange(320) for _ in range(rng.randrange(1, 30)))
                setup = sampling(
                    128, temperature=1.0, seed=rng.getrandbits(64), top_p=0.95, end=(2,)
                )
                results.append(driver.run(driver.first_chunk(slot, prompt, setup)))
            for _ in range(8):
                rows = [driver.decode(slot) for slot in range(8)]
                results.append(driver.run(*rows, num_steps=8))
        return results

    left, right = on_ranks(2, serve)
    assert [r.digest for r in left] == [r.digest for r in right]
    assert [r.rows for r in left] == [r.rows for r in right]
    assert sum(len(row.token_ids) for r in left for row in r.rows) > 1500


def test_a_peer_that_leaves_fails_the_step(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    ranks = drivers(folder, 2)
    ranks[1].rank.release()
    with pytest.raises(StepError, match="step 1 failed"):
        ranks[0].run(ranks[0].first_chunk(0, (5, 6), sampling(20)))


def test_group_forms_anew_in_the_same_processes(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    ranks = drivers(folder, 2, max_seq_len=64)
    expected = on_ranks(2, lambda rank: ranks[rank].generate((5, 6, 7), 9))[0]
    address = free_address()

    def again(rank: int) -> list[int]:
        from worker.rank import RankSetup

        setup = RankSetup(2, rank, 2, address, num_slots=2, max_seq_len=32)
        old = ranks[rank].rank
        old.configure(setup, lambda *_: None, lambda: False)
        driver = ranks[rank]
        driver.executor, driver.step_id = old.executor, 0
        driver.generations = [0, 0]
        return driver.generate((5, 6, 7), 9, 1)

    assert on_ranks(2, again) == [expected, expected]


def test_sum_is_in_rank_order() -> None:
    address = free_address()
    values = torch.tensor([[1e8, 1.0], [1.0, 1e-8], [-1e8, -1.0], [3.0, 1e-8]])
    expected = ((values[0] + values[1]) + values[2]) + values[3]
    assert not same_bits(expected, ((values[0] + values[1]) + values[3]) + values[2])

    def add(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        group = join_links(Rendezvous(rank, 4, address, 60.0, lambda: False, "cpu"))
        group.reserve(1, 2, 2, [Part(0, 1), Part(1, 3), Part(3, 4), Part(4, 5)])
        x = values[rank].clone()
        group.all_reduce(x)
        width = (1, 2, 1, 1)[rank]
        local = torch.arange(2 * width, dtype=torch.float32).view(2, width) + 10 * rank
        out = torch.empty(2, 5)
        group.gather_columns(local, out)
        return x, out

    for total, columns in on_ranks(4, add):
        assert same_bits(total, expected)
        assert columns.tolist() == [[0, 10, 11, 20, 30], [1, 12, 13, 21, 31]]


def test_one_rank_is_a_group() -> None:
    group = join_links(Rendezvous(0, 1, "", 1.0, lambda: False, "cpu"))
    x = torch.tensor([3.0])
    group.all_reduce(x)
    assert x.item() == 3
    group.close()


def test_absent_rank_is_named() -> None:
    with pytest.raises(SetupError, match="waiting for rank 1, 2"):
        join_links(Rendezvous(0, 3, free_address(), 0.6, lambda: False, "cpu"))


def test_rendezvous_can_be_cancelled() -> None:
    for rank in (0, 1):
        cancelled = threading.Event()
        threading.Timer(0.2, cancelled.set).start()
        with pytest.raises(SetupCancelledError):
            join_links(Rendezvous(rank, 2, free_address(), 300.0, cancelled.is_set, "cpu"))


@pytest.mark.parametrize("address", ["", "nowhere", "host:", "host:0", "host:99999"])
def test_bad_rendezvous_address(address: str) -> None:
    with pytest.raises(SetupError, match="rendezvous_address"):
        join_links(Rendezvous(0, 2, address, 1.0, lambda: False, "cpu"))


def test_a_rank_that_becomes_another_reads_its_weights_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are told their ranks at each start of a scheduler, which may name them otherwise."""
    loads: list[Any] = []
    load = worker.rank.load_weights
    monkeypatch.setattr(
        worker.rank, "load_weights", lambda *args: loads.append(args[1]) or load(*args)
    )
    ranks = [driver.rank for driver in drivers(make_checkpoint(tmp_path, "llama"), 2)]
    for epoch, places in ((2, (0, 1)), (3, (1, 0))):
        address = free_address()

        def configure(i: int, epoch: int = epoch, place: tuple = places, at: str = address) -> None:
            setup = RankSetup(epoch, place[i], 2, at, num_slots=4)
            ranks[i].configure(setup, lambda *_: None, lambda: False)

        on_ranks(2, configure)
    assert len(loads) == 4


def test_a_rank_is_broken_off_also_before_it_is_configured(tmp_path: Path) -> None:
    """A self-test may wait for a peer."""
    address = free_address()
    rank = Rank(make_checkpoint(tmp_path, "llama"), 1)
    joined = on_ranks(2, lambda i: join_links(Rendezvous(i, 2, address, 60, lambda: False, "cpu")))
    rank._group = joined[0]
    rank.abort()
    assert joined[0]._links is not None
    assert joined[0]._links._is_aborted
    for group in joined:
        group.close()
