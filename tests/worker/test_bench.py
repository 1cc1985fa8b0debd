"""The in-process ladder and the plan, as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoints import make_checkpoint
from worker.__main__ import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama")


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_ladder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--concurrency", "1", "3", "--prompt-tokens", "200", "--new-tokens", "7"]
    assert main(["bench", "--model", str(folder), *arguments, "--threads", "1"]) == 0
    report = printed(capsys)
    assert [rung["concurrency"] for rung in report["ladder"]] == [1, 3]
    assert all(report["self_tests"].values())
    for rung in report["ladder"]:
        assert len(rung["ttft_ms"]) == rung["concurrency"]
        assert rung["tokens_per_s"] * rung["wall_ms"] / 1e3 == pytest.approx(
            7 * rung["concurrency"]
        )
        assert 0 < rung["prefill_share"] < 1
        assert 0 < rung["step_ms_median"] <= rung["step_ms_max"]


def test_prompts_from_a_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.json"
    path.write_text("[[5, 6, 7], [8, 9]]")
    arguments = ["--concurrency", "3", "--new-tokens", "2", "--prompt-token-ids-json", str(path)]
    assert main(["bench", "--model", str(folder), *arguments]) == 0
    assert printed(capsys)["prompt_tokens"] == [3, 2, 3]
    path.write_text("[]")
    assert main(["bench", "--model", str(folder), *arguments]) == 1
    assert "no token ids" in capsys.readouterr().err


def test_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-slots", "3", "--tp", "2", "--kv-dtype", "bfloat16"]
    assert main(["plan", "--model", str(folder), *arguments]) == 0
    report = printed(capsys)
    assert report["world_size"] == 2
    # 2 layers x (K and V) x 1 head x 8 x 2 bytes
    assert [rank["kv_bytes_per_position"] for rank in report["ranks"]] == [64, 64]
    assert report["ranks"][0]["kv_bytes"] == 3 * 640 * 64
    assert report["ranks"][0]["largest_fitting"] == [[3, 640]]
    few = [*arguments, "--max-running", "1"]
    assert main(["plan", "--model", str(folder), *few]) == 0
    smaller = printed(capsys)["ranks"][0]
    assert smaller["limits"]["max_running"] == 1
    assert smaller["kv_bytes"] == report["ranks"][0]["kv_bytes"]
    assert smaller["workspace_bytes"] < report["ranks"][0]["workspace_bytes"]
    left, right = report["ranks"]
    assert left["available_bytes"] + right["needed_bytes"] < psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["plan", "--max-seq-len", "9999"], "max_seq_len 9999"),
        (["plan", "--tp", "4"], "4 ranks"),
        (["plan", "--max-running", "9"], "max_running 9"),
        (["plan", "--dtype", "int8"], "int8"),
        (["bench", "--concurrency", "0"], "--concurrency"),
    ],
)
def test_refused(
    folder: Path, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--model", str(folder)]) == 1
    assert named in capsys.readouterr().err
