from __future__ import annotations

import dataclasses

import pytest

from scheduler_service.record import AnswerLog, Setup
from scheduler_service.request import (
    FinishedEvent,
    FinishReason,
    PromptLogprobsEvent,
    TokenEvent,
    TokenLogprobs,
)

SETUP = Setup("f", "front", "1", "b", "bfloat16", "bfloat16", "NVIDIA H200", 2)


def logprobs(count: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(-float(index), 1, (), ()) for index in range(count))


def test_what_is_told_once_more_is_dropped():
    log = AnswerLog()
    log.add(PromptLogprobsEvent("r", 1, logprobs(2)))
    log.add(PromptLogprobsEvent("r", 2, logprobs(3)))
    log.add(TokenEvent("r", 0, (1, 2, 3), logprobs(3)))
    log.add(TokenEvent("r", 1, (2, 3, 4), logprobs(3)))
    assert list(log.token_ids) == [1, 2, 3, 4]
    assert [one.logprob for one in log.logprobs] == [0, -1, -2, -2]
    assert [one.logprob for one in log.prompt_logprobs] == [0, -1, -1, -2]


@pytest.mark.parametrize(
    "event", [TokenEvent("r", 1, (1,)), PromptLogprobsEvent("r", 2, logprobs(1))]
)
def test_a_gap_is_a_bug(event):
    with pytest.raises(ValueError, match="was next"):
        AnswerLog().add(event)


def test_events_tell_all_again():
    log, again = AnswerLog(), AnswerLog()
    log.add(PromptLogprobsEvent("r", 1, logprobs(2)))
    log.add(TokenEvent("r", 0, (1, 2), logprobs(2)))
    log.add(FinishedEvent("r", FinishReason.LENGTH, 1, 2, 0, 0, 0, 0))
    for event in log.events("r"):
        again.add(event)
    assert again == log


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Setup)])
def test_each_field_of_a_setup_counts(field):
    other = dataclasses.replace(SETUP, **{field: "x"})
    assert other.difference(SETUP) == f"{field} is 'x' and was {getattr(SETUP, field)!r}"
    assert SETUP.difference(SETUP) is None
