"""All ranks must be of one mind: the same set-up at start, the same tokens in each step."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque

from .engine_types import EngineConfig, EngineInfo, WorkerConfigured
from .group_errors import DigestMismatchError, SetupError
from .step import StepResult

_log = logging.getLogger(__name__)


def agree_on_setup(
    config: EngineConfig, epoch: int, configured: list[WorkerConfigured]
) -> EngineInfo:
    """The group's info, from what each rank (in order) reported. SetupError names a difference."""
    first = configured[0]
    for rank, answer in enumerate(configured):
        _expect(rank, "epoch", answer.epoch, epoch)
        _expect(rank, "rank", answer.report.rank, rank)
        for field in dataclasses.fields(answer.geometry):
            mine = getattr(first.geometry, field.name)
            theirs = getattr(answer.geometry, field.name)
            if mine != theirs:
                raise SetupError(
                    f"workers 0 and {rank} disagree on {field.name}: {mine!r} and {theirs!r}; "
                    "give all workers the same checkpoint and version"
                )
    _expect(0, "num_slots", first.geometry.num_slots, config.num_slots)
    if config.max_seq_len:
        _expect(0, "max_seq_len", first.geometry.max_seq_len, config.max_seq_len)
    return EngineInfo(epoch, first.geometry, tuple(answer.report for answer in configured))


def _expect(rank: int, name: str, value: int, asked: int) -> None:
    if value != asked:
        raise SetupError(f"worker {rank} reports {name} {value}, {asked} was asked for")


class StepAgreement:
    """Joins the ranks' results: a step's result is given when all ranks have sent it, and agree."""

    def __init__(self, world_size: int, epoch: int) -> None:
        self._epoch = epoch
        self._results: list[deque[StepResult]] = [deque() for _ in range(world_size)]

    def add(self, rank: int, result: StepResult) -> StepResult | None:
        """Takes a rank's result; returns rank 0's of the oldest step once it is complete.

        DigestMismatchError when ranks differ in step id or digest. Results of older epochs are
        dropped.
        """
        if result.epoch < self._epoch:
            _log.warning("worker %d: dropped a result of old epoch %d", rank, result.epoch)
            return None
        self._results[rank].append(result)
        if not all(self._results):
            return None
        step = [results.popleft() for results in self._results]
        for other, theirs in enumerate(step):
            mine = (step[0].epoch, step[0].step_id, step[0].digest)
            if mine != (theirs.epoch, theirs.step_id, theirs.digest):
                raise DigestMismatchError(
                    f"workers 0 and {other} ran a step differently: epoch, step and digest "
                    f"{mine} and {(theirs.epoch, theirs.step_id, theirs.digest)}"
                )
        return step[0]
