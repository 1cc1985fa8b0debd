from __future__ import annotations

import json
from pathlib import Path

import pytest

from slotwise_cli import bench_kernels as module

FIGURES = {
    "median_us": 12.5,
    "p10_us": 12.0,
    "p90_us": 13.0,
    "bytes_per_s": 3.9e12,
    "flops_per_s": 7.7e13,
    "share": 0.93,
    "roof": "copy",
}
REPORT = {
    "device": "NVIDIA H200",
    "torch": "2.13.0",
    "dtype": "bfloat16",
    "copy_bytes_per_s": 4.19e12,
    "matrix_flops_per_s": 7.67e14,
    "kernels": [
        {
            "kernel": "linear qkv",
            "shape": "8 x [6144, 4096]",
            "own": FIGURES,
            "torch": {"mm": {**FIGURES, "median_us": 25.0}, "mm, 32 rows": {"error": "no"}},
        },
        {
            "kernel": "product qkv",
            "shape": "512 x [6144, 4096]",
            "own": None,
            "torch": {"mm": {**FIGURES, "median_us": 99.0, "roof": "matrix"}},
        },
        {"kernel": "silu_mul", "shape": "512 x 8", "own": {"error": "no size"}, "torch": {}},
        {"kernel": "sample", "error": "out of memory"},
    ],
}


@pytest.fixture
def asked(monkeypatch):
    """A GPU's answer; keeps the commands, and the config they were given."""
    commands = []

    def run(command):
        config = json.loads(Path(command[command.index("--config") + 1]).read_text())
        commands.append((command, config))
        return REPORT

    monkeypatch.setattr(module, "run_json", run)
    return commands


def test_a_known_model_needs_no_checkpoint(slotwise, asked):
    words = ["--model", "qwen3-0.6b", "--contexts", "512", "--chunks", "128,256", "--only", "lin"]
    done = slotwise("bench", "kernels", *words)
    assert done.code == 0, done.err
    ((command, config),) = asked
    assert config["hidden_size"] == 1024
    assert command[command.index("--contexts") :] == [
        *("--contexts", "512", "--chunks", "128", "256", "--only", "lin"),
    ]
    assert "4.19 TB/s, product 767 TFLOP/s" in done.out
    lines = {
        line.split()[0] + line.split()[1]: line
        for line in done.out.splitlines()
        if line[1:2].isalpha()
    }
    assert "12.0 to 13.0" in lines["linearqkv"]
    assert lines["linearqkv"].split()[12:14] == ["93%", "copy"]
    assert "mm 25.0; mm, 32 rows failed" in lines["linearqkv"]
    assert "99.0" in lines["productqkv"]
    assert "matrix" in lines["productqkv"]
    assert "no size" in lines["silu_mul512"]
    assert "out of memory" in done.out


def test_a_checkpoint_gives_its_own_shapes(slotwise, asked, tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 7}')
    json_file = tmp_path / "kernels.json"
    words = ["--model", str(tmp_path), "--json-file", str(json_file), "--json"]
    done = slotwise("bench", "kernels", *words)
    assert asked[0][1] == {"hidden_size": 7}
    wanted = {"model": str(tmp_path), **REPORT}
    assert json.loads(done.out) == json.loads(json_file.read_text()) == wanted


def test_an_unknown_model_is_named(slotwise, asked):
    done = slotwise("bench", "kernels", "--model", "qwen9")
    assert done.code == 1
    assert "qwen9" in done.err


def test_without_a_gpu_it_is_refused(slotwise, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = slotwise("bench", "kernels", "--model", "qwen3-0.6b")
    assert (done.code, done.out) == (2, "")
    assert "no GPU" in done.err
    assert done.err.splitlines()[-1].startswith("error: ")
