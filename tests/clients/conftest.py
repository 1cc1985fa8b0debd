from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from clients.lossy_server import lossy_server
from clients.scripted_server import ScriptedServer, scripted_server

from integration.servers import Server, running_server

# What all languages are checked by says what differs, as a test does.
pytest.register_assert_rewrite("clients.program_checks")


@pytest.fixture
def served() -> Iterator[ScriptedServer]:
    """A scripted server of the public API, for one test."""
    with scripted_server() as server:
        yield server


@pytest.fixture
def lossy() -> Iterator[ScriptedServer]:
    """One that loses connections, requests and itself, for one test."""
    with lossy_server() as server:
        yield server


@pytest.fixture(scope="session")
def small_server(tmp_path_factory) -> Iterator[Server]:
    """A real server on a small checkpoint. Four slots; answers go on until they are stopped."""
    folder = tmp_path_factory.mktemp("small")
    # torch is not loaded for those who need no model.
    from checkpoints import make_checkpoint

    make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=1 << 16)
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((folder / file).read_text())
        ends = {"eos_token_id", "eos_token"}
        kept = {name: value for name, value in values.items() if name not in ends}
        (folder / file).write_text(json.dumps(kept))
    with running_server(folder, "--num-slots", "4", "--max-seq-len", "65536") as server:
        yield server
