from __future__ import annotations

import json
import logging
import sys

from scheduler_service.logs import JsonFormatter, TextFormatter, words


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


def test_fields_of_a_json_line():
    made = record("x")
    made.fields = {"request_id": "a\nb", "tokens": 3}
    values = json.loads(JsonFormatter().format(made))
    assert (values["request_id"], values["tokens"]) == ("a\nb", 3)


def test_words_cannot_be_taken_for_others():
    assert words({"a": 1, "b": "x y=2", "c": "", "d": "é"}) == "a=1 b='x y=2' c='' d=é"


def test_no_word_begins_a_line():
    line = TextFormatter().format(record(words({"id": "a\r\nINFO b"})))
    assert "\n" not in line
    assert "\r" not in line
