"""Waiting: who is next, deadlines, and when to try again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from .errors import QueueFullError
from .request import Request

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0
_FIRST_GUESS_NS = 1_000_000_000


class RequestQueue:
    """First come, first served. A client that may run no more requests is passed over."""

    def __init__(self, max_len: int, max_tokens: int = 0) -> None:
        """At most max_len (at least 1) requests and, unless 0, max_tokens prompt tokens wait."""
        if max_len < 1:
            raise ValueError(f"max_queue_len is {max_len}; at least 1 request must be able to wait")
        if max_tokens < 0:
            raise ValueError(f"max_queued_tokens is {max_tokens}; 0 (no bound) or more is needed")
        self.max_len = max_len
        self.max_tokens = max_tokens
        self.num_tokens = 0
        # By client, of those admitted and not released; clients without any are left out.
        self.num_running: Counter[str] = Counter()
        self._requests: OrderedDict[str, Request] = OrderedDict()
        # By client that waits: its requests, each with its place in the order of arrival.
        self._places: dict[str, OrderedDict[str, int]] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In order of arrival."""
        return iter(self._requests.values())

    @property
    def oldest_arrival_ns(self) -> int | None:
        """Of those that wait; None: none does."""
        first = next(iter(self), None)
        return None if first is None else first.arrival_ns

    def num_waiting_of(self, client: str) -> int:
        return len(self._places.get(client, ()))

    def push(
        self, requests: Sequence[Request], spare: int, retry_after_s: float, max_waiting: int = 0
    ) -> None:
        """Adds the requests of one call at the tail, or none. `spare` may wait beyond the bounds:
        they are seated at once.

        QueueFullError, with retry_after_s, at a bound: unless 0, max_waiting of the client may
        wait. An empty queue takes prompts of any length.
        """
        beside = f" and {len(requests)} more came" if len(requests) > 1 else ""
        self._check_client(requests, spare, retry_after_s, max_waiting, beside)
        if len(self) + len(requests) > self.max_len + spare:
            raise QueueFullError(
                f"{len(self)} requests wait{beside}, the limit is {self.max_len}; retry later",
                retry_after_s,
            )
        num_new = sum(len(request.prompt_token_ids) for request in requests)
        if self.max_tokens and self._requests and self.num_tokens + num_new > self.max_tokens:
            raise QueueFullError(
                f"{self.num_tokens} prompt tokens wait and this request has {num_new}, "
                f"the limit is {self.max_tokens}; retry later",
                retry_after_s,
            )
        self.append(requests)

    def _check_client(
        self,
        requests: Sequence[Request],
        spare: int,
        retry_after_s: float,
        max_waiting: int,
        beside: str,
    ) -> None:
        request = requests[0]
        max_running = request.client_limits.max_running
        if max_running:
            spare = max(0, min(spare, max_running - self.num_running[request.client]))
        num_waiting = self.num_waiting_of(request.client)
        if max_waiting and num_waiting + len(requests) > max_waiting + spare:
            raise QueueFullError(
                f"{num_waiting} requests of this client wait or begin to run{beside}, the limit "
                f"for one client is {max_waiting}; retry later",
                retry_after_s,
            )

    def append(self, requests: Iterable[Request]) -> None:
        """Adds them at the tail, whatever the bounds."""
        for request in requests:
            self._requests[request.request_id] = request
            places = self._places.setdefault(request.client, OrderedDict())
            places[request.request_id] = self._num_pushed
            self._num_pushed += 1
            self.num_tokens += len(request.prompt_token_ids)

    def head(self) -> Request | None:
        """The one to be admitted next; None when none waits that may run."""
        able = [client for client in self._places if self._may_run(client)]
        return self._first_of(min(able, key=self._rank)) if able else None

    def admit(self, request_id: str) -> Request:
        """Takes a request out, to run until its `release`. KeyError when it does not wait."""
        request = self.remove(request_id)
        self.num_running[request.client] += 1
        return request

    def release(self, request: Request) -> None:
        """An admitted request has ended."""
        self.num_running[request.client] -= 1
        if not self.num_running[request.client]:
            del self.num_running[request.client]

    def remove(self, request_id: str) -> Request:
        """Takes a request out of the middle. KeyError when it does not wait."""
        request = self._requests.pop(request_id)
        self.num_tokens -= len(request.prompt_token_ids)
        places = self._places[request.client]
        del places[request_id]
        if not places:
            del self._places[request.client]
        return request

    def _rank(self, client: str) -> tuple[int, ...]:
        """The client of the lowest one is next."""
        return (self._first_place(client),)

    def _first_place(self, client: str) -> int:
        return next(iter(self._places[client].values()))

    def _first_of(self, client: str) -> Request:
        return self._requests[next(iter(self._places[client]))]

    def _may_run(self, client: str) -> bool:
        max_running = self._first_of(client).client_limits.max_running
        return not max_running or self.num_running[client] < max_running


class FairQueue(RequestQueue):
    """The client with the fewest running requests is next; of equals the one whose oldest waits
    longest. First come, first served among the requests of one client."""

    def _rank(self, client: str) -> tuple[int, ...]:
        return (self.num_running[client], self._first_place(client))


class Deadlines:
    """Which requests are due. Asking costs nothing until the earliest deadline has come."""

    def __init__(self) -> None:
        self._by_id: dict[str, int] = {}
        # At or before the earliest deadline; None: there is none.
        self._next_ns: int | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    @property
    def next_ns(self) -> int | None:
        """When to ask `due` again; may be earlier than the earliest deadline, never later."""
        return self._next_ns

    def add(self, request_id: str, deadline_ns: int) -> None:
        self._by_id[request_id] = deadline_ns
        if self._next_ns is None or deadline_ns < self._next_ns:
            self._next_ns = deadline_ns

    def discard(self, request_id: str) -> None:
        if self._by_id.pop(request_id, None) is not None and not self._by_id:
            self._next_ns = None

    def due(self, now_ns: int) -> list[str]:
        """Takes out and returns the ids whose deadline is at or before now, in order of `add`."""
        if self._next_ns is None or now_ns < self._next_ns:
            return []
        due = [request_id for request_id, at_ns in self._by_id.items() if at_ns <= now_ns]
        for request_id in due:
            del self._by_id[request_id]
        self._next_ns = min(self._by_id.values(), default=None)
        return due


class ServiceTime:
    """A moving mean of the time between admission and end."""

    def __init__(self) -> None:
        self._mean_ns = _FIRST_GUESS_NS

    def observe(self, duration_ns: int) -> None:
        self._mean_ns = (7 * self._mean_ns + duration_ns) // 8

    def retry_after_s(self, num_slots: int) -> float:
        """The mean time until one of num_slots busy slots is free, within 0.1 to 60 seconds."""
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, self._mean_ns / num_slots / 1e9))
