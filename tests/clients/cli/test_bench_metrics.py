"""`bench metrics` on a small server."""

import json

import pytest
from typer.testing import CliRunner

from checkpoints import make_checkpoint
from slotwise_cli.__main__ import build_app
from slotwise_cli.turns import cost


def test_rounds_with_readings_and_without(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    make_checkpoint(folder, "qwen3", tokenizer=True)
    command = ["bench", "metrics", "--model", str(folder), "--concurrency", "2", "--repeats", "2"]
    done = CliRunner().invoke(build_app(), [*command, "--output-tokens", "8", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["concurrency"] == 2
    # At least at the begin of each of its rounds.
    assert result["num_readings"] >= 2
    assert result["reading_ms_p50"] > 0
    for name in ("metrics are read", "not read"):
        speed = result[name]["tokens_per_s"]
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]


def test_the_cost_is_of_neighbouring_rounds():
    spent = cost([100.0, 100.0, 10.0], [99.0, 97.0, 10.5])
    assert (spent.median, spent.min, spent.max) == pytest.approx((1.0, -5.0, 3.0))
