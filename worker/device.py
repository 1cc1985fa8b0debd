"""What the worker needs to know of the machine: memory, threads, the parent process."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

import psutil

from worker._native import CpuOps

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PR_SET_PDEATHSIG = 1


def native_ops(num_threads: int) -> CpuOps:
    """The operators of the device, on `num_threads` threads."""
    return CpuOps(num_threads)


def resident_bytes() -> int:
    """Memory of this process that is in use now (resident set)."""
    return int(psutil.Process().memory_info().rss)


def available_bytes() -> int:
    """Memory that can still be taken: the machine's, or less if a container limits it."""
    available = int(psutil.virtual_memory().available)
    limit = _cgroup_headroom(_CGROUP_ROOT)
    return available if limit is None else min(available, limit)


def default_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def release_free_memory() -> None:
    """Gives memory that the allocator holds but nobody uses back to the system (glibc only)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def refuse_live_socket(listen: str) -> None:
    """Raises OSError if a process serves on this Unix socket: gRPC would take its file over."""
    if not listen.startswith("unix:"):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(listen.removeprefix("unix:"))
        except (FileNotFoundError, ConnectionRefusedError):
            return
    raise OSError(f"cannot listen on {listen}: another process serves there")


def exit_with_parent(parent_pid: int) -> None:
    """Asks the kernel to end this process when its parent ends (Linux only).

    `parent_pid` was read before the call: a parent that died in between is noticed too.
    """
    if not sys.platform.startswith("linux"):
        raise OSError("--exit-with-parent needs Linux")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(1)


def _cgroup_headroom(root: Path) -> int | None:
    """Bytes left under the control group's limit, or None. Page cache counts as free."""
    v2 = (root / "memory.max", root / "memory.current", "inactive_file")
    v1_dir = root / "memory"
    v1 = (
        v1_dir / "memory.limit_in_bytes",
        v1_dir / "memory.usage_in_bytes",
        "total_inactive_file",
    )
    for limit_file, usage_file, cache_key in (v2, v1):
        try:
            limit = int(limit_file.read_text())
            usage = int(usage_file.read_text())
            stat = (limit_file.parent / "memory.stat").read_text()
        except (OSError, ValueError):
            continue  # no such control group, or "max"
        cache = dict(line.split() for line in stat.splitlines()).get(cache_key, "0")
        return max(0, limit - usage + int(cache))
    return None
