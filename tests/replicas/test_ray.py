"""Workers that Ray places on nodes, and again when a worker, a node or the driver is lost."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from certificates import Authority
from replicas.ray_cluster import (
    NODE_CPUS,
    PATIENCE_S,
    RayCluster,
    Served,
    Stream,
    has_ended,
    need_ray,
    stop_workers,
    wait_for,
    workers,
)

from checkpoints import make_checkpoint
from integration.servers import running_server
from slotwise.v1 import inference_pb2 as pb

pytestmark = pytest.mark.replicas

DOCS = (Path(__file__).parents[2] / "docs/ray.md").read_text()
TP2 = ("--tp", "2", "--threads", "1", "--ray-strategy", "strict_spread")
REQUEST = pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=[5, 6, 7]),
    sampling=pb.SamplingParams(temperature=0.8, seed=11),
    max_new_tokens=1500,
    ignore_eos=True,
)


@dataclass
class Rig:
    """A cluster, a server in it, and what a server without Ray answers."""

    cluster: RayCluster
    model: Path
    tokens: list[int]
    served: Served
    # By raylet.
    nodes: list[int] = field(default_factory=list)

    def with_workers(self) -> list[int]:
        """Nodes on which workers run."""
        return [node for node in self.nodes if workers(node)]

    def all_workers(self) -> list[psutil.Process]:
        return [one for node in self.nodes for one in workers(node)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory) -> Iterator[Rig]:
    need_ray()
    folder = tmp_path_factory.mktemp("ray")
    model = make_checkpoint(folder / "model", "qwen3", tokenizer=True, max_position_embeddings=2048)
    cluster = RayCluster()
    served = None
    try:
        nodes = [cluster.add_node() for _ in range(2)]
        served = Served(model, folder / "served", cluster.address, TP2)
        with running_server(model, "--tp", "2", "--threads", "1") as alone:
            tokens = alone.collect(REQUEST).token_ids
        served.wait_ready()
        yield Rig(cluster, model, tokens, served, nodes)
    finally:
        if served is not None:
            served.close()
        cluster.close()


def run_driver(rig: Rig, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slotwise_cli.ray_driver", "--ray-address"]
    return subprocess.run(
        [*command, rig.cluster.address, "--device", "cpu", *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_each_rank_is_on_a_node_of_its_own_and_the_tokens_are_the_same(rig):
    assert len(rig.with_workers()) == len(rig.all_workers()) == 2
    with rig.served.stub() as stub:
        assert Stream(stub, REQUEST).rest() == rig.tokens
    assert rig.served.num_recoveries() == 0


@pytest.mark.parametrize("victim", ["worker", "actor"])
def test_a_killed_worker_is_started_anew_on_its_node(rig, victim):
    """With its actor it ends too."""
    before = rig.served.num_recoveries()
    with rig.served.stub() as stub:
        stream = Stream(stub, REQUEST)
        stream.read_some(20)
        (killed,) = stop_workers(rig.nodes[1])
        (left,) = workers(rig.nodes[0])
        (killed if victim == "worker" else killed.parent()).kill()
        assert stream.rest() == rig.tokens
    assert rig.served.num_recoveries() > before
    (new,) = workers(rig.nodes[1])
    assert new.pid != killed.pid
    assert workers(rig.nodes[0]) == [left], "the other one keeps its weights"


def test_the_rank_of_a_killed_node_goes_on_on_another(rig):
    before = rig.served.num_recoveries()
    rig.nodes.append(rig.cluster.add_node())
    with rig.served.stub() as stub:
        stream = Stream(stub, REQUEST)
        stream.read_some(20)
        lost = rig.nodes.pop(1)
        (old,) = stop_workers(lost)
        keeper = old.parent()
        psutil.Process(lost).kill()
        assert stream.rest() == rig.tokens
    assert rig.served.num_recoveries() > before
    assert rig.with_workers() == rig.nodes
    wait_for(lambda: has_ended(old) and has_ended(keeper), "what ran there ends")


def test_a_killed_driver_is_followed_by_another(rig):
    """Ray ends all that the first one had; the scheduler and its streams stay."""
    before = rig.served.num_recoveries()
    gone = rig.all_workers()
    with rig.served.stub() as stub:
        stream = Stream(stub, REQUEST)
        stream.read_some(20)
        stop_workers(rig.nodes[0])
        rig.served.child("slotwise_cli.ray_driver").kill()
        assert stream.rest() == rig.tokens
    assert rig.served.num_recoveries() > before
    assert len(rig.all_workers()) == 2
    assert not set(rig.all_workers()) & set(gone)
    assert "the driver of Ray was killed by signal 9" in rig.served.log()


def test_a_killed_scheduler_finds_the_workers_again(rig):
    left = rig.all_workers()
    rig.served.child("scheduler_service").kill()
    rig.served.wait_ready(2)
    with rig.served.stub() as stub:
        assert Stream(stub, REQUEST).rest() == rig.tokens
    assert rig.all_workers() == left, "they keep their weights"


def test_a_second_replica_beside_it_over_tls_and_no_room_for_a_third(rig, tmp_path):
    host = rig.cluster.address.rpartition(":")[0]
    authority = Authority(tmp_path, "ca")
    pair, own = authority.pair("worker", (host,)), authority.client("scheduler")
    worker = f"--tls-cert {pair.cert} --tls-key {pair.key} --tls-client-ca {authority.path}"
    scheduler = ["--workers-tls-ca", str(authority.path), "--workers-tls-cert", str(own.cert)]
    scheduler += ["--workers-tls-key", str(own.key), "--ray-worker-flags", worker]
    second = Served(rig.model, tmp_path / "served", rig.cluster.address, [*TP2, *scheduler])
    try:
        second.wait_ready()
        with second.stub() as stub:
            assert Stream(stub, REQUEST).rest() == rig.tokens
        assert "is plain" not in second.log()
        assert len(rig.all_workers()) == 4
        third = run_driver(rig, "--model", str(rig.model), "--threads", "3", "--ray-timeout", "1")
        assert third.returncode == 1
        assert "no room for 1 x (CPU 3), pack" in third.stderr
        assert third.stderr.count(f"{host} (CPU {NODE_CPUS})") == 2
        assert "free in all: nothing" in third.stderr
        assert "waited 1 s" in third.stderr
    finally:
        second.end(signal.SIGKILL)
    # Killed, so nobody but Ray and the kernel cleaned up.
    wait_for(lambda: len(rig.all_workers()) == 2, "the workers of the killed one end")
    wait_for(lambda: rig.cluster.free_cpus() == 2 * NODE_CPUS - 2, "their room is free again")
    with rig.served.stub() as stub:
        assert Stream(stub, REQUEST).rest() == rig.tokens


def test_a_node_without_the_model_is_named(rig):
    done = run_driver(rig, "--model", "/no/such/model", "--threads", "1")
    assert done.returncode == 1
    assert "error: rank 0 on " in done.stderr
    assert "there is no folder /no/such/model" in done.stderr


def test_ranks_on_the_gpus_of_a_node_see_both_and_take_their_own(rig):
    """The node says that it has two; a worker looks for its own once a scheduler dials it."""
    node = rig.cluster.add_node(num_gpus=2)
    command = [sys.executable, "-m", "slotwise_cli.ray_driver", "--ray-address"]
    command += [rig.cluster.address, "--model", str(rig.model), "--tp", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            events = (json.loads(line) for line in driver.stdout)
            next(e for e in events if e["event"] == "workers" and None not in e["workers"])
            found = workers(node)
            devices = [one.cmdline()[one.cmdline().index("--device") + 1] for one in found]
            assert sorted(devices) == ["cuda:0", "cuda:1"]
            visible = {one.environ()["CUDA_VISIBLE_DEVICES"] for one in found}
            assert len(visible) == 1
            assert sorted(visible.pop().split(",")) == ["0", "1"]
        finally:
            driver.terminate()
    assert driver.returncode == 0
    psutil.Process(node).kill()


def test_nothing_is_left_in_the_cluster_after_the_end(rig):
    assert rig.all_workers()
    assert rig.served.end() == 0
    assert not rig.all_workers()
    wait_for(lambda: rig.cluster.free_cpus() == 2 * NODE_CPUS, "all room is free again")


def test_a_cluster_of_its_own_ends_with_it(rig, tmp_path):
    (words,) = re.findall(r"^slotwise serve demo (.* --ray-address local .*)$", DOCS, re.MULTILINE)
    served = Served(
        rig.model, tmp_path / "served", "local", [*shlex.split(words), "--threads", "1"]
    )
    try:
        served.wait_ready()
        with served.stub() as stub:
            assert Stream(stub, REQUEST).rest() == rig.tokens
        family = psutil.Process(served.process.pid).children(recursive=True)
        assert any("raylet" in one.name() for one in family)
    finally:
        served.end(signal.SIGKILL)
    wait_for(lambda: all(has_ended(one) for one in family), "all its processes end")
