"""Ranks that differ are found, in set-up and in steps (B24)."""

from __future__ import annotations

import dataclasses

import pytest

from scheduler_service.agreement import StepAgreement, agree_on_setup
from scheduler_service.engine import EngineConfig, Geometry, WorkerReport
from scheduler_service.engine_types import WorkerConfigured
from scheduler_service.group_errors import DigestMismatchError, SetupError
from scheduler_service.step import RowResult, StepResult

GEOMETRY = Geometry(2, 64, 3, 100, "f", "float32", "float32")
CONFIG = EngineConfig(world_size=2, num_slots=2, max_seq_len=64)


def answers(rank1=GEOMETRY, epoch=5, rank=1):
    return [
        WorkerConfigured(5, GEOMETRY, WorkerReport(0, "a", "cpu", 1, 10, 11, ())),
        WorkerConfigured(epoch, rank1, WorkerReport(rank, "b", "cpu", 1, 10, 12, ())),
    ]


def test_agreement_gives_the_info():
    info = agree_on_setup(CONFIG, 5, answers())
    assert info.geometry == GEOMETRY
    assert [worker.address for worker in info.workers] == ["a", "b"]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Geometry)])
def test_a_differing_field_is_named_with_both_values(field):
    value = getattr(GEOMETRY, field)
    other = value + 1 if isinstance(value, int) else "other"
    changed = dataclasses.replace(GEOMETRY, **{field: other})
    with pytest.raises(SetupError, match=f"{field}: {value!r} and {other!r}"):
        agree_on_setup(CONFIG, 5, answers(changed))


@pytest.mark.parametrize(
    ("change", "words"), [({"epoch": 4}, "epoch 4, 5 was"), ({"rank": 0}, "rank 0, 1 was")]
)
def test_wrong_echoes(change, words):
    with pytest.raises(SetupError, match=words):
        agree_on_setup(CONFIG, 5, answers(**change))


@pytest.mark.parametrize(("field", "value"), [("num_slots", 3), ("max_seq_len", 65)])
def test_geometry_is_what_was_asked_for(field, value):
    config = dataclasses.replace(CONFIG, **{field: value})
    with pytest.raises(SetupError, match=f"{field} {getattr(GEOMETRY, field)}, {value} was asked"):
        agree_on_setup(config, 5, answers())


def result(step_id, digest=7, epoch=5, rows=()):
    return StepResult(epoch, step_id, digest, rows, 100)


def test_a_step_is_given_when_all_ranks_have_sent_it():
    agreement = StepAgreement(2, 5)
    first = result(1, rows=(RowResult(0, 1, (5,)),))
    assert agreement.add(0, first) is None
    assert agreement.add(0, result(2)) is None
    assert agreement.add(1, result(1)) is first
    assert agreement.add(1, result(2)) == result(2)


@pytest.mark.parametrize("other", [result(1, digest=8), result(2), result(1, epoch=6)])
def test_ranks_that_ran_a_step_differently(other):
    agreement = StepAgreement(2, 5)
    agreement.add(1, other)
    with pytest.raises(DigestMismatchError, match="workers 0 and 1"):
        agreement.add(0, result(1))


def test_old_epochs_are_dropped():
    agreement = StepAgreement(1, 5)
    assert agreement.add(0, result(9, epoch=4)) is None
    assert agreement.add(0, result(1)) == result(1)
