"""Which replica a request goes to: the choices of a load balancer, without the balancer."""

import hashlib
import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, Protocol

# Places of each replica on the ring: the more, the evener their shares.
_PLACES: Final = 64


class Router(Protocol):
    """Chooses by the key and by the requests that each replica has; None: all are down."""

    def choose(self, key: int, loads: Sequence[int], is_up: Sequence[bool]) -> int | None:
        """The replica for a request."""


class RandomRouter:
    """Any replica that is up."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, key: int, loads: Sequence[int], is_up: Sequence[bool]) -> int | None:
        """See Router."""
        for _ in range(100):
            one = self._rng.randrange(len(loads))
            if is_up[one]:
                return one
        up = [one for one, alive in enumerate(is_up) if alive]
        return self._rng.choice(up) if up else None


class LeastRouter:
    """The one with the fewest requests; of equals any, else the first would get all of a lull."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, key: int, loads: Sequence[int], is_up: Sequence[bool]) -> int | None:
        """See Router."""
        least = min((load for load, alive in zip(loads, is_up, strict=True) if alive), default=None)
        if least is None:
            return None
        start = self._rng.randrange(len(loads))
        for step in range(len(loads)):
            one = (start + step) % len(loads)
            if is_up[one] and loads[one] == least:
                return one
        return None


class HashRouter:
    """Consistent hash of the key with bounded load: the next replica on the ring that is up and has
    fewer than `bound` times the mean of requests, this one counted in."""

    def __init__(self, num_replicas: int, bound: float) -> None:
        """`bound`: above 1; infinite for a hash alone."""
        ring = sorted((_place(f"{r}/{p}"), r) for r in range(num_replicas) for p in range(_PLACES))
        self._places = [place for place, _ in ring]
        self._replicas = [replica for _, replica in ring]
        self._bound = bound

    def choose(self, key: int, loads: Sequence[int], is_up: Sequence[bool]) -> int | None:
        """See Router."""
        most = math.inf
        if self._bound != math.inf:
            most = math.ceil(self._bound * (sum(loads) + 1) / max(1, sum(is_up)))
        start = bisect_left(self._places, _place(str(key)))
        for step in range(len(self._replicas)):
            one = self._replicas[(start + step) % len(self._replicas)]
            if is_up[one] and loads[one] < most:
                return one
        return None


def _place(text: str) -> int:
    """On the ring; the same on every machine and in every process, as Python's own hash is not."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
