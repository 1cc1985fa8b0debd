"""What can go wrong with the worker group. None of these is the fault of a request."""

from __future__ import annotations


class GroupError(Exception):
    """The group cannot go on as it is; a new one, under a new epoch, may."""


class WorkerLostError(GroupError):
    """A rank is gone, silent, or cannot be reached."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"worker {rank}: {reason}")
        self.rank = rank


class DigestMismatchError(GroupError):
    """Two ranks ran a step differently: their state no longer agrees."""


class SetupError(GroupError):
    """The set-up cannot work, and will not when tried again unchanged."""
