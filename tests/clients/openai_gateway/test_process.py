"""What the process needs of the machine."""

from __future__ import annotations

import resource

import pytest

from slotwise_gateway.process import SPARE_FILES, have_files_for


@pytest.fixture
def limits(monkeypatch):
    """The limits of open files, soft and hard, as if they were the process's."""
    held = [(256, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: held[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: held.append(pair))
    return held


def test_the_limit_of_files_is_raised_for_the_connections(limits, caplog):
    have_files_for(1024)
    assert limits[-1] == (1024 + SPARE_FILES, 4096)
    assert caplog.messages == []


def test_a_limit_that_suffices_stays(limits):
    have_files_for(256 - SPARE_FILES)
    assert limits == [(256, 4096)]


def test_a_limit_that_cannot_be_raised_so_far_is_told(limits, caplog):
    have_files_for(4096)
    assert limits[-1] == (4096, 4096)
    (message,) = caplog.messages
    assert "may open 4096 files, too few for 4096 connections" in message
