"""Two replicas behind HAProxy, restarted in turn: no request is lost or changed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.balancer import balancer, is_there
from chaos.readers import Readers, make_requests, undisturbed
from chaos.service import Service, check_nothing_left
from checkpoints import make_checkpoint

SEED = 11
CLIENTS = 8
FLAGS = ("--tp", "1", "--threads", "1", "--num-slots", "4")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_there(), reason="no haproxy; on Debian: apt-get install haproxy"),
]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=4096)


@contextlib.contextmanager
def replicas(model: Path, folder: Path, *flags: str) -> Iterator[list[Service]]:
    """Two, ready, each with a journal of its own."""
    pair = [Service(model, folder / name, (*FLAGS, *flags)) for name in ("one", "two")]
    try:
        for service in pair:
            service.start()
        for service in pair:
            service.wait_ready()
        yield pair
        for service in pair:
            assert service.stop() == 0, service.last_words()
            check_nothing_left(service)
    finally:
        for service in pair:
            service.end()


def restart(service: Service, readers: Readers) -> None:
    """SIGTERM, the end, another start; streams go on before, meanwhile and after."""
    assert service.stop() == 0, service.last_words()
    goes_on(readers)
    service.start()
    service.wait_ready()
    goes_on(readers)


def goes_on(readers: Readers) -> None:
    """Requests that begin now end."""
    ended = readers.tally.num_ended + 2 * CLIENTS
    while readers.tally.num_ended < ended:
        assert not readers.faults, readers.faults[:5]
        assert readers.progress.wait_next(60), "no token came for a minute"


@pytest.mark.parametrize("grace", ["30", "0.2"])
def test_a_rolling_restart_loses_nothing(tiny_model, tmp_path, grace):
    """B41. A grace too short: streams break, and are sent to the other replica with their seeds."""
    print(f"seed {SEED}")
    requests = make_requests(random.Random(SEED), 16, range(50, 400))
    with replicas(tiny_model, tmp_path, "--grace", grace) as pair:
        wants = undisturbed(pair[0].address, requests, CLIENTS)
        with balancer([service.port for service in pair], tmp_path) as (host, port):
            readers = Readers(
                f"{host}:{port}", wants, CLIENTS, SEED, resend=True, num_by_client=CLIENTS // 2
            )
            readers.start()
            try:
                goes_on(readers)
                for service in pair:
                    restart(service, readers)
                readers.stop()
            finally:
                readers.abandon()
    print(readers.tally)
    assert not readers.faults, readers.faults[:5]
