"""Partitions between real hosts: network namespaces whose wires are pulled."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import fixed_port

from chaos.chaos import FLAGS, NOT_SERVING_BOUND_S, Chaos, chaos_on
from chaos.namespaces import Host, hosts, why_not
from chaos.probes import NOT_SERVING
from chaos.readers import make_requests
from chaos.relay import Relay
from chaos.service import Service
from checkpoints import make_checkpoint

SEED = 7
STREAMS = 4
REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=4096)


@contextlib.contextmanager
def service_on(host: Host, model: Path, folder: Path, *flags: str) -> Iterator[Service]:
    """It listens on its host only; we reach it by a relay whose sockets are there."""
    service = Service(model, folder, flags, journal=False, host=host.address, prefix=host.prefix)
    relay = Relay((service.host, service.port), host.socket)
    service.address = relay.address
    try:
        yield service
    finally:
        relay.close()


def test_clients_are_cut_off(tiny_model, tmp_path):
    """A wire is pulled for seconds; and once it is plugged again with every connection lost."""
    flags = (*FLAGS, "--num-slots", "4")
    with hosts(2) as (here, there), service_on(there, tiny_model, tmp_path, *flags) as service:
        requests = make_requests(random.Random(SEED), 8, range(50, 200))
        with chaos_on(service, STREAMS, SEED, requests, here) as chaos:

            def pull_wire(chaos: Chaos) -> None:
                here.pull()
                time.sleep(chaos.rng.uniform(0.5, 2))
                here.plug()

            def pull_wire_and_lose_connections(chaos: Chaos) -> None:
                here.pull()
                time.sleep(chaos.rng.uniform(0.5, 2))
                chaos.relay.cut()
                here.plug()

            for fault in (pull_wire, pull_wire_and_lose_connections) * 2:
                chaos.strike(fault)


def test_workers_are_cut_off(tiny_model, tmp_path):
    """Between the scheduler and workers over TCP: found out by their silence, and dialled again."""
    with hosts(2) as (here, there), workers_on(there, tiny_model, tmp_path) as addresses:
        flags = (*FLAGS, "--num-slots", "4", "--workers", ",".join(addresses))
        rendezvous = ("--rendezvous", f"{there.address}:{fixed_port()}")
        with service_on(here, tiny_model, tmp_path / "s", *flags, *rendezvous) as service:
            requests = make_requests(random.Random(SEED), 8, range(50, 200))
            with chaos_on(service, STREAMS, SEED, requests, here) as chaos:

                def pull_wire_of_workers(chaos: Chaos) -> None:
                    began = time.monotonic()
                    there.pull()
                    lost = chaos.readiness.wait_for(NOT_SERVING, began, NOT_SERVING_BOUND_S)
                    assert lost is not None, "the silence was not noticed"
                    there.plug()

                def pull_wire_of_workers_for_a_moment(chaos: Chaos) -> None:
                    there.pull()
                    time.sleep(0.3)
                    there.plug()

                chaos.strike(pull_wire_of_workers, restarts=True)
                chaos.strike(pull_wire_of_workers_for_a_moment)
                chaos.strike(pull_wire_of_workers, restarts=True)


@contextlib.contextmanager
def workers_on(host: Host, model: Path, folder: Path) -> Iterator[list[str]]:
    """Two workers over TCP, started by hand."""
    addresses = [f"{host.address}:{fixed_port()}" for _ in range(2)]
    command = [*host.prefix, sys.executable, "-m", "worker", "--model", str(model)]
    with contextlib.ExitStack() as at_end:
        for rank, address in enumerate(addresses):
            log = at_end.enter_context((folder / f"worker-{rank}.log").open("w"))
            process = subprocess.Popen(
                [*command, "--threads", "1", "--listen", address], cwd="/", stderr=log
            )
            at_end.callback(process.wait, 60)
            at_end.callback(process.terminate)
        yield addresses
