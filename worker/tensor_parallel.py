"""The group of ranks that hold one model: rendezvous, sums and gathers.

A sum adds the ranks' parts in rank order, so it has the same bits on every rank and for any number
of rows. A group with one member takes the same calls and does nothing in them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import DistError, DistNetworkError, TCPStore  # type: ignore[attr-defined]

from worker.errors import PeerLostError, SetupCancelledError, SetupError, StepError
from worker.links import Links, Listener, connect
from worker.sharding import Part

_POLL = timedelta(milliseconds=500)
_RETRY_S = 0.02
# How long rank 0, which has the store, waits for the others to read why they are refused.
_READ = timedelta(seconds=5)


class TensorParallelGroup:
    """The collectives of a rank on the CPU, or of a lone one; CudaGroup in peers.py is its twin.

    `reserve` allocates their memory once.
    """

    # What it takes is part of the process's resident set.
    device_bytes = 0

    def __init__(self, rank: int, world_size: int, links: Links | None, same_machine: bool) -> None:
        """`links` to the other ranks; None for a lone one."""
        self.rank = rank
        self.world_size = world_size
        self.same_machine = same_machine
        self._links = links
        self._sums = torch.empty(0)
        self._gathered = torch.empty(0)
        self._own = torch.empty(0)
        self._parts: list[Part] = []
        self._widest = 0

    def reserve(self, max_tokens: int, hidden_size: int, max_rows: int, parts: list[Part]) -> None:
        """Allocates for sums of up to `max_tokens` rows of `hidden_size` floats.

        A gather has up to `max_rows` rows of `parts` columns.
        """
        if self.world_size == 1:
            return
        self._parts = parts
        self._widest = max(part.size for part in parts)
        self._sums = torch.zeros(self.world_size * max_tokens * hidden_size)
        self._gathered = torch.zeros(self.world_size * max_rows * self._widest)
        self._own = torch.zeros(max_rows * self._widest)

    def total(self, value: float) -> float:
        """The sum of every rank's `value`, in float32."""
        parts = torch.full((self.world_size,), value)
        if self.world_size > 1:
            self._gather(parts, torch.tensor([value]))
        return float(parts.sum())

    @property
    def capturable(self) -> bool:
        """Whether the calls may be captured in a CUDA graph."""
        return True

    def check(self) -> None:
        """Raises StepError if a peer was lost; here every collective has raised it already."""

    def fuses_norm(self, x: Tensor) -> bool:
        """Whether all_reduce_add_rms_norm takes x."""
        return False

    def all_reduce_add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """Not here: see fuses_norm."""
        raise StepError("this group does not fuse")

    def all_reduce(self, x: Tensor) -> None:
        """x (float32, contiguous) becomes the sum of all ranks' x, added in rank order."""
        if self.world_size == 1:
            return
        count = x.numel()
        parts = self._sums[: self.world_size * count]
        self._gather(parts, x.view(-1))
        flat = x.view(-1)
        torch.add(parts[:count], parts[count : 2 * count], out=flat)
        for rank in range(2, self.world_size):
            flat += parts[rank * count : (rank + 1) * count]

    def gather_columns(self, local: Tensor, out: Tensor) -> None:
        """out [B, V] = the ranks' columns side by side; local [B, V / ranks] is this rank's."""
        if self.world_size == 1:
            return
        rows, widest = local.shape[0], self._widest
        own = self._own[: rows * widest].view(rows, widest)
        own[:, : local.shape[1]] = local
        gathered = self._gathered[: self.world_size * rows * widest]
        self._gather(gathered, own.view(-1))
        by_rank = gathered.view(self.world_size, rows, widest)
        for rank, part in enumerate(self._parts):
            out[:, part.begin : part.end] = by_rank[rank, :, : part.size]

    def abort(self) -> None:
        """Ends what waits for a peer, here and there; from any thread. Only `close` may follow."""
        if self._links is not None:
            self._links.abort()

    def close(self) -> None:
        """Leaves the group: connections close, and peers waiting for this rank get an error."""
        if self._links is not None:
            self._links.close()

    def _gather(self, out: Tensor, x: Tensor) -> None:
        """out = all ranks' x, in rank order: a message to and from every peer, all at once."""
        if self._links is None:
            raise StepError("a lone rank has nobody to ask")
        parts = out.view(self.world_size, -1)
        parts[self.rank] = x
        rows = [memoryview(part.numpy()).cast("B") for part in parts]
        self._links.exchange(rows[self.rank], dict(enumerate(rows)))


class Group(Protocol):
    """The collectives of a rank: TensorParallelGroup, or CudaGroup in peers.py."""

    rank: int
    world_size: int
    same_machine: bool

    @property
    def device_bytes(self) -> int:
        """Memory that `reserve` took and Device.resident_bytes does not count."""

    @property
    def capturable(self) -> bool:
        """Whether the calls may be captured in a CUDA graph."""

    def reserve(self, max_tokens: int, hidden_size: int, max_rows: int, parts: list[Part]) -> None:
        """Allocates for sums of rows of `hidden_size` and gathers of `parts` columns."""

    def total(self, value: float) -> float:
        """The sum of every rank's `value`, in float32."""

    def all_reduce(self, x: Tensor) -> None:
        """x becomes the sum of all ranks' x, added in rank order."""

    def fuses_norm(self, x: Tensor) -> bool:
        """Whether all_reduce_add_rms_norm takes x."""

    def all_reduce_add_rms_norm(
        self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """residual += the sum of the ranks' deltas; out = rms_norm(residual)."""

    def gather_columns(self, local: Tensor, out: Tensor) -> None:
        """out [B, V] = the ranks' columns side by side."""

    def check(self) -> None:
        """Raises StepError if a peer was lost."""

    def abort(self) -> None:
        """Ends what waits for a peer; from any thread. Only `close` may follow."""

    def close(self) -> None:
        """Leaves the group."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a rank meets the others: `address` ("host:port") is opened by rank 0.

    A rank waits up to `timeout_s` for them, or until `cancelled()`. `device` as Device names it.
    """

    rank: int
    world_size: int
    address: str
    timeout_s: float
    cancelled: Callable[[], bool]
    device: str


def meet(rendezvous: Rendezvous) -> tuple[TCPStore, ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The group's store once all ranks are there, and this machine's address on the way to it.

    Raises SetupError naming the ranks that did not come, or that a CPU met a GPU;
    SetupCancelledError once cancelled; PeerLostError if rank 0 went away.
    """
    host, port = _split_address(rendezvous.address)
    deadline = time.monotonic() + rendezvous.timeout_s
    store = _open_store(host, port, rendezvous.rank, deadline, rendezvous.cancelled)
    try:
        devices = _meet(store, rendezvous, deadline)
    except DistNetworkError as error:
        raise PeerLostError(f"rank 0 left the rendezvous: {error}") from error
    _refuse_two_kinds(store, rendezvous.rank, devices)
    store.set_timeout(timedelta(seconds=max(1.0, deadline - time.monotonic())))
    return store, _local_address(host, port)


def join_links(rendezvous: Rendezvous) -> TensorParallelGroup:
    """Meets the other ranks; a collective waits as long for them as the rendezvous does.

    Raises SetupError naming the ranks that did not come, SetupCancelledError once cancelled,
    PeerLostError if one went away meanwhile.
    """
    rank, world_size = rendezvous.rank, rendezvous.world_size
    if world_size == 1:
        return TensorParallelGroup(rank, world_size, None, same_machine=True)
    store, own_address = meet(rendezvous)
    links = _open_links(store, str(own_address), rendezvous)
    # The store is rank 0's: it goes when all have read it.
    links.exchange(memoryview(b"."), {peer: memoryview(bytearray(1)) for peer in range(world_size)})
    return TensorParallelGroup(rank, world_size, links, own_address.is_loopback)


def _open_links(store: TCPStore, host: str, rendezvous: Rendezvous) -> Links:
    """A connection to every peer: to the lower ranks this one connects, the higher ones come."""
    rank, deadline = rendezvous.rank, time.monotonic() + rendezvous.timeout_s
    sockets: dict[int, socket.socket] = {}
    listener = Listener(host)

    def stop() -> None:
        absent = [str(peer) for peer in range(rendezvous.world_size) if peer not in sockets]
        _go_on(f"no connection with rank {', '.join(absent)}", deadline, rendezvous.cancelled)

    try:
        store.set(f"link/{rank}", listener.name)
        for peer in range(rank):
            sockets[peer] = connect(rank, _wait_for(store, f"link/{peer}", stop))
        while len(sockets) < rendezvous.world_size - 1:
            peer, link = listener.accept(stop)
            sockets[peer] = link
    except BaseException as error:
        for link in sockets.values():
            link.close()
        if isinstance(error, OSError | DistError):
            raise PeerLostError(f"rank {rank} cannot join its group: {error}") from error
        raise
    finally:
        listener.close()
    return Links(rank, sockets, rendezvous.timeout_s)


def _wait_for(store: TCPStore, key: str, stop: Callable[[], None]) -> str:
    """The key's value. `stop` is called again and again, to raise."""
    while not store.check([key]):
        stop()
        time.sleep(_RETRY_S)
    return store.get(key).decode()


def _open_store(
    host: str, port: int, rank: int, deadline: float, cancelled: Callable[[], bool]
) -> TCPStore:
    if rank != 0:
        _wait_until_open(host, port, deadline, cancelled)
    try:
        return TCPStore(host, port, is_master=rank == 0, timeout=_POLL, wait_for_workers=False)
    except (RuntimeError, DistError) as error:
        raise SetupError(f"rendezvous {host}:{port} cannot be opened: {error}") from error


def _wait_until_open(host: str, port: int, deadline: float, cancelled: Callable[[], bool]) -> None:
    """The store's own client would log every try at length."""
    while True:
        try:
            socket.create_connection((host, port), _POLL.total_seconds()).close()
            return
        except OSError as error:
            _go_on(f"no rendezvous at {host}:{port}: {error}", deadline, cancelled)
            time.sleep(_RETRY_S)


def _meet(store: TCPStore, rendezvous: Rendezvous, deadline: float) -> list[str]:
    """Waits for all ranks; their devices, in rank order."""
    store.set(f"here/{rendezvous.rank}", rendezvous.device)
    absent = list(range(rendezvous.world_size))
    while absent:
        try:
            store.wait([f"here/{absent[0]}"], _POLL)
            absent.pop(0)
        except DistNetworkError:
            raise
        except (RuntimeError, DistError):
            names = ", ".join(str(peer) for peer in absent if not store.check([f"here/{peer}"]))
            _go_on(f"waiting for rank {names}", deadline, rendezvous.cancelled)
    return [store.get(f"here/{peer}").decode() for peer in range(rendezvous.world_size)]


def _refuse_two_kinds(store: TCPStore, rank: int, devices: list[str]) -> None:
    """A CPU and a GPU would each wait for the other's kind of group."""
    if len({device.partition(":")[0] for device in devices}) == 1:
        return
    store.set(f"read/{rank}", "1")
    if rank == 0:
        # A rank that is slower is told by the scheduler.
        with contextlib.suppress(RuntimeError, DistError):
            store.wait([f"read/{peer}" for peer in range(len(devices))], _READ)
    found = ", ".join(f"rank {peer} on {device}" for peer, device in enumerate(devices))
    raise SetupError(
        f"the ranks of a group need devices of one kind, and there are {found}; start all workers "
        "with --device cpu, or all with --device cuda"
    )


def _go_on(waiting_for: str, deadline: float, cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise SetupCancelledError("the stream ended during the rendezvous")
    if time.monotonic() > deadline:
        raise SetupError(f"the group did not come together: {waiting_for}")


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise SetupError(f"rendezvous_address {address!r} is not host:port")
    return host, int(port)


def _local_address(host: str, port: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """This machine's address on the way to the rendezvous: where peers can reach it."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return ipaddress.ip_address(probe.getsockname()[0])
