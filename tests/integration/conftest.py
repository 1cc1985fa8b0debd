from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tokenizer_files import write_model

from integration.front import Front, running_front
from integration.servers import Server, running_server
from scheduler_service.service import Model, load_model
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


@pytest.fixture(scope="session")
def front_model(tmp_path_factory) -> Model:
    """A model for the fake worker: byte-level tokenizer, vocabulary 512, end id 2."""
    return load_model(write_model(tmp_path_factory.mktemp("front-model")), "")


@pytest.fixture
async def front(front_model, tmp_path) -> AsyncIterator[Front]:
    """Two slots, a context of 256."""
    async with running_front(front_model, tmp_path, num_slots=2) as running:
        yield running
