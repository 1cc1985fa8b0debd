"""The measured cases, on the CPU with operators that only take note; the figures; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from worker import _native, bench_kernels
from worker.__main__ import main
from worker.bench_kernels import Roofs, measure_cases
from worker.gpu_timer import Launch, Timing
from worker.kernel_cases import Bench, Case
from worker.model_config import parse_model_config

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 640,
    "tie_word_embeddings": True,
}
ROOFS = Roofs(copy_bytes_per_s=4e12, matrix_flops_per_s=8e14)


class NotingOps:
    """Stands in for CudaOps: keeps what each operator was given."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[Any, ...]]] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.setdefault(name, []).append(args)

    def linear_supported(self, num_rows: int, weight: torch.Tensor) -> bool:
        return weight.shape[0] != 320

    def decode_attention_workspace(self, *sizes: int) -> int:
        return 1000

    def sample_workspace(self, num_rows: int, vocab: int) -> int:
        return 64


class FakeTimer:
    """Runs each launch once and says it took 10 us."""

    def measure(self, launches: list[Launch]) -> Timing:
        launches[0]()
        launches[-1]()
        return Timing(10.0, 9.0, 11.0)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> NotingOps:
    for table in ("SlotTable", "AdjustTable"):
        monkeypatch.setattr(_native, table, lambda **given: given, raising=False)
    # Small buffers, as few as for a large model.
    monkeypatch.setattr("worker.kernel_cases._ROTATED_BYTES", 1 << 16)
    return NotingOps()


@pytest.fixture
def bench(ops: NotingOps) -> Bench:
    config = parse_model_config(CONFIG)
    return Bench(config, ops, torch.device("cpu"), torch.bfloat16, (32, 64), (8, 64))


def rows_of(bench: Bench, only: str = "") -> dict[tuple[str, str], dict[str, Any]]:
    rows = measure_cases(bench, FakeTimer(), ROOFS, only)
    return {(row["kernel"], row["shape"]): row for row in rows}


def test_every_kernel_is_measured_beside_torch(bench: Bench) -> None:
    rows = rows_of(bench)
    names = {name for name, _ in rows}
    products = ("qkv", "o", "gate_up", "down")
    assert names == {
        "embed",
        "add_rms_norm",
        "silu_mul",
        "rope_append",
        "decode_attention",
        "prefill_attention",
        "sample",
        "adjust_logits",
        "logprobs",
        "linear head",
        *(f"linear {name}" for name in products),
        *(f"product {name}" for name in products),
    }
    for (name, _), row in rows.items():
        torch_rows = row["torch"].values()
        assert name in ("rope_append", "adjust_logits") or torch_rows, name
        assert all("error" not in figures for figures in torch_rows), row
        own = row["own"]
        absent = name.startswith("product") or name == "linear head"
        assert (own is None) == absent, "where there is no kernel of ours, torch stands alone"


def test_what_is_asked_for_alone(bench: Bench) -> None:
    assert {name for name, _ in rows_of(bench, "linear o")} == {"linear o"}
    assert not rows_of(bench, "no such kernel")


def test_bytes_and_arithmetic(bench: Bench) -> None:
    rows = rows_of(bench)
    # K and V of 2 heads x 16, 2 bytes.
    decode = rows["decode_attention", "8 x 64"]
    assert decode["bytes"] == 8 * 64 * 2 * 2 * 16 * 2
    assert decode["flops"] == 8 * 64 * 6 * 16 * 4
    prefill = rows["prefill_attention", "8 at 56"]
    assert prefill["flops"] == sum(range(57, 65)) * 6 * 16 * 4
    qkv = rows["linear qkv", "8 x [160, 48]"]
    assert qkv["bytes"] == 2 * (160 * 48 + 8 * 48 + 8 * 160)
    assert qkv["flops"] == 2 * 8 * 160 * 48
    gate_up = rows["linear gate_up", "1 x [224, 48]"]
    assert gate_up["bytes"] == 2 * (224 * 48 + 48 + 112)


def test_operators_are_given_what_they_want(bench: Bench, ops: NotingOps) -> None:
    rows_of(bench)
    for qkv, q_norm, k_norm, _, cos, sin, k, v, *tail in ops.calls["decode_attention"]:
        positions, order, _, states, counters, out = tail
        slots, context = k.shape[:2]
        assert order.tolist() == list(range(slots))
        assert qkv.shape == (slots, (6 + 2 * 2) * 16)
        assert k.shape == v.shape == (slots, context, 2, 16)
        assert k.stride(3) == 1
        assert q_norm.shape == k_norm.shape == (16,)
        assert cos.shape == sin.shape == (context, 8)
        assert positions.tolist() == [context - 1] * slots
        assert states.nbytes >= 1000
        assert counters.tolist() == [0] * (slots * 2)
        assert out.shape == (slots, 6 * 16)
    for qkv, k, _, slot, start, _, out in ops.calls["prefill_attention"]:
        assert slot == 0
        assert start + len(qkv) == k.shape[1]
        assert out.shape == (len(qkv), 6 * 16)
    for x, weight, out, gated in ops.calls["linear"]:
        assert x.shape[1] == weight.shape[1]
        assert out.shape == (len(x), len(weight) // (2 if gated else 1))
        assert gated == (len(weight) == 224)
    greedy = [table["temperature"].max().item() == 0 for table, *_ in ops.calls["sample"]]
    assert sorted(set(greedy)) == [False, True]
    for table, adjust, logits, rows, out in ops.calls["adjust_logits"]:
        assert rows is None
        assert logits.shape == out.shape == adjust["bias"].shape == (len(table["active"]), 320)
        assert adjust["flags"].tolist() == [31] * len(logits)
    for table, logits, rows, counts, out in ops.calls["logprobs"]:
        assert rows is None
        assert logits.shape == (len(table["active"]), 320)
        assert counts.tolist() == [20] * len(logits)
        assert out.shape == (1, len(logits), 42)


def test_weights_and_caches_are_more_than_a_cache_holds(bench: Bench, ops: NotingOps) -> None:
    rows_of(bench, "linear o")
    weights = {weight.data_ptr(): weight.nbytes for _, weight, *_ in ops.calls["linear"]}
    assert len(weights) > 1


def test_shares_are_of_the_roof_that_binds() -> None:
    stream = Case("", num_bytes=40_000_000, flops=10, own=None)
    assert ROOFS.share(stream, 20.0) == (pytest.approx(0.5), "copy")
    dense = Case("", num_bytes=10, flops=8_000_000_000, own=None)
    assert ROOFS.share(dense, 20.0) == (pytest.approx(0.5), "matrix")


def test_a_kernel_that_fails_says_so_in_its_row(bench: Bench, ops: NotingOps) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("no such size\nat line 3")

    ops.silu_mul = fails
    ops.begin_command = fails
    rows = measure_cases(bench, FakeTimer(), ROOFS, "s")
    silu = [row for row in rows if row["kernel"] == "silu_mul"]
    assert [row["own"] for row in silu] == [{"error": "no such size"}] * 2
    assert all(row["torch"]["silu * up"]["median_us"] == 10 for row in silu)
    sample = [row for row in rows if row["kernel"] == "sample"]
    assert all(row["error"] == "no such size" for row in sample)
    assert len(sample) == 4


def test_quantiles() -> None:
    timing = Timing.of([float(value) for value in range(101)])
    assert (timing.median_us, timing.p10_us, timing.p90_us) == (50, 10, 90)


def test_without_a_gpu_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = make_checkpoint(tmp_path / "model", "qwen3") / "config.json"
    assert main(["bench-kernels", "--config", str(config)]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_a_library_without_cuda_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_native, "cuda_available", lambda: False)
    assert main(["bench-kernels", "--config", "config.json"]) == 2
    assert "make build-gpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--config"),
        (["--config", "c", "--contexts", "0"], "--contexts"),
        (["--config", "c", "--chunks", "0"], "--chunks"),
    ],
)
def test_wrong_usage(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-kernels", *words]) == 1
    assert named in capsys.readouterr().err


@pytest.mark.gpu
def test_figures_of_a_real_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if bench_kernels._missing(need_library=True):
        pytest.skip("needs an NVIDIA GPU and a build with SLOTWISE_CUDA=ON")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**CONFIG, "hidden_size": 1024, "head_dim": 128}))
    assert main(["bench-kernels", "--config", str(config), "--contexts", "512"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 1e11 < report["copy_bytes_per_s"] < 2e13
    assert 1e13 < report["matrix_flops_per_s"] < 1e16
    for row in report["kernels"]:
        for figures in (row["own"] or {}, *row["torch"].values()):
            assert "error" not in figures, row
            if figures:
                assert 0 < figures["p10_us"] <= figures["median_us"] <= figures["p90_us"]
