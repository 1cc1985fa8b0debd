"""What is refused where a GPU cannot be used, or not for this model. Runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from checkpoints import make_checkpoint
from worker import _native, gpu
from worker.checkpoint import open_checkpoint
from worker.device import CpuDevice, open_device
from worker.errors import SetupError
from worker.memory_plan import ServingLimits
from worker.model_config import parse_model_config
from worker.rank import Rank, RankSetup, resolve_limits

DRIVER = "470.42.01"
CARD = "NVIDIA Imaginary 9"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one good card, to be spoilt."""
    monkeypatch.setattr(_native, "BUILT_WITH_CUDA", True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: DRIVER)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: CARD)
    return monkeypatch


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise error

    return fail


def refusal(index: int = 0) -> str:
    """The message, in one line; GPU `index` counts as not usable."""
    with pytest.raises(SetupError) as caught:
        gpu.refuse_unusable(index)
    assert not gpu.usable(index)
    message = str(caught.value)
    assert message.startswith("--device cuda")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_good_card_is_taken(card: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    card.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    gpu.refuse_unusable(0)
    assert gpu.usable(0)


def test_a_build_without_cuda(card: pytest.MonkeyPatch) -> None:
    card.setattr(_native, "BUILT_WITH_CUDA", False)
    message = refusal()
    assert "built without CUDA" in message
    assert "SLOTWISE_CUDA=ON" in message


def test_torch_for_cpus(card: pytest.MonkeyPatch) -> None:
    card.setattr(torch.version, "cuda", None)
    message = refusal()
    assert f"torch {torch.__version__} is a build for CPUs" in message
    assert "pip install --force-reinstall torch" in message


@pytest.mark.parametrize("where", ["nvmlInit", "nvmlSystemGetDriverVersion"])
def test_no_driver(card: pytest.MonkeyPatch, where: str) -> None:
    error = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    card.setattr(pynvml, where, raising(error))
    message = refusal()
    assert str(error) in message
    assert "no NVIDIA driver answers" in message
    assert "--device cpu" in message
    assert "container" in message


@pytest.mark.parametrize("where", ["init", "device_count"])
def test_a_driver_too_old(card: pytest.MonkeyPatch, where: str) -> None:
    error = "The NVIDIA driver on your system is too old (found version 11040)."
    card.setattr(torch.cuda, where, raising(RuntimeError(error)))
    message = refusal()
    for part in (DRIVER, "CUDA 13.0", error, "take a newer driver"):
        assert part in message


@pytest.mark.parametrize(
    ("value", "setting"),
    [
        (None, "CUDA_VISIBLE_DEVICES is not set"),
        ("", "CUDA_VISIBLE_DEVICES is ''"),
        ("7", "CUDA_VISIBLE_DEVICES is '7'"),
    ],
)
def test_no_gpu_is_visible(card: pytest.MonkeyPatch, value: str | None, setting: str) -> None:
    card.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        card.setenv("CUDA_VISIBLE_DEVICES", value)
    card.setattr(torch.cuda, "device_count", lambda: 0)
    card.setattr(torch.cuda, "init", raising(RuntimeError("No CUDA GPUs are available")))
    message = refusal()
    assert f"sees no GPU: No CUDA GPUs are available; {setting}; driver {DRIVER}" in message


@pytest.mark.parametrize(("index", "count"), [(0, 0), (1, 1), (3, 2)])
def test_fewer_gpus_than_ranks(card: pytest.MonkeyPatch, index: int, count: int) -> None:
    card.setattr(torch.cuda, "device_count", lambda: count)
    message = refusal(index)
    assert f"cuda:{index}" in message
    assert f"{count} GPU(s)" in message
    assert "--tp" in message
    assert "CUDA_VISIBLE_DEVICES" in message


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (3, 7)])
def test_a_card_too_old(card: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    card.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    message = refusal()
    for part in (CARD, f"{capability[0]}.{capability[1]}", "8.0", "--device cpu"):
        assert part in message


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_the_rank_refuses_with_the_same_words(
    card: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """A rank looks for the GPU of its own number; rank 0 has one, so the CPU would not do."""
    make_checkpoint(tmp_path, "qwen3")
    setup = RankSetup(epoch=1, rank=1, world_size=2)
    with pytest.raises(SetupError, match=r"cuda:1: 1 GPU\(s\) are visible.*--device cpu"):
        Rank(tmp_path, 1, name).configure(setup, lambda *_: None, lambda: False)


def test_every_rank_goes_to_the_cpu_where_the_first_gpu_cannot_be_used(
    card: pytest.MonkeyPatch,
) -> None:
    card.setattr(torch.cuda, "device_count", lambda: 2)
    card.setattr(torch.cuda, "get_device_capability", lambda index: (9 if index else 7, 0))
    assert all(isinstance(open_device("auto", rank, 1), CpuDevice) for rank in range(2))


def test_no_gpu_is_looked_for_on_the_cpu(card: pytest.MonkeyPatch) -> None:
    card.setattr(pynvml, "nvmlInit", raising(AssertionError("asked")))
    assert isinstance(open_device("cpu", 0, 1), CpuDevice)


# Models and types.


def limits(weight_dtype: str, kv_dtype: str) -> ServingLimits:
    return ServingLimits(8, 512, 256, weight_dtype, kv_dtype, 8)


@pytest.fixture
def cuda_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CudaDevice without a GPU: only what it says of models."""
    for name in ("CudaOps", "SlotTable", "AdjustTable", "CudaPeers"):
        if not hasattr(_native, name):
            monkeypatch.setattr(_native, name, type(name, (), {}), raising=False)
    from worker.cuda_device import CudaDevice

    device = CudaDevice.__new__(CudaDevice)
    device._device = torch.device("cuda", 0)
    device._card = CARD
    return device


def model(head_dim: int) -> Any:
    return parse_model_config(
        {
            "model_type": "llama",
            "num_hidden_layers": 2,
            "hidden_size": 256,
            "intermediate_size": 512,
            "vocab_size": 1000,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": head_dim,
            "max_position_embeddings": 1024,
        }
    )


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_supported_models(cuda_device: Any, head_dim: int, dtype: str) -> None:
    cuda_device.check_model(model(head_dim), limits(dtype, dtype))


@pytest.mark.parametrize("head_dim", [16, 32, 80, 112, 160, 192])
def test_head_dim_not_supported(cuda_device: Any, head_dim: int) -> None:
    with pytest.raises(SetupError) as caught:
        cuda_device.check_model(model(head_dim), limits("bfloat16", "bfloat16"))
    for part in (f"head_dim {head_dim}", "64, 96, 128, 256", "--device cpu"):
        assert part in str(caught.value)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_kv_of_another_type(cuda_device: Any, kv_dtype: str) -> None:
    with pytest.raises(SetupError) as caught:
        cuda_device.check_model(model(128), limits("bfloat16", kv_dtype))
    for part in (f"kv_dtype '{kv_dtype}'", "weight_dtype 'bfloat16'", "auto"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["weight_dtype", "kv_dtype"])
def test_float16_on_the_cpu(name: str) -> None:
    dtypes = {"weight_dtype": "float32", "kv_dtype": "float32", name: "float16"}
    with pytest.raises(SetupError) as caught:
        CpuDevice(1).check_model(model(64), limits(**dtypes))
    for part in (f"{name} 'float16'", "not supported on cpu", "auto, float32, bfloat16"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["weight_dtype", "kv_dtype"])
def test_a_type_that_nobody_takes(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path, "qwen3")
    setup = RankSetup(epoch=1, **{name: "float8"})
    with pytest.raises(SetupError, match=f"{name} 'float8' is not supported; supported: auto"):
        resolve_limits(open_checkpoint(tmp_path), setup, CpuDevice)


# Its pace and its warm-up.


@pytest.mark.parametrize(
    ("max_step_tokens", "max_seq_len", "rows"),
    [
        (2048, 9000, [64, 128, 256, 512, 1024, 2048]),
        (300, 9000, [64, 128, 256, 300]),
        (2048, 129, [64, 128, 129]),
        (16, 9000, [16]),
        (2048, 1, [1]),
    ],
)
def test_warm_up_has_few_and_many_rows_and_leaves_no_trace(
    cuda_device: Any, max_step_tokens: int, max_seq_len: int, rows: list[int]
) -> None:
    done: list[Any] = []
    cuda_device._stream = SimpleNamespace(synchronize=lambda: done.append("done"))
    decoder: Any = SimpleNamespace(
        limits=ServingLimits(8, max_seq_len, max_step_tokens, "bfloat16", "bfloat16", 8),
        forward=done.append,
        cache=SimpleNamespace(clear=done.append),
    )
    batches: Any = SimpleNamespace(chunk_batch=lambda chunks: chunks)
    cuda_device.warm_up(decoder, batches)
    assert done[len(rows) :] == [0, "done"]
    assert [len(chunk.token_ids) for (chunk,) in done[: len(rows)]] == rows
    assert all(chunk.sample and chunk.slot == 0 for (chunk,) in done[: len(rows)])
    assert {chunk.start + len(chunk.token_ids) for (chunk,) in done[: len(rows)]} == {rows[-1]}


@pytest.mark.parametrize("num_slots", [1, 8, 32])
def test_a_mixed_forward_has_as_many_rows_as_a_prompts(cuda_device: Any, num_slots: int) -> None:
    from worker.cuda_backend import BLOCK_ROWS

    rows = num_slots + cuda_device.pace.max_mixed_step_tokens
    assert -(-rows // BLOCK_ROWS) * BLOCK_ROWS == cuda_device.pace.max_step_tokens
