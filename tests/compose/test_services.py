"""`docker compose up`: both doors from outside, what is killed and comes back, what stays."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority
from compose.conftest import READY_S, wait_ready
from compose.stack import Stack
from compose.streams import Got, Reader, get_json, model_name, read_grpc, read_http

from slotwise_cli import demo_model
from slotwise_client import Client, Finished, Health, JournalState, TlsOptions

pytestmark = pytest.mark.compose

RETRY_S = 0.1
# Of the containers.
USER = 10001


@pytest.fixture(scope="module")
def undisturbed(up: Stack) -> Got:
    """What the question is answered with, through gRPC."""
    got = Got()
    read_grpc(up.grpc, got)
    return got


def both_doors(stack: Stack) -> list[Reader]:
    readers = [Reader(read_grpc, stack.grpc), Reader(read_http, stack.http)]
    for reader in readers:
        reader.wait_middle()
    return readers


def check_whole(readers: list[Reader], undisturbed: Got) -> None:
    for reader in readers:
        assert reader.end() == undisturbed.answer


def wait_for_http(stack: Stack) -> None:
    """Waits until the gateway answers and finds the scheduler ready."""
    deadline = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{stack.http}/ready").close()
            return
        assert time.monotonic() < deadline, stack.logs("gateway")
        time.sleep(RETRY_S)


def epoch(stack: Stack) -> int:
    with Client(stack.grpc) as client:
        return client.server_info().epoch


def test_both_doors_answer_alike(up: Stack, undisturbed: Got) -> None:
    assert len(undisturbed.token_ids) > 100
    assert undisturbed.text
    with Client(up.grpc) as client:
        assert client.server_info().journal is JournalState.ON
        assert client.health("slotwise.worker/0") is Health.SERVING
    assert model_name(up.http) == demo_model.NAME
    check_whole([Reader(read_http, up.http)], undisturbed)


def test_metrics_are_there_for_prometheus(up: Stack) -> None:
    with urllib.request.urlopen(f"{up.http}/metrics") as response:
        assert "slotwise:num_requests_running" in response.read().decode()


# In a container: who runs there, and what it may.
RIGHTS = """
import json, os, shutil, sys
def may_write(folder):
    try:
        os.close(os.open(f"{folder}/x", os.O_CREAT | os.O_WRONLY))
        os.unlink(f"{folder}/x")
        return True
    except OSError:
        return False
status = dict(line.split(":", 1) for line in open("/proc/1/status"))
print(json.dumps({
    "user": [os.getuid(), os.getgid()],
    "capabilities": [int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")],
    "compiler": shutil.which("cc") or shutil.which("g++"),
    "may_write": [folder for folder in sys.argv[1:] if may_write(folder)],
}))
"""
FOLDERS = ("/", "/data", "/data/models", "/data/journal", "/data/secrets", "/opt/slotwise", "/tmp")


@pytest.mark.parametrize(
    ("service", "may_write"),
    [("worker", ["/tmp"]), ("scheduler", ["/data/journal", "/tmp"]), ("gateway", ["/tmp"])],
)
def test_rights_are_few(up: Stack, service: str, may_write: list[str]) -> None:
    told = json.loads(up.exec(service, "python", "-c", RIGHTS, *FOLDERS))
    assert told == {
        "user": [USER, USER],
        "capabilities": [0, 0, 0],
        "compiler": None,
        "may_write": may_write,
    }
    found = up.inspect(service)
    assert "no-new-privileges:true" in found["HostConfig"]["SecurityOpt"]
    assert found["HostConfig"]["LogConfig"]["Config"] == {"max-size": "10m", "max-file": "3"}
    # The grace of requests, and that of a worker for its scheduler.
    assert found["Config"]["StopTimeout"] > 40


def networks_of(stack: Stack, service: str) -> set[str]:
    return set(stack.inspect(service)["NetworkSettings"]["Networks"])


def test_workers_are_reached_by_the_scheduler_alone(up: Stack) -> None:
    assert not up.inspect("worker")["HostConfig"]["PortBindings"]
    (workers,) = networks_of(up, "worker")
    assert workers in networks_of(up, "scheduler")
    assert workers not in networks_of(up, "gateway")
    assert json.loads(up.engine.docker("network", "inspect", workers))[0]["Internal"]


@pytest.mark.parametrize("service", ["scheduler", "gateway"])
def test_ports_are_open_to_this_machine_alone(up: Stack, service: str) -> None:
    (bindings,) = up.inspect(service)["HostConfig"]["PortBindings"].values()
    assert [binding["HostIp"] for binding in bindings] == ["127.0.0.1"]


def test_all_become_healthy(up: Stack) -> None:
    for service in ("scheduler", "worker", "gateway"):
        up.wait_health(service, "healthy")
    assert up.inspect("prepare")["State"]["ExitCode"] == 0


def test_streams_go_on_when_a_worker_is_killed(up: Stack, undisturbed: Got) -> None:
    before = epoch(up)
    readers = both_doors(up)
    restarts = up.kill("worker", "worker")
    check_whole(readers, undisturbed)
    up.wait_restarted("worker", restarts)
    assert epoch(up) > before


def test_streams_go_on_when_the_scheduler_is_killed(up: Stack, undisturbed: Got) -> None:
    readers = both_doors(up)
    restarts = up.kill("scheduler", "scheduler_service")
    check_whole(readers, undisturbed)
    up.wait_restarted("scheduler", restarts)


def test_the_gateway_comes_back(up: Stack) -> None:
    up.wait_restarted("gateway", up.kill("gateway", "slotwise_gateway"))
    wait_for_http(up)
    assert get_json(f"{up.http}/v1/models")["data"]


def test_models_and_requests_outlive_the_containers(up: Stack) -> None:
    request_id = "kept-across-down-and-up"
    got = Got()
    read_grpc(up.grpc, got, request_id)
    assert "downloading" in up.logs("prepare")
    up.run("down")
    assert not up.left()["containers"]
    up.run("up", "--detach")
    wait_ready(up)
    assert "downloading" not in up.logs("prepare")
    with Client(up.grpc) as client, client.attach(request_id, len(got.token_ids) - 1) as stream:
        events = list(stream)
    assert [list(event.token_ids) for event in events if hasattr(event, "token_ids")] == [
        got.token_ids[-1:]
    ]
    assert isinstance(events[-1], Finished)


def test_a_port_that_is_taken(up: Stack, make_stack) -> None:
    other = make_stack()
    other.grpc_port = up.grpc_port
    told = other.run("up", "--detach", "--no-deps", "scheduler", check=False)
    assert f"127.0.0.1:{up.grpc_port}" in told
    assert "port is already allocated" in told or "address already in use" in told


def test_down_ends_streams_whole_and_leaves_nothing(up: Stack, undisturbed: Got) -> None:
    readers = both_doors(up)
    up.run("down")
    check_whole(readers, undisturbed)
    assert not up.left()["containers"]
    assert not up.left()["networks"]


TOKEN = "token-of-a-test-0123456789"


@pytest.fixture
def secrets() -> Iterator[Path]:
    """As docs/containers.md has them: the containers' user alone may read the key."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        Authority(folder, "ca").pair("server", hosts=("scheduler", "localhost", "127.0.0.1"))
        (folder / "tokens.toml").write_text(f'[[tokens]]\nname = "ann"\ntoken = "{TOKEN}"\n')
        for path in folder.iterdir():
            os.chown(path, USER, USER)
            path.chmod(0o400)
        yield folder


def test_tls_and_tokens_by_settings_alone(up: Stack, secrets: Path) -> None:
    settings = {
        "SLOTWISE_SECRETS": str(secrets),
        "SLOTWISE_SCHEDULER_FLAGS": "--tls-cert /data/secrets/server.pem --tls-key "
        "/data/secrets/server.key --tokens /data/secrets/tokens.toml",
        "SLOTWISE_HEALTH_FLAGS": "--tls-ca /data/secrets/ca.pem",
        "SLOTWISE_GATEWAY_FLAGS": "--tls-ca /data/secrets/ca.pem",
    }
    up.run("up", "--detach", **settings)
    with Client(up.grpc, tls=TlsOptions(ca=secrets / "ca.pem"), token=TOKEN) as client:
        client.wait_ready(READY_S)
        assert client.chat("Hi", max_new_tokens=1)
    wait_for_http(up)
    request = urllib.request.Request(f"{up.http}/v1/models")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request)
    request.add_header("authorization", f"Bearer {TOKEN}")
    with urllib.request.urlopen(request) as response:
        assert json.load(response)["data"][0]["id"] == demo_model.NAME
    for service in ("scheduler", "worker", "gateway"):
        kind, check = up.inspect(service)["Config"]["Healthcheck"]["Test"]
        assert kind == "CMD-SHELL"
        up.exec(service, "sh", "-c", check)
    up.run("down", **settings)


def test_streams_go_on_when_one_of_two_ranks_is_killed(up: Stack) -> None:
    """The last one: it needs the models of the others, and takes all down."""
    settings = {"COMPOSE_PROFILES": "cpu-tp2", "SLOTWISE_WORKER_FLAGS": "--threads 1"}
    up.run("up", "--detach", **settings)
    wait_ready(up)
    with Client(up.grpc) as client:
        assert len(client.server_info().workers) == 2
    undisturbed = Got()
    read_grpc(up.grpc, undisturbed)
    # The rank where the others meet.
    readers = both_doors(up)
    restarts = up.kill("worker-0", "worker")
    check_whole(readers, undisturbed)
    up.wait_restarted("worker-0", restarts)
    up.run("down", "--volumes", **settings)
    assert up.left() == {"containers": [], "networks": [], "volumes": []}
