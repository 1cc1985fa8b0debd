"""The device a rank runs on, and what the worker needs to know of the machine."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from worker import gpu
from worker.backend import Backend
from worker.batch import BatchBuffers
from worker.cpu_backend import CpuBackend
from worker.cpu_runner import CpuRunner
from worker.decoder import Decoder
from worker.errors import SetupError
from worker.memory_plan import (
    CPU_FOOTPRINT,
    Footprint,
    MemoryPlan,
    ServingLimits,
    plan_memory,
)
from worker.model_config import ModelConfig
from worker.runner import Runner
from worker.self_test import Batches
from worker.sharding import Shard
from worker.tensor_parallel import Group, Rendezvous, join_links

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Pace:
    """What suits a device; see Configured in worker.proto."""

    max_step_tokens: int
    max_mixed_step_tokens: int
    run_ahead_window_ns: int


class Device(ABC):
    """Where a rank's weights, slots and steps are: CpuDevice, or CudaDevice in cuda_device.py."""

    weight_dtypes: tuple[str, ...]
    pace: Pace
    footprint: Footprint
    # Whether ranks on one machine take from the same memory.
    shares_memory: bool
    # 0 where the host's threads do not compute.
    num_threads: int

    @property
    @abstractmethod
    def name(self) -> str:
        """For people."""

    @property
    @abstractmethod
    def model_name(self) -> str:
        """What the bits of an answer depend on: equal devices have equal names, any number."""

    @abstractmethod
    def resident_bytes(self) -> int:
        """The device's memory that this process uses now."""

    @abstractmethod
    def available_bytes(self) -> int:
        """The device's memory that can still be taken."""

    @abstractmethod
    def total_bytes(self) -> int:
        """The device's memory in all."""

    @abstractmethod
    def backend(self, weight_dtype: str) -> Backend[Any]:
        """The operators, for weights of this type."""

    @abstractmethod
    def runner(self, decoder: Decoder) -> tuple[Runner, Batches]:
        """What runs commands on a decoder of this device, and what makes batches to test it."""

    def warm_up(self, decoder: Decoder, batches: Batches) -> None:  # noqa: B027 (see enter)
        """Runs what takes longer the first time, on slot memory that it leaves zeroed."""

    @abstractmethod
    def join_group(self, rendezvous: Rendezvous) -> Group:
        """Meets the other ranks; a lone rank meets nobody."""

    def plan(self, config: ModelConfig, shard: Shard, limits: ServingLimits) -> MemoryPlan:
        """What a rank will take of this device's memory."""
        return plan_memory(
            config,
            shard,
            limits,
            self.resident_bytes(),
            self.available_bytes(),
            self.total_bytes(),
            self.footprint,
        )

    def enter(self) -> None:  # noqa: B027 (nothing to do on the CPU)
        """Makes the device the calling thread's."""

    def release_free_memory(self) -> None:
        """Gives memory that nobody uses back to the system."""
        release_free_memory()

    def check_model(self, config: ModelConfig, limits: ServingLimits) -> None:
        """Raises SetupError for a model or a type that the operators do not take."""
        for name, dtype in (("weight_dtype", limits.weight_dtype), ("kv_dtype", limits.kv_dtype)):
            if dtype not in self.weight_dtypes:
                raise SetupError(
                    f"{name} {dtype!r} is not supported on {self.name}; supported: auto, "
                    f"{', '.join(self.weight_dtypes)}"
                )


class CpuDevice(Device):
    """The CPU, on `num_threads` threads."""

    weight_dtypes = ("float32", "bfloat16")
    shares_memory = True
    # The scheduler takes its time from the worker's cores, some 2 ms a command.
    pace = Pace(256, 256, 40_000_000)
    footprint = CPU_FOOTPRINT
    name = "cpu"

    def __init__(self, num_threads: int) -> None:
        self._backend = CpuBackend(num_threads)
        self.num_threads = num_threads

    @property
    def model_name(self) -> str:
        """The architecture and the vector instructions in use."""
        return f"{platform.machine()} {self._backend.isa}"

    def resident_bytes(self) -> int:
        """Resident set of the process."""
        return resident_bytes()

    def available_bytes(self) -> int:
        """The machine's memory, or less if a container limits it."""
        return available_bytes()

    def total_bytes(self) -> int:
        """The machine's memory, also if a container limits it."""
        return int(psutil.virtual_memory().total)

    def backend(self, weight_dtype: str) -> Backend[Any]:
        """The same for every type."""
        return self._backend

    def runner(self, decoder: Decoder) -> tuple[Runner, Batches]:
        """See Device."""
        runner = CpuRunner(decoder, self._backend)
        return runner, BatchBuffers(decoder.limits.max_step_tokens)

    def join_group(self, rendezvous: Rendezvous) -> Group:
        """By sockets."""
        return join_links(rendezvous)


def open_device(name: str, rank: int, num_threads: int) -> Device:
    """The device "cpu", "cuda" (GPU number `rank`), "cuda:N" or "auto".

    "auto" is "cuda" where GPU 0 can be used, on every rank alike: a group of two kinds cannot meet.
    Raises SetupError saying what was found and what to do.
    """
    if name == "cpu" or (name == "auto" and not gpu.usable(0)):
        return CpuDevice(num_threads)
    index = int(name.removeprefix("cuda:")) if name.startswith("cuda:") else rank
    gpu.refuse_unusable(index)
    # Only here: it needs a native library built with CUDA.
    from worker.cuda_device import CudaDevice

    return CudaDevice(index)


def preload() -> None:
    """Loads what open_device may need later. No device is opened."""
    if gpu.is_built():
        import worker.cuda_device  # noqa: F401


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

    A parent of this id that has died already is noticed too.
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
