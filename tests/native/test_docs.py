"""The examples of docs/native.md run."""

import re
from pathlib import Path

import pytest
import torch

from worker import _native

DOCS = Path(__file__).parents[2] / "docs" / "native.md"


def example_with(text: str) -> str:
    """The page's one example that contains the text."""
    examples = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (example,) = [example for example in examples if text in example]
    return str(example)


def run(example: str) -> None:
    exec(compile(example, str(DOCS), "exec"), {})


def test_the_example_runs() -> None:
    run(example_with("CpuOps("))


@pytest.mark.gpu
def test_the_example_runs_on_a_gpu() -> None:
    if not (_native.BUILT_WITH_CUDA and torch.cuda.is_available()):
        pytest.skip("needs an NVIDIA GPU and a build with SLOTWISE_CUDA=ON")
    before = torch.cuda.current_stream()
    try:
        run(example_with("CudaOps("))
    finally:
        torch.cuda.set_stream(before)
