from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from clients.gateways import make_chat_checkpoint
from clients.npm import ROOT, installed, npm

from integration.servers import Server, running_server

HERE = Path(__file__).resolve().parent
CLIENT = ROOT / "clients" / "node"
LEFT_OUT = shutil.ignore_patterns("node_modules", "protos", "build")


@dataclass
class Package:
    """`folder`: a copy of clients/node that can be built in; `app`: a program's folder, in which
    the package is installed as `npm pack` made it."""

    folder: Path
    app: Path


@pytest.fixture(scope="session")
def package() -> Iterator[Package]:
    made = installed(CLIENT)
    # Node looks for modules in the folders above too.
    with tempfile.TemporaryDirectory(dir=made) as checkout:
        folder = Path(checkout) / "clients" / "node"
        shutil.copytree(CLIENT, folder, ignore=LEFT_OUT)
        shutil.copytree(ROOT / "protos", Path(checkout) / "protos")
        shutil.copy(ROOT / "LICENSE", checkout)
        npm("pack", cwd=folder)
        (packed,) = folder.glob("*.tgz")
        app = Path(checkout) / "app"
        app.mkdir()
        with tarfile.open(packed) as archive:
            archive.extractall(app, filter="data")
        # Without it the name would be that of the package.json further up.
        (app / "package.json").write_text("{}")
        (app / "node_modules").mkdir()
        (app / "package").rename(app / "node_modules" / "slotwise-client")
        for program in [*CLIENT.glob("examples/*.mjs"), HERE / "driver.mjs"]:
            shutil.copy(program, app)
        yield Package(folder, app)


class Driver:
    """A Node program that makes calls for a test, with a client of its own each."""

    def __init__(self, app: Path) -> None:
        self.app = app
        self._process = subprocess.Popen(
            ["node", "driver.mjs"],
            cwd=app,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def play(self, target: str, call: str, *args: Any, **how: Any) -> dict:
        """`events` or `value`, and `error`; strings like "12n" are BigInts there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        wanted = {"target": target, "client": {}, "call": call, "args": args, **how}
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the driver has died"
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0


@pytest.fixture(scope="session")
def driver(package) -> Iterator[Driver]:
    made = Driver(package.app)
    yield made
    made.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    """A small model with random weights and a chat template, two slots."""
    folder = make_chat_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    with running_server(folder, "--num-slots", "2", "--max-seq-len", "2048") as running:
        yield running
