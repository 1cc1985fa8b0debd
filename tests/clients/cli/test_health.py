"""`slotwise health`: one question to grpc.health.v1."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def test_a_server_that_serves(slotwise, served):
    done = slotwise("health", "--server", served.address)
    assert (done.code, done.out, done.err) == (0, "serving\n", "")


def test_what_is_not_serving(slotwise, served):
    done = slotwise("health", "--server", served.address, "--service", "x", "--json")
    assert done.code == 1
    assert json.loads(done.out) == {
        "server": served.address,
        "service": "x",
        "health": "unknown_service",
    }


def test_no_server(slotwise):
    done = slotwise("health", "--server", "127.0.0.1:1")
    assert done.code == 3
    assert done.err.startswith("error: no answer from 127.0.0.1:1")


@pytest.mark.parametrize(("port", "code"), [(None, 0), (1, 3)])
def test_as_containers_run_it(served, port, code):
    address = served.address if port is None else f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "slotwise_cli.health", "--server", address, "--service", ""]
    # A read-only root and no home.
    done = subprocess.run(command, env={**os.environ, "HOME": "/nonexistent"}, check=False)
    assert done.returncode == code


def test_a_token_file_that_is_not_there(slotwise):
    done = slotwise("health", "--token-file", "/no/such/file")
    assert done.code == 2
    assert "/no/such/file" in done.err
