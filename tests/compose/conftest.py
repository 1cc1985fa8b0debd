"""An engine, an image of the project as it is, and its services on the CPU, for all the tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from clients.toolchains import need
from compose.engine import Engine, NoEngineError, compose_command, running_engine
from compose.images import NAME, build, build_base
from compose.stack import Stack

from slotwise_cli.demo_model import cache_dir
from slotwise_client import Client

READY_S = 600.0


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    for command, package in (
        ("docker", "docker.io"),
        ("dockerd", "docker.io"),
        ("iptables", "iptables"),
        ("ip", "iproute2"),
        ("debootstrap", "debootstrap"),
    ):
        need(command, package)
    # Whoever ends the tests has them take down first what they have started.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with running_engine(cache_dir() / "compose-test") as running:
            yield running
            if running.is_own:
                # What older builds have left; what the next one goes on from has a name.
                running.docker("image", "prune", "-f")
    except NoEngineError as error:
        pytest.skip(str(error))
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def compose() -> list[str]:
    command = compose_command()
    return [need("docker-compose", "docker-compose")] if command is None else command


@pytest.fixture(scope="session")
def image(engine: Engine, compose: list[str]) -> str:
    return build(engine, compose, build_base(engine))


@pytest.fixture(scope="session")
def make_stack(engine, compose, image) -> Iterator:
    """Makes a stack; all that it has left is removed at the end."""
    stacks: list[Stack] = []

    def make(**settings: str) -> Stack:
        name = f"{NAME}-{os.getpid()}-{len(stacks)}"
        stacks.append(Stack(engine, compose, image, name, settings))
        return stacks[-1]

    yield make
    for stack in stacks:
        if any(stack.left().values()):
            stack.run("down", "--volumes", "--timeout", "5", COMPOSE_PROFILES=ALL_PROFILES)


ALL_PROFILES = "cpu,gpu,cpu-tp2,gpu-tp2"


@pytest.fixture(scope="session")
def up(make_stack) -> Stack:
    """The services as `docker compose up` starts them, ready."""
    stack = make_stack()
    stack.run("up", "--detach")
    wait_ready(stack)
    return stack


def wait_ready(stack: Stack) -> None:
    with Client(stack.grpc) as client:
        client.wait_ready(READY_S)
