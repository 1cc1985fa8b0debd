from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.servers import Server, running_server
from slotwise_cli.demo_model import ensure_demo_model


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The real model, converted once into the user's cache."""
    return ensure_demo_model()


@pytest.fixture(scope="session")
def demo_server(demo_model) -> Iterator[Server]:
    """SmolLM2-135M-Instruct in float32, one rank, eight slots."""
    with running_server(demo_model, "--max-seq-len", "1024") as server:
        yield server
