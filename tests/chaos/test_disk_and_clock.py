"""A disk that fills up under the journal, and clocks that jump."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.chaos import FLAGS, Chaos, chaos_on, kill_rank, kill_scheduler
from chaos.readers import make_requests
from chaos.service import Service, dial, poll
from checkpoints import make_checkpoint
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

SEED = 13
STREAMS = 4
DISK_BYTES = 4 << 20
WAIT_S = 60
ONE_RANK = (*FLAGS, "--tp", "1", "--num-slots", "4")
# A wall clock that leaps by hours, forth and back, all the time; read by every Python process that
# finds this file.
JUMPING_CLOCK = textwrap.dedent("""
    import time

    _real, _real_ns, _steady = time.time, time.time_ns, time.monotonic
    _LEAPS_S = (0, 5 * 3600, -7 * 3600, 40 * 86400, -3)

    def _leap():
        return _LEAPS_S[int(_steady() * 3) % len(_LEAPS_S)]

    time.time = lambda: _real() + _leap()
    time.time_ns = lambda: _real_ns() + _leap() * 10**9
""")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=4096)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of a few MB."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def journal_state(chaos: Chaos) -> int:
    with dial(chaos.service.address) as channel:
        stub = rpc.InferenceStub(channel)
        return stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=WAIT_S).journal


def wait_for_journal(chaos: Chaos, state: int) -> None:
    name = pb.JournalState.Name(state)
    poll(lambda: journal_state(chaos) == state, WAIT_S, name)


def renew_streams(chaos: Chaos) -> None:
    """Until every stream of now has ended and others have begun."""
    ended = chaos.readers.tally.num_ended + 3 * STREAMS
    while chaos.readers.tally.num_ended < ended:
        chaos.wait_token()


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of our own needs root")
def test_a_full_disk_costs_the_journal_only(tiny_model, tmp_path):
    """Streams go on; with room again, what is accepted from then on survives kill -9."""
    service = Service(tiny_model, tmp_path, ONE_RANK)
    requests = make_requests(random.Random(SEED), 8, range(50, 200))
    with (
        small_disk(tmp_path / "journal") as disk,
        chaos_on(service, STREAMS, SEED, requests) as chaos,
    ):
        assert journal_state(chaos) == pb.JOURNAL_STATE_ON
        _fill(disk / "ballast")
        wait_for_journal(chaos, pb.JOURNAL_STATE_FAILING)
        renew_streams(chaos)
        (disk / "ballast").unlink()
        wait_for_journal(chaos, pb.JOURNAL_STATE_ON)
        renew_streams(chaos)
        chaos.strike(kill_scheduler)
        assert journal_state(chaos) == pb.JOURNAL_STATE_ON


def _fill(file: Path) -> None:
    with file.open("wb", buffering=0) as handle, contextlib.suppress(OSError):
        while True:
            handle.write(b"\0" * 4096)


def test_a_wall_clock_that_jumps_is_not_noticed(tiny_model, tmp_path):
    """Of the scheduler and the workers; it jumps while streams run, ranks die and it is killed."""
    clock = tmp_path / "clock"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(JUMPING_CLOCK)
    paths = os.pathsep.join(filter(None, (str(clock), os.environ.get("PYTHONPATH"))))
    # What has ended is kept for longer than the clock leaps.
    flags = (*ONE_RANK, "--retention", str(100 * 86400))
    service = Service(tiny_model, tmp_path, flags, environment={"PYTHONPATH": paths})
    requests = make_requests(random.Random(SEED), 8, range(50, 200))
    with chaos_on(service, STREAMS, SEED, requests) as chaos:
        renew_streams(chaos)
        for fault in (kill_rank, kill_scheduler):
            chaos.strike(fault)
            renew_streams(chaos)


def test_a_monotonic_clock_of_another_boot_is_not_noticed(tiny_model, tmp_path):
    """The journal outlives a boot: the clock of the next scheduler begins anew."""
    words = ("unshare", "--time", "--monotonic", "864000", "--boottime", "864000")
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("no time namespaces here")
    service = Service(tiny_model, tmp_path, ONE_RANK)
    requests = make_requests(random.Random(SEED), 8, range(50, 200))
    with chaos_on(service, STREAMS, SEED, requests) as chaos:
        for prefix in (words, ()):
            service.prefix = prefix
            chaos.strike(kill_scheduler)
            renew_streams(chaos)
