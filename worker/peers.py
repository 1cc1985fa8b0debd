"""The group of ranks on GPUs: sums and gathers over the links between them.

On GPUs that reach each other's memory, every rank writes its part to the others and adds what it
received (native/src/cuda/all_reduce.cu). Elsewhere NCCL carries the parts. Either way the parts are
added in rank order in float32 and the sum is rounded once, so it has the same bits on every rank,
by either way and for any number of rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistNetworkError,
    PrefixStore,
    Store,
)

from worker import _native
from worker.errors import PeerLostError, SetupCancelledError, SetupError, StepError
from worker.sharding import Part

# Elements of x that NCCL gathers at once.
_NCCL_CHUNK = 1 << 22
# NCCL's buffers of a rank lie there where GPUs do not reach each other: 4 MiB and more per channel
# and peer. For eight ranks this is the 1 GiB that NVIDIA advises; Docker's default is 64 MiB.
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MIB = 128
# Torch's watchdog ends what waits too long, but not the process, and writes no dump before it does.
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
# How long a rank that leaves waits for the others to let go of its memory.
_CLOSE_S = 2.0
_POLL = timedelta(milliseconds=500)
_RETRY_S = 0.01


class CudaGroup:
    """The collectives of a rank on one GPU, all put on one stream; `reserve` allocates for them."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store | None,
        device: torch.device,
        stream: torch.cuda.Stream,
        timeout_s: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """`store` joins the ranks and is used by no other group; None does for one rank.

        Ranks wait for each other up to `timeout_s`, here, in `reserve` and in every collective; or
        until `cancelled()`, and in collectives until `abort`.
        """
        self.rank = rank
        self.world_size = world_size
        self._device = device
        self._stream = stream
        self._timeout_s = timeout_s
        self._peers: _native.CudaPeers | None = None
        self._nccl: _NcclSums | None = None
        self._begins: list[int] = []
        self._totals = 0
        self._store: _Meetings | None = None
        # Between `abort` and `close`, which are called by two threads.
        self._closing = threading.Lock()
        self.same_machine = True
        if world_size > 1:
            if store is None:
                raise SetupError("several ranks need a store")
            self._store = _Meetings(store, rank, world_size, timeout_s, cancelled)
            self.same_machine = self._store.same_machine

    @property
    def capturable(self) -> bool:
        """Whether the calls may be captured in a graph, and a replay ends without a peer."""
        return self._nccl is None

    @property
    def device_bytes(self) -> int:
        """Device memory of the buffers; torch has the rest, and NCCL does not tell of its own."""
        return 0 if self._peers is None else self._peers.num_bytes

    def reserve(
        self,
        max_tokens: int,
        hidden_size: int,
        max_rows: int,
        parts: list[Part],
        use_peers: bool = True,
    ) -> None:
        """Allocates for sums of up to `max_tokens` rows of `hidden_size`.

        Sums of up to `max_rows` rows (64 at most) are the fastest; a gather has up to `max_rows`
        rows of `parts` columns. All ranks call this, at about the same time.
        """
        if self._store is None:
            return
        self._begins = [part.begin for part in parts] + [parts[-1].end]
        if not (use_peers and self._open_peers(self._store, hidden_size, max_rows)):
            if self.same_machine:
                check_shared_memory(self.world_size)
            backend = self._store.nccl(self._timeout_s)
            self._nccl = _NcclSums(backend, self._stream, max_tokens * hidden_size, max_rows, parts)

    def total(self, value: float) -> float:
        """The sum of every rank's `value`, in float32."""
        parts = [value]
        if self._store is not None:
            self._totals += 1
            texts = self._store.exchange(f"total/{self._totals}", repr(value))
            parts = [float(text) for text in texts]
        return float(torch.tensor(parts, dtype=torch.float32).sum())

    def fuses_norm(self, x: Tensor) -> bool:
        """Whether all_reduce_add_rms_norm takes x [T, H]."""
        return self._peers is not None and self._peers.fuses_norm(x.shape[0], x.shape[1])

    def all_reduce(self, x: Tensor) -> None:
        """x (contiguous, any float type) becomes the sum of all ranks' x, rounded once."""
        if self.world_size == 1:
            return
        if self._peers is not None:
            self._peers.all_reduce(x if x.ndim == 2 else x.view(1, -1))
        else:
            self._fallback().all_reduce(x)

    def all_reduce_add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """all_reduce(delta), then add_rms_norm of CudaOps, to the bit; where fuses_norm(delta)."""
        if self._peers is None:
            raise StepError("this group does not fuse")
        self._peers.all_reduce_add_rms_norm(residual, delta, weight, eps, out)

    def gather_columns(self, local: Tensor, out: Tensor) -> None:
        """out [B, V] = the ranks' columns side by side; local [B, V / ranks] is this rank's."""
        if self.world_size == 1:
            return
        if self._peers is not None:
            self._peers.gather_columns(local, self._begins, out)
        else:
            self._fallback().gather_columns(local, out)

    def check(self) -> None:
        """Raises StepError if a peer did not come in time: what was computed since is garbage."""
        lost = self._peers is not None and self._peers.failed()
        if lost or (self._nccl is not None and self._nccl.failed()):
            raise PeerLostError(f"rank {self.rank} lost its group: a peer did not come in time")

    def abort(self) -> None:
        """Ends what waits for a peer; from any thread. Only `close` may follow."""
        with self._closing:
            if self._peers is not None:
                self._peers.abort()
            if self._nccl is not None:
                self._nccl.abort()

    def close(self) -> None:
        """Leaves the group and gives its memory back; no call may follow."""
        if self._nccl is not None:
            self._nccl.abort()
        if self._peers is not None:
            # A lost device is told by other calls.
            with contextlib.suppress(RuntimeError):
                self._stream.synchronize()
        with self._closing:
            peers, self._peers, self._nccl = self._peers, None, None
        if peers is not None and self._store is not None:
            peers.close_peers()
            closed = self._store.leave("closed")
            peers.release(closed)
            if closed:
                # The store is rank 0's: it stays until all have seen that all have closed.
                self._store.leave("left")
        self._store = None

    def _fallback(self) -> _NcclSums:
        if self._nccl is None:
            raise StepError("the group was left, or has reserved nothing")
        return self._nccl

    def _open_peers(self, store: _Meetings, hidden_size: int, max_rows: int) -> bool:
        """False where any rank cannot reach another's memory."""
        if not self.same_machine or self.world_size > _native.CudaPeers.MAX_RANKS:
            return False
        peers = _native.CudaPeers(
            self._device.index,
            self._stream.cuda_stream,
            self.rank,
            self.world_size,
            min(max_rows, _native.CudaPeers.MAX_ROWS),
            hidden_size,
            self._timeout_s,
        )
        handles = store.exchange("handle", peers.handle().hex())
        reason = ""
        try:
            peers.open([bytes.fromhex(handle) for handle in handles])
        except RuntimeError as error:
            reason = str(error)
        reasons = store.exchange("opened", reason)
        if not any(reasons):
            self._peers = peers
            return True
        peers.close_peers()
        peers.release(store.leave("not opened"))
        return False


def check_shared_memory(world_size: int) -> None:
    """SetupError unless /dev/shm has room for NCCL between so many ranks of this machine.

    Without it NCCL ends with a bus error, or in words that do not tell why.
    """
    needed_mib = world_size * _SHARED_MIB
    try:
        found = os.statvfs(_SHARED_MEMORY)
        free_mib = found.f_bavail * found.f_frsize >> 20
    except OSError:
        free_mib = 0
    if free_mib < needed_mib:
        size = f"{max(1024, needed_mib)}m"
        raise SetupError(
            f"{_SHARED_MEMORY} has {free_mib} MiB free, and {world_size} ranks need {needed_mib}: "
            "these GPUs do not reach each other's memory, so NCCL carries their sums. In a "
            f"container give it more: shm_size: {size} or ipc: host in compose.yaml, "
            f"docker run --shm-size={size} or --ipc=host"
        )


class _NcclSums:
    """The same sums and gathers where GPUs do not reach each other's memory."""

    def __init__(
        self,
        backend: Any,
        stream: torch.cuda.Stream,
        max_elements: int,
        max_rows: int,
        parts: list[Part],
    ) -> None:
        self._backend = backend
        self._stream = stream
        self._parts = parts
        self._chunk = min(_NCCL_CHUNK, max_elements)
        self._widest = max(part.size for part in parts)
        # Appended by the thread that steps, taken off by the one that waits for results.
        self._works: deque[Any] = deque()
        floats = len(parts) * max(self._chunk, max_rows * self._widest)
        self._gathered = torch.empty(floats, device=stream.device)
        self._total = torch.empty(self._chunk, device=stream.device)
        self._own = torch.zeros(max_rows * self._widest, device=stream.device)

    def all_reduce(self, x: Tensor) -> None:
        flat = x.view(-1)
        with torch.cuda.stream(self._stream):
            for first in range(0, flat.numel(), self._chunk):
                part = flat[first : first + self._chunk]
                by_rank = self._gather(part)
                total = self._total[: part.numel()]
                total.copy_(by_rank[0])
                for other in by_rank[1:]:
                    total += other
                part.copy_(total)

    def gather_columns(self, local: Tensor, out: Tensor) -> None:
        rows = local.shape[0]
        with torch.cuda.stream(self._stream):
            own = self._own[: rows * self._widest].view(rows, self._widest)
            own[:, : local.shape[1]] = local
            by_rank = self._gather(own.view(-1)).view(len(self._parts), rows, self._widest)
            for part, columns in zip(self._parts, by_rank, strict=True):
                out[:, part.begin : part.end] = columns[:, : part.size]

    def failed(self) -> bool:
        """Whether a collective was given up; the watchdog of torch does that."""
        while self._works:
            # In this order: a work that ends in between is looked at again.
            is_completed = self._works[0].is_completed()
            result = self._works[0].get_future_result()
            if result.done() and result.value() != 0:
                return True
            if not is_completed:
                return False
            self._works.popleft()
        return False

    def abort(self) -> None:
        """What still waits for a peer ends."""
        self._backend.abort()

    def _gather(self, x: Tensor) -> Tensor:
        """All ranks' x [n], by rank [ranks, n]; valid until the next call."""
        count = len(self._parts) * x.numel()
        gathered = self._gathered.view(x.dtype)[:count]
        try:
            work = self._backend._allgather_base(gathered, x)
            work.wait()
        except RuntimeError as error:
            raise StepError(f"a collective failed: {error}") from error
        self._works.append(work)
        return gathered.view(len(self._parts), -1)


class _Meetings:
    """What the ranks tell each other through the store, by name."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        cancelled: Callable[[], bool],
    ) -> None:
        self._store = PrefixStore("cuda", store)
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._cancelled = cancelled
        places = self.exchange("process", json.dumps(asdict(_Process.own())))
        self._processes = [_Process(**json.loads(place)) for place in places]

    @property
    def same_machine(self) -> bool:
        """Whether all ranks run on one."""
        return len({process.machine for process in self._processes}) == 1

    def exchange(self, name: str, value: str) -> list[str]:
        """Every rank's value, in rank order.

        Raises SetupError naming a rank that did not come, PeerLostError if the store has gone with
        its rank, SetupCancelledError once cancelled.
        """
        # No value is empty for the store.
        self._store.set(f"{name}/{self._rank}", f".{value}")
        deadline = time.monotonic() + self._timeout_s
        values = []
        for rank in range(self._world_size):
            self._wait(f"{name}/{rank}", deadline, f"waiting for rank {rank}: {name}")
            values.append(self._store.get(f"{name}/{rank}").decode()[1:])
        return values

    def leave(self, name: str) -> bool:
        """Whether all ranks have come to this point or have ended, within a short time."""
        deadline = time.monotonic() + _CLOSE_S
        with contextlib.suppress(RuntimeError, DistError):
            self._store.set(f"{name}/{self._rank}", ".")
        while not all(self._has_left(name, rank) for rank in range(self._world_size)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_RETRY_S)
        return True

    def _has_left(self, name: str, rank: int) -> bool:
        if rank == self._rank or self._processes[rank].has_ended():
            return True
        try:
            return self._store.check([f"{name}/{rank}"])
        except (RuntimeError, DistError):  # the store has gone with its rank
            return False

    def nccl(self, timeout_s: float) -> Any:
        """A backend of NCCL; it ends no process when a peer is lost, but gives up what waits."""
        from torch.distributed import ProcessGroupNCCL

        os.environ.update(_NCCL_SETTINGS)
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        store = PrefixStore("nccl", self._store)
        return ProcessGroupNCCL(store, self._rank, self._world_size, options)

    def _wait(self, key: str, deadline: float, what: str) -> None:
        while True:
            left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            try:
                self._store.wait([key], min(left, _POLL))
                return
            except DistNetworkError as error:
                raise PeerLostError(f"the group broke up: {what}: {error}") from error
            except (RuntimeError, DistError) as error:
                if time.monotonic() > deadline:
                    raise SetupError(f"the group did not come together: {what}: {error}") from error
            if self._cancelled():
                raise SetupCancelledError(f"the stream ended while {what}")


@dataclass(frozen=True, slots=True)
class _Process:
    """A process among those of a boot of a machine, of one namespace of process ids."""

    machine: str
    namespace: str
    pid: int
    started: float

    @classmethod
    def own(cls) -> _Process:
        process = psutil.Process()
        return cls(
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
            process.pid,
            process.create_time(),
        )

    def has_ended(self) -> bool:
        """False where that cannot be known."""
        own = _Process.own()
        if (self.machine, self.namespace) != (own.machine, own.namespace):
            return False
        try:
            process = psutil.Process(self.pid)
            is_other = abs(process.create_time() - self.started) > 1.0
            return is_other or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
