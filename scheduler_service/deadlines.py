"""Deadlines of live requests."""

from __future__ import annotations


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
