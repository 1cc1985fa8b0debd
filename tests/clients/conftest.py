from __future__ import annotations

from collections.abc import Iterator

import pytest
from clients.scripted_server import ScriptedServer, scripted_server


@pytest.fixture
def served() -> Iterator[ScriptedServer]:
    """A scripted server of the public API, for one test."""
    with scripted_server() as server:
        yield server
