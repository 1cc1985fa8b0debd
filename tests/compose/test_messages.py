"""What is told when the services cannot start, and what is to be set."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from compose.engine import Engine
from compose.stack import Stack

pytestmark = pytest.mark.compose

SHARED_MEMORY = """
from worker.errors import SetupError
from worker.peers import check_shared_memory
try:
    check_shared_memory(2)
    print("enough")
except SetupError as error:
    print(error)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of root, as a folder is that Docker had to make."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def refused(make_stack, service: str, **settings: str) -> str:
    """What the service says with which `docker compose up` fails."""
    stack: Stack = make_stack(**settings)
    told = stack.run("up", "--detach", check=False)
    assert "exit" in told, told
    assert stack.inspect(service)["State"]["ExitCode"] == 1
    return stack.logs(service)


def test_a_model_that_is_not_there(make_stack, folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "config.json").write_text("{}")
    told = refused(make_stack, "prepare", SLOTWISE_MODEL="other", SLOTWISE_MODELS=str(folder))
    assert (
        "error: /data/models/other is not there. Set SLOTWISE_MODEL to the name of a model's "
        "folder in /data/models (it holds: mine), and SLOTWISE_MODELS" in told
    )


def test_a_volume_without_models(make_stack) -> None:
    told = make_stack(SLOTWISE_MODEL="other").run("run", "--rm", "prepare", check=False)
    assert "error: /data/models/other is not there. Set SLOTWISE_MODEL" in told
    assert "(it holds no model)" in told


def test_no_name_of_a_model(make_stack) -> None:
    told = make_stack().run("config", check=False, SLOTWISE_MODEL="")
    assert "name a folder of SLOTWISE_MODELS" in told


def test_a_folder_for_models_that_cannot_be_written(make_stack, folder: Path) -> None:
    stack = make_stack(SLOTWISE_MODELS=str(folder))
    told = stack.run("run", "--rm", "prepare", check=False)
    assert "error: user 10001 may not write to /data/models" in told
    assert "chown 10001" in told
    assert not os.listdir(folder)


def test_a_machine_without_a_gpu(make_stack, folder: Path, image: str) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a GPU")
    (folder / "mine").mkdir()
    (folder / "mine" / "config.json").write_text("{}")
    told = refused(
        make_stack,
        "gpu-driver",
        COMPOSE_PROFILES="gpu",
        SLOTWISE_GPU_IMAGE=image,
        SLOTWISE_MODELS=str(folder),
        SLOTWISE_MODEL="mine",
    )
    assert "error: this machine has no NVIDIA driver, and the profiles gpu and gpu-tp2" in told
    assert "NVIDIA Container Toolkit, or leave the profile out to serve on the CPU" in told


def test_a_journal_that_cannot_be_written(up: Stack, folder: Path) -> None:
    command = ["run", "--rm", "--no-deps", "scheduler"]
    told = up.run(*command, check=False, SLOTWISE_JOURNAL=str(folder))
    assert "error: the journal's folder /data/journal cannot be used: Permission denied" in told
    assert "user 10001 may make and write to" in told


def test_the_shared_memory_that_docker_gives_is_too_little(engine: Engine, image: str) -> None:
    told = engine.docker("run", "--rm", image, "python", "-c", SHARED_MEMORY)
    assert told.startswith("/dev/shm has 64 MiB free, and 2 ranks need 256")
    assert "shm_size: 1024m or ipc: host" in told
