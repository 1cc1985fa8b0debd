"""Memory of the machine and of a container."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from worker import device


def test_memory_figures() -> None:
    assert 0 < device.resident_bytes() < psutil.virtual_memory().total
    assert 0 < device.available_bytes() < psutil.virtual_memory().total
    assert device.default_threads() >= 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"memory.max": "max\n", "memory.current": "5", "memory.stat": ""}, None),
        (
            {
                "memory.max": "1000\n",
                "memory.current": "700\n",
                "memory.stat": "anon 600\ninactive_file 90\n",
            },
            390,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "1400\n",
                "memory/memory.stat": "cache 1\ntotal_inactive_file 50\n",
            },
            0,
        ),
    ],
)
def test_container_limit(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert device._cgroup_headroom(tmp_path) == expected
