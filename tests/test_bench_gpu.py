"""The table of `make bench-gpu`, from ladders of known figures."""

from __future__ import annotations

import json
import sys

import bench_gpu
import pytest
from bench_gpu import ALONE, CONCURRENCY, TARGETS, lines, table

from slotwise_cli.geometry import MODELS
from slotwise_cli.gpus import Gpu, Gpus, NoDriverError


def ladder(*speeds: float, ttft: float = 10.0, grpc: float | None = 1.02) -> dict:
    levels = []
    for count, speed in zip(CONCURRENCY, speeds, strict=True):
        level = {
            "concurrency": count,
            "difference_tokens_per_s": {"median": speed, "min": speed - 1, "max": speed + 1},
            "difference_ratio_to_one": speed / speeds[0],
            "ttft_ms_p50": ttft * count + 1,
        }
        if grpc is not None:
            level["grpc_time_ratio"] = grpc
        levels.append(level)
    return {"levels": levels, "new_tokens": 128, "device": "cuda:0", ALONE: ttft}


def test_targets_are_of_known_models():
    assert {target.model for target in TARGETS} <= MODELS.keys()
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    for target in TARGETS:
        assert len(target.tokens_per_s) == len(target.vllm) == len(CONCURRENCY)
        assert all(ours > its for ours, its in zip(target.tokens_per_s, target.vllm, strict=True))


def test_figures_stand_beside_their_targets():
    found = {
        line.what: line for line in lines(TARGETS[0], ladder(213.0, 419.9, 900, 1533, ttft=15))
    }
    assert found["n=1 decode tok/s"].reached
    assert not found["n=2 decode tok/s"].reached
    assert found["n=2 ratio"].reached
    assert not found["n=8 ratio"].reached
    assert found["first token, ms"].reached
    assert found["time over the engine's"].reached
    assert len(found) == 8


def test_what_may_be_at_most():
    found = {
        line.what: line for line in lines(TARGETS[0], ladder(1, 2, 3, 4, ttft=15.1, grpc=1.06))
    }
    assert not found["first token, ms"].reached
    assert not found["time over the engine's"].reached


def test_what_was_not_measured_has_no_line():
    found = [line.what for line in lines(TARGETS[2], ladder(1, 2, 3, 4, grpc=None))]
    assert found == [f"n={count} decode tok/s" for count in CONCURRENCY]


def test_the_table_marks_what_was_missed():
    text = table(TARGETS[0], ladder(220, 400, 900, 1700))
    marks = [line.split()[0] for line in text.splitlines()[1:]]
    assert marks == ["ok", "MISSED", "ok", "ok", "MISSED", "ok", "ok", "ok"]
    assert "vLLM 193" in text
    assert ">= 213" in text
    assert "<= 15" in text


def test_it_makes_what_is_missing_and_leaves_out_what_cannot_be(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLOTWISE_CACHE", str(tmp_path / "cache"))
    card = Gpu("NVIDIA H200", (9, 0), 1, 1, 0)
    monkeypatch.setattr(bench_gpu, "find_gpus", lambda: Gpus("1", (13, 0), (card,), ()))
    commands = []

    def slotwise(*words):
        commands.append(words)
        if words[0] == "make-checkpoint":
            (tmp_path / words[-1]).mkdir(parents=True)
        elif "ladder" in words:
            path = words[words.index("--json-file") + 1]
            (tmp_path / path).write_text(json.dumps(ladder(300, 600, 1200, 2400)))

    monkeypatch.setattr(bench_gpu, "slotwise", slotwise)
    monkeypatch.setattr(sys, "argv", ["bench_gpu"])
    assert bench_gpu.main() == 0
    made = [words[2] for words in commands if words[0] == "make-checkpoint"]
    assert made == ["qwen3-8b", "qwen3-0.6b"]
    measured = [words[1] for words in commands if words[0] == "bench"]
    assert measured == ["ladder"] * 5 + ["kernels", "steps"]
    assert "qwen3-8b-tp2-512: left out, 1 GPUs here" in capsys.readouterr().out


def test_without_a_driver_it_is_refused(monkeypatch, capsys):
    def none():
        raise NoDriverError("no NVIDIA driver")

    monkeypatch.setattr(bench_gpu, "find_gpus", none)
    monkeypatch.setattr(sys, "argv", ["bench_gpu"])
    assert bench_gpu.main() == 2
    assert "no NVIDIA driver" in capsys.readouterr().err


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_ladder_is_asked_for_what_the_issue_says(monkeypatch, tmp_path, target):
    monkeypatch.chdir(tmp_path)
    (tmp_path / bench_gpu.OUT).mkdir(parents=True)
    monkeypatch.setattr(bench_gpu, "checkpoint", lambda name: tmp_path / name)
    asked = []

    def slotwise(*words):
        asked.append(words)
        level = {"ttft_ms_p50": 1.0 + len(asked)}
        (tmp_path / words[words.index("--json-file") + 1]).write_text(
            json.dumps({"levels": [level]})
        )

    monkeypatch.setattr(bench_gpu, "slotwise", slotwise)
    measured = bench_gpu.measure(target, 5)
    alone = target.ttft_ms is not None
    counts = [words[words.index("--concurrency") + 1] for words in asked]
    assert counts == ["1,2,4,8"] + ["1"] * alone
    assert measured.get(ALONE) == (3.0 if alone else None)
    for words in asked:
        assert words[words.index("--prompt-tokens") + 1] == str(target.prompt_tokens)
        assert words[words.index("--output-tokens") + 1] == "128"
        assert ("--tp" in words) == (target.tp > 1)
