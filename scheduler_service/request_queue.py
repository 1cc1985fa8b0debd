"""The bounded first-come-first-served queue of waiting requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from .errors import QueueFullError
from .request import Request


class RequestQueue:
    """Requests in order of arrival, numbered from 0. Push, pop and removal by id take O(1)."""

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
        self._next_arrival_number = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push(self, request: Request, spare: int, retry_after_s: float) -> None:
        """Adds at the tail. `spare` requests may wait beyond max_len: free slots will take them.

        QueueFullError, with retry_after_s, at a bound. An empty queue takes a prompt of any length.
        """
        if len(self) >= self.max_len + spare:
            raise QueueFullError(
                f"{len(self)} requests wait, the limit is {self.max_len}; retry later",
                retry_after_s,
            )
        num_tokens = self.num_tokens + len(request.prompt_token_ids)
        if self.max_tokens and self._requests and num_tokens > self.max_tokens:
            raise QueueFullError(
                f"{self.num_tokens} prompt tokens wait and this request has "
                f"{len(request.prompt_token_ids)}, the limit is {self.max_tokens}; retry later",
                retry_after_s,
            )
        request.arrival_number = self._next_arrival_number
        self._next_arrival_number += 1
        self._requests[request.request_id] = request
        self.num_tokens = num_tokens

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
