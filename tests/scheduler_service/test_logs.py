from __future__ import annotations

import json
import logging
import sys

from scheduler_service.logs import JsonFormatter, TextFormatter


def record(message: str, failed: bool = False) -> logging.LogRecord:
    error = None
    if failed:
        try:
            raise ValueError("why")
        except ValueError:
            error = sys.exc_info()
    made = logging.LogRecord("part", logging.WARNING, "file", 1, message, None, error)
    made.created = 0.25
    return made


def test_a_text_line():
    line = TextFormatter().format(record("one\ntwo"))
    assert line == "1970-01-01T00:00:00.250Z WARNING part: one\\ntwo"
    assert TextFormatter().format(record("x", failed=True)).endswith("ValueError: why")


def test_a_json_line():
    line = JsonFormatter().format(record("one\n\u00e9", failed=True))
    assert "\n" not in line
    values = json.loads(line)
    assert "ValueError: why" in values.pop("exception")
    assert values == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "warning",
        "logger": "part",
        "message": "one\n\u00e9",
    }
