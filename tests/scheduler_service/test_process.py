from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_service.config import parse_arguments
from scheduler_service.process import Process

IN_CLEAR = "is open to networks without TLS"
ANYBODY = "nobody is asked who he is"
PLAIN_WORKER = "the connection to the worker at 10.0.0.2:1 is plain"


@pytest.mark.parametrize(
    ("flags", "warnings"),
    [
        ("--host 127.0.0.1", ()),
        ("--host 0.0.0.0", (IN_CLEAR, ANYBODY)),
        ("--host 10.0.0.1 --insecure-tokens --tokens {tokens}", (IN_CLEAR,)),
        ("--host :: --tls-cert c --tls-key k", (ANYBODY,)),
        ("--host :: --tls-cert c --tls-key k --tls-client-ca a", ()),
        ("--host :: --tls-cert c --tls-key k --tokens {tokens}", ()),
        ("--workers 10.0.0.2:1", (PLAIN_WORKER,)),
        ("--workers 127.0.0.1:1,unix:/w,localhost:1", ()),
    ],
)
async def test_what_is_open_is_warned_of(tmp_path, caplog, flags, warnings):
    tokens = tmp_path / "tokens.json"
    tokens.touch(mode=0o600)
    tokens.write_text('[{"name": "a", "token": "a-token-of-alice"}]')
    words = flags.format(tokens=tokens).split()
    process = Process(parse_arguments(["--model", str(Path("m")), *words]))
    process._warn_of_open_ports()
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == len(warnings)
    for message, expected in zip(found, warnings, strict=True):
        assert expected in message
