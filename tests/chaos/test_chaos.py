"""The short form: some dozens of faults on a small model with two ranks. Each seed is printed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.chaos import (
    FLAGS,
    OF_CLIENTS,
    OF_THE_NETWORK,
    Chaos,
    chaos_on,
    kill_all_ranks,
    kill_in_recovery,
    kill_in_start,
    kill_rank,
    kill_scheduler,
    kill_scheduler_and_rank,
    stop_rank,
    stop_scheduler,
)
from chaos.readers import make_requests
from chaos.report import Report
from chaos.service import Service
from checkpoints import make_checkpoint

SEED = 20_261_130
STREAMS = 6
PLAN = (
    *(kill_rank, kill_rank, kill_rank, kill_all_ranks, stop_rank, kill_in_recovery),
    *(kill_scheduler, kill_scheduler_and_rank, kill_in_start),
    *3 * (stop_scheduler,),
    *4 * OF_THE_NETWORK,
    *3 * OF_CLIENTS,
)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=4096)


def shuffled(plan: tuple[Callable[[Chaos], None], ...], seed: int) -> list[Callable[[Chaos], None]]:
    return random.Random(seed).sample(plan, len(plan))


def test_streams_survive(tiny_model, tmp_path, capsys):
    """B34, B35, B37: no token lost, doubled or changed, nothing left behind.

    The times that are promised are told, not asserted: other programs may keep the cores busy.
    """
    service = Service(tiny_model, tmp_path, (*FLAGS, "--num-slots", "4"))
    requests = make_requests(random.Random(SEED), 16, range(20, 200))
    with chaos_on(service, STREAMS, SEED, requests, num_by_client=2) as chaos:
        for fault in shuffled(PLAN, SEED):
            chaos.strike(fault)
    with capsys.disabled():
        print("\n" + "\n".join(Report("short chaos", strikes=chaos.log).table()))


def test_a_changed_token_is_noticed(tiny_model, tmp_path):
    """The checks themselves: another expectation fails."""

    def expect_another_token() -> None:
        service = Service(tiny_model, tmp_path, (*FLAGS, "--num-slots", "4"), journal=False)
        requests = make_requests(random.Random(SEED), 2, range(20, 30))
        with chaos_on(service, 1, SEED, requests) as chaos:
            for want in chaos.wants:
                want.generation.answers[0].token_ids[7] ^= 1
            for _ in range(100):
                chaos.wait_token()

    with pytest.raises(AssertionError, match="LostError"):
        expect_another_token()
