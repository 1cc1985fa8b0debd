"""A rank is warmed up at last; what it tells when it is released."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from worker_driver import Driver

from checkpoints import make_checkpoint
from worker.device import CpuDevice

# A step without a begin, 100 gaps of 1 to 100 us, and a rest of two seconds.
GAPS_NS = [-(10**15), *range(100_000, 0, -1000), 2 * 10**9]


def test_how_long_the_device_was_idle_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(make_checkpoint(tmp_path, "llama"), max_seq_len=32)
    monkeypatch.setattr(driver.executor.runner, "gaps_ns", lambda count: GAPS_NS)
    caplog.clear()
    with caplog.at_level(logging.INFO, "worker.rank"):
        driver.rank.release()
        driver.rank.release()
    assert caplog.messages == [
        "idle between steps: median 51.0 us, 90 % 91.0 us, 99 % 100.0 us, of 100"
    ]


def test_a_device_that_does_not_tell(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(make_checkpoint(tmp_path, "llama"), max_seq_len=32)
    caplog.clear()
    with caplog.at_level(logging.INFO, "worker.rank"):
        driver.rank.release()
    assert caplog.messages == []


def test_the_device_is_warmed_up_when_free_memory_has_gone_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What libraries took before would go back too, and be taken again by the first prompt."""
    calls: list[str] = []
    for name in ("release_free_memory", "warm_up"):
        monkeypatch.setattr(CpuDevice, name, lambda *_, name=name: calls.append(name))
    Driver(make_checkpoint(tmp_path, "llama"), max_seq_len=32)
    assert calls.count("warm_up") == 1
    assert calls[-2:] == ["release_free_memory", "warm_up"]
