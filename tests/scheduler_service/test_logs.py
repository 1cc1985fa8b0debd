from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace

import pytest

from scheduler_service import logs as scheduler_logs
from scheduler_service.calls import _tell_end
from scheduler_service.logs import JsonFormatter, TextFormatter, words
from scheduler_service.request import FinishedEvent, FinishReason
from slotwise_gateway import logs as gateway_logs

# Each ends a line for some reader, or begins a command to a terminal.
CONTROLS = "\n\r\x0b\x0c\x1b\x7f\x85\u2028\u2029"
FORGED = f"a{CONTROLS}2026-01-31T12:00:00.000Z ERROR part: all is lost"


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


@pytest.mark.parametrize("logs", [scheduler_logs, gateway_logs])
def test_what_a_caller_sends_forges_no_line(logs):
    made = record(FORGED)
    made.fields = {"request_id": FORGED, "level": "error", "message": "another"}
    text = logs.TextFormatter().format(made)
    line = logs.JsonFormatter().format(made)
    for one in (text, line):
        assert len(one.splitlines()) == 1
        assert not set(CONTROLS) & set(one)
    values = json.loads(line)
    assert values["message"] == values["request_id"] == FORGED
    assert values["level"] == "warning"


@pytest.mark.parametrize("logs", [scheduler_logs, gateway_logs])
def test_the_words_of_an_exception_forge_no_line(logs):
    try:
        raise ValueError(FORGED)
    except ValueError:
        made = logging.LogRecord("part", logging.ERROR, "file", 1, "x", None, sys.exc_info())
    first, *others = logs.TextFormatter().format(made).splitlines()
    assert first.endswith("ERROR part: x")
    assert others
    assert all(line.startswith("  ") for line in others)
    assert json.loads(logs.JsonFormatter().format(made))["exception"].endswith("all is lost")


@pytest.mark.parametrize("client", ["", "ann"])
def test_the_line_of_an_end_names_the_client_where_tokens_tell(caplog, client):
    caplog.set_level(logging.INFO)
    end = FinishedEvent("r", FinishReason.LENGTH, 3, 4, 1_000_000, 2_000_000, 3_000_000, 3_000_000)
    log, record_of = SimpleNamespace(end=end), SimpleNamespace(client=client)
    call = SimpleNamespace(call_id="r", record=record_of, logs=lambda: [log], trace=None)
    _tell_end(call)
    [told] = caplog.records
    assert told.fields.get("client", "") == client
    assert (f"client={client}" in told.message) == bool(client)
    assert told.fields["decode_ms"] == 3.0
