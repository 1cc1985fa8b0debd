"""Waiting: the first-come-first-served queue, deadlines, and when to try again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from .errors import QueueFullError
from .request import Request

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0
_FIRST_GUESS_NS = 1_000_000_000


class RequestQueue:
    """Requests in order of arrival. Push, pop and removal by id take O(1)."""

    def __init__(self, max_len: int, max_tokens: int = 0) -> None:
        """At most max_len (at least 1) requests and, unless 0, max_tokens prompt tokens wait."""
        if max_len < 1:
            raise ValueError(f"max_queue_len is {max_len}; at least 1 request must be able to wait")
        if max_tokens < 0:
            raise ValueError(f"max_queued_tokens is {max_tokens}; 0 (no bound) or more is needed")
        self.max_len = max_len
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push(self, requests: Sequence[Request], spare: int, retry_after_s: float) -> None:
        """Adds all at the tail, or none. `spare` may wait beyond max_len: they are seated at once.

        QueueFullError, with retry_after_s, at a bound. An empty queue takes prompts of any length.
        """
        if len(self) + len(requests) > self.max_len + spare:
            beside = f" and {len(requests)} more came" if len(requests) > 1 else ""
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
        self._requests.update((request.request_id, request) for request in requests)
        self.num_tokens += num_new

    def pop(self) -> Request:
        """Takes the head. KeyError when empty."""
        _, request = self._requests.popitem(last=False)
        self.num_tokens -= len(request.prompt_token_ids)
        return request

    def remove(self, request_id: str) -> Request:
        """Takes a request out of the middle. KeyError when it does not wait."""
        request = self._requests.pop(request_id)
        self.num_tokens -= len(request.prompt_token_ids)
        return request


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
