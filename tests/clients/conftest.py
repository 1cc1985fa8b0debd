from __future__ import annotations

from collections.abc import Iterator

import pytest
from clients.lossy_server import lossy_server
from clients.scripted_server import ScriptedServer, scripted_server


@pytest.fixture
def served() -> Iterator[ScriptedServer]:
    """A scripted server of the public API, for one test."""
    with scripted_server() as server:
        yield server


@pytest.fixture
def lossy() -> Iterator[ScriptedServer]:
    """One that loses connections, requests and itself, for one test."""
    with lossy_server() as server:
        yield server
