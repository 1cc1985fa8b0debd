"""`bench journal` on two small servers."""

import json

import pytest
from typer.testing import CliRunner

from checkpoints import make_checkpoint
from slotwise_cli.__main__ import build_app
from slotwise_cli.bench_journal import _cost


def test_both_servers_are_measured(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    make_checkpoint(folder, "qwen3", tokenizer=True)
    command = ["bench", "journal", "--model", str(folder), "--concurrency", "2", "--repeats", "2"]
    command += ["--pairs", "1", "--output-tokens", "8", "--json"]
    done = CliRunner().invoke(build_app(), command)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["concurrency"] == 2
    for name in ("with a journal", "without"):
        speed = result[name]["tokens_per_s"]
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]


def test_the_cost_is_of_medians_of_pairs():
    pairs = [([100.0, 100.0, 200.0], [99.0, 90.0, 200.0]), ([100.0], [97.0]), ([10.0], [10.5])]
    cost = _cost(pairs)
    assert (cost.median, cost.min, cost.max) == pytest.approx((1.0, -5.0, 3.0))
