"""The short form: some dozens of faults on a small model with two ranks."""

from __future__ import annotations

import random

import pytest

from chaos.chaos import FLAGS, chaos_on
from chaos.service import Service
from checkpoints import make_checkpoint

SEED = 20_261_130
CHEAP = (
    "cut_connections",
    "delay_connections",
    "partition",
    "cancel_storm",
    "slow_reader",
    "stop_scheduler",
)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=4096)


def test_faults_without_restart(tiny_model, tmp_path):
    service = Service(tiny_model, tmp_path, (*FLAGS, "--num-slots", "4"), journal=False)
    with chaos_on(service, 6, SEED, 16, range(20, 200)) as chaos:
        plan = [name for name in CHEAP for _ in range(3)]
        random.Random(SEED).shuffle(plan)
        for name in plan:
            print(chaos.strike(name))


def test_kill_ranks(tiny_model, tmp_path):
    service = Service(tiny_model, tmp_path, (*FLAGS, "--num-slots", "4"), journal=False)
    with chaos_on(service, 6, SEED, 16, range(20, 200)) as chaos:
        for name in ("kill_rank", "kill_rank", "stop_rank", "kill_all_ranks", "kill_in_recovery"):
            print(chaos.strike(name))
