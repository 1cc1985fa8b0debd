"""What ranks on GPUs tell each other through their store, and whom they need not wait for. The sums
are in test_cuda_peers.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed import TCPStore
from worker_driver import free_address, on_ranks

from worker import peers
from worker.errors import PeerLostError, SetupCancelledError, SetupError
from worker.peers import CudaGroup, _Meetings, _Process, check_shared_memory
from worker.sharding import Part

PATIENCE_S = 60.0
# Holds a store until it is killed; says so on a line.
HOLDER = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("open", flush=True)
time.sleep(1000)
"""


def open_store(port: int, is_master: bool) -> TCPStore:
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=is_master,
        timeout=timedelta(seconds=PATIENCE_S),
        wait_for_workers=False,
    )


def two_ranks() -> list[_Meetings]:
    port = int(free_address().rpartition(":")[2])
    stores = [open_store(port, is_master) for is_master in (True, False)]
    return on_ranks(2, lambda rank: _Meetings(stores[rank], rank, 2, PATIENCE_S, lambda: False))


def ended_process() -> _Process:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        own = _Process.own()
        found = replace(own, pid=process.pid, started=psutil.Process(process.pid).create_time())
        assert not found.has_ended()
        process.kill()
        psutil.Process(process.pid).wait()
    return found


def test_a_process_is_known_to_have_ended() -> None:
    ended = ended_process()
    assert ended.has_ended()
    assert not _Process.own().has_ended()
    # Its number may be another's by now; of another machine or container nothing is known.
    assert replace(_Process.own(), started=1.0).has_ended()
    assert not replace(ended, machine="other").has_ended()
    assert not replace(ended, namespace="other").has_ended()


def test_ranks_leave_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_CLOSE_S", PATIENCE_S)
    ranks = two_ranks()
    assert ranks[0].same_machine
    assert on_ranks(2, lambda rank: ranks[rank].leave("closed")) == [True, True]


def test_a_dead_peer_is_not_waited_for() -> None:
    ranks = two_ranks()
    ranks[0]._processes[1] = ended_process()
    assert ranks[0].leave("closed")


def test_one_that_lives_and_does_not_come_is_waited_for_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "_CLOSE_S", 0.05)
    assert not two_ranks()[0].leave("closed")


def cancelled_after(count: int) -> Callable[[], bool]:
    """True from the count-th call on."""
    calls = iter(range(count))
    return lambda: next(calls, None) is None


def have_shared_memory(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    """As a file system of 4 KiB blocks."""
    found = SimpleNamespace(f_bavail=mib << 8, f_frsize=4096)
    monkeypatch.setattr(peers.os, "statvfs", lambda path: {peers._SHARED_MEMORY: found}[path])


def test_shared_memory_that_is_too_small_is_told_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have_shared_memory(monkeypatch, 64)
    with pytest.raises(SetupError, match="/dev/shm has 64 MiB free, and 2 ranks need 256") as told:
        check_shared_memory(2)
    for words in ("shm_size: 1024m", "ipc: host", "--shm-size=1024m", "--ipc=host"):
        assert words in str(told.value)
    have_shared_memory(monkeypatch, 256)
    check_shared_memory(2)
    with pytest.raises(SetupError, match=r"12 ranks need 1536.*shm_size: 1536m"):
        check_shared_memory(12)


def test_no_shared_memory_at_all_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_SHARED_MEMORY", peers.Path("/dev/no-such-folder"))
    with pytest.raises(SetupError, match="/dev/no-such-folder has 0 MiB free"):
        check_shared_memory(2)


@pytest.mark.parametrize("same_machine", [True, False])
def test_ranks_that_need_nccl_look_at_the_shared_memory_of_their_machine_before(
    monkeypatch: pytest.MonkeyPatch, same_machine: bool
) -> None:
    have_shared_memory(monkeypatch, 64)
    monkeypatch.setattr(_Meetings, "same_machine", same_machine)
    port = int(free_address().rpartition(":")[2])
    stores = [open_store(port, is_master) for is_master in (True, False)]

    def reach_nccl(_meetings: _Meetings, _timeout_s: float) -> None:
        raise LookupError("NCCL is there")

    monkeypatch.setattr(_Meetings, "nccl", reach_nccl)

    def reserve(rank: int) -> None:
        group = CudaGroup(rank, 2, stores[rank], None, None, PATIENCE_S)
        parts = [Part(0, 8), Part(8, 16)]
        with pytest.raises(SetupError if same_machine else LookupError):
            group.reserve(16, 64, 8, parts, use_peers=False)

    on_ranks(2, reserve)


def test_a_meeting_can_be_cancelled() -> None:
    port = int(free_address().rpartition(":")[2])
    store = open_store(port, is_master=True)
    with pytest.raises(SetupCancelledError, match="waiting for rank 1: process"):
        _Meetings(store, 0, 2, PATIENCE_S, cancelled_after(1))


def test_who_does_not_come_is_named() -> None:
    port = int(free_address().rpartition(":")[2])
    store = open_store(port, is_master=True)
    with pytest.raises(SetupError, match="did not come together: waiting for rank 1: process"):
        _Meetings(store, 0, 2, 0.05, lambda: False)


def test_a_store_that_goes_with_its_rank_ends_the_meeting() -> None:
    port = int(free_address().rpartition(":")[2])
    command = [sys.executable, "-c", HOLDER, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        store = open_store(port, is_master=False)

        def lost() -> bool:
            holder.kill()
            return False

        with pytest.raises(PeerLostError, match="broke up"):
            _Meetings(store, 1, 2, PATIENCE_S, lost)
