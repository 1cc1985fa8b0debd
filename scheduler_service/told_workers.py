"""Where the workers are, as whoever starts them tells: lines of JSON on standard input.

`{"workers": ["10.0.0.1:40001", null], "rendezvous": "10.0.0.1:20001"}` is all that is known by now,
in rank order: worker 1 has no address yet, or has lost the one it had. The last line holds.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import TextIO

from .errors import GroupError, SetupError, WorkerLostError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses in rank order, None of a worker that has none; where the ranks meet ("": not
    told)."""

    addresses: tuple[str | None, ...]
    rendezvous_address: str = ""

    def known(self) -> tuple[str, ...]:
        return tuple(address for address in self.addresses if address is not None)

    def missing(self) -> list[int]:
        return [rank for rank, address in enumerate(self.addresses) if address is None]


class ToldWorkers:
    """The places that hold now. Used from one event loop."""

    def __init__(self, world_size: int) -> None:
        self._places = Places((None,) * world_size)
        self._changed = asyncio.Event()
        # Why nothing more will be told.
        self._end = ""

    async def read(self, pipe: TextIO) -> None:
        """Takes lines until there are no more."""
        reader = asyncio.StreamReader()
        try:
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), pipe
            )
            while line := await reader.readline():
                self.tell(line)
            self._end = "standard input has ended"
        except (OSError, ValueError) as error:
            self._end = f"standard input cannot be read: {error}"
        _log.warning("nobody tells any more where the workers are: %s", self._end)
        self._wake()

    def tell(self, line: bytes) -> None:
        """Takes a line. One that cannot be read is logged and changes nothing."""
        try:
            places = _read_places(line, len(self._places.addresses))
        except ValueError as error:
            _log.error("standard input: %s", error)
            return
        if places != self._places:
            self._places = places
            self._wake()

    async def all_known(self) -> Places:
        """Waits until every worker has an address. SetupError when nobody will tell it."""
        while missing := self._places.missing():
            names = ", ".join(map(str, missing))
            if self._end:
                raise SetupError(f"no address of worker {names}: {self._end}")
            _log.info("waiting for the address of worker %s", names)
            await self._changed.wait()
        return self._places

    async def moved(self, places: Places) -> GroupError:
        """Waits until these are not the places any more."""
        while self._places == places:
            await self._changed.wait()
        pairs = zip(self._places.addresses, places.addresses, strict=True)
        rank = next((rank for rank, (now, then) in enumerate(pairs) if now != then), 0)
        now = self._places.addresses[rank]
        return WorkerLostError(rank, f"is at {now} now" if now else "has lost its address")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _read_places(line: bytes, world_size: int) -> Places:
    told = json.loads(line)
    workers = told.get("workers") if isinstance(told, dict) else None
    if not isinstance(workers, list) or len(workers) != world_size:
        raise ValueError(f"{line!r} has no list 'workers' of {world_size}, one for each rank")
    rendezvous = told.get("rendezvous") or ""
    if not all(isinstance(one, str | None) for one in [*workers, rendezvous]):
        raise ValueError(f"{line!r} has an address that is no text")
    return Places(tuple(one or None for one in workers), rendezvous)
