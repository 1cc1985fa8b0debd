from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from clients.gateways import Gateway, gateway_beside, make_chat_checkpoint, running_gateway
from openai import AsyncOpenAI, OpenAI
from tokenizer_files import QWEN3_TEMPLATE, write_model

from integration.front import Front, running_front
from integration.servers import Server, running_server
from scheduler_service.service import Model, load_model


@pytest.fixture(scope="session")
def chat_checkpoint(tmp_path_factory) -> Path:
    """Qwen3's format, random weights; each byte is a token."""
    return make_chat_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(chat_checkpoint) -> Iterator[Server]:
    """Eight slots, a context of 4,096."""
    with running_server(chat_checkpoint, "--num-slots", "8", "--threads", "1") as running:
        yield running


@pytest.fixture(scope="session")
def gateway(server) -> Iterator[Gateway]:
    """Beside the real server, for tests that leave it as it was."""
    with running_gateway(server.address, "--model-alias", "gpt-4o") as running:
        yield running


@pytest.fixture
def client(gateway) -> Iterator[OpenAI]:
    """The SDK of OpenAI, as its users make one."""
    with OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def front_model(tmp_path_factory) -> Model:
    """For the fake worker: Qwen3's template, vocabulary 512, end id 2."""
    folder = tmp_path_factory.mktemp("models") / "front-model"
    folder.mkdir()
    return load_model(write_model(folder, QWEN3_TEMPLATE), "")


@pytest.fixture
async def front(front_model, tmp_path) -> AsyncIterator[Front]:
    """Eight slots, a context of 2,048, a worker that can be held."""
    options = {"num_slots": 8, "max_seq_len": 2048}
    async with running_front(front_model, tmp_path, **options) as running:
        yield running


@pytest.fixture
async def front_gateway(front) -> AsyncIterator[Gateway]:
    async with gateway_beside(front.address) as running:
        yield running


@pytest.fixture
async def front_client(front_gateway) -> AsyncIterator[AsyncOpenAI]:
    """Of the gateway before the fake worker."""
    url = front_gateway.base_url
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made
