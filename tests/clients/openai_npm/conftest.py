from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clients.gateways import Gateway, make_chat_checkpoint, running_gateway
from clients.npm import installed

from integration.servers import Server, running_server

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 120


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """Qwen3's format, random weights; eight slots, a context of 4,096."""
    folder = make_chat_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    with running_server(folder, "--num-slots", "8", "--threads", "1") as running:
        yield running


@pytest.fixture(scope="session")
def gateway(server) -> Iterator[Gateway]:
    with running_gateway(server.address) as running:
        yield running


@pytest.fixture(scope="session")
def program() -> Iterator[Path]:
    """conversation.mjs, beside the package as npm installed it."""
    made = installed(HERE)
    with tempfile.TemporaryDirectory(dir=made) as folder:
        yield Path(shutil.copy(HERE / "conversation.mjs", folder))


class Conversation:
    """One check of the program, under way."""

    def __init__(self, program: Path, gateway: Gateway, name: str) -> None:
        self._process = subprocess.Popen(
            ["node", program, gateway.base_url, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> object:
        """What it says next; it waits until `go_on`."""
        line = self._process.stdout.readline()
        assert line, self._process.stderr.read()
        return json.loads(line)

    def go_on(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """It has gone well."""
        _, log = self._process.communicate(timeout=TIMEOUT_S)
        assert self._process.returncode == 0, log

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def talk(program, gateway) -> Iterator[Callable[..., Conversation]]:
    """Starts the check of a name, through a gateway of one's own if one is given."""
    made: list[Conversation] = []

    def start(name: str, through: Gateway = gateway) -> Conversation:
        made.append(Conversation(program, through, name))
        return made[-1]

    yield start
    for one in made:
        one.kill()
