from __future__ import annotations

import json
import logging
import sys

from worker.logs import JsonFormatter, TextFormatter

CONTROLS = "\n\r\x0b\x0c\x1b\x7f\x85\u2028\u2029"
FORGED = f"a{CONTROLS}2026-01-31T12:00:00.000Z ERROR worker: all is lost"


def record(message: str) -> logging.LogRecord:
    """With an exception of the same words."""
    try:
        raise ValueError(message)
    except ValueError:
        made = logging.LogRecord("part", logging.ERROR, "file", 1, message, None, sys.exc_info())
    made.created = 0.25
    return made


def test_a_json_line_tells_its_place_once_there_is_one() -> None:
    places = [None, (1, 7)]
    formatter = JsonFormatter(lambda: places.pop(0))
    assert "rank" not in json.loads(formatter.format(record("x")))
    values = json.loads(formatter.format(record("x")))
    assert values.pop("exception").endswith("ValueError: x")
    assert values == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "error",
        "logger": "part",
        "message": "x",
        "rank": 1,
        "epoch": 7,
    }


def test_no_words_forge_a_line() -> None:
    line = JsonFormatter(lambda: None).format(record(FORGED))
    assert not set(CONTROLS) & set(line)
    first, *others = TextFormatter().format(record(FORGED)).splitlines()
    assert first.startswith("1970-01-01T00:00:00.250Z ERROR part: a\\n\\r")
    assert others
    assert all(other.startswith("  ") for other in others)
