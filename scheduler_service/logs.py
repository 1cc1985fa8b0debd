"""Log lines on standard error, one per event, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime


def configure_logging(level: str, form: str) -> None:
    """level: "debug" to "error"; form: "text" or "json". Called once, by the process's start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO scheduler_service.engine: message`, newlines made visible."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        text = text.replace("\n", "\\n").replace("\r", "\\r")
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, exception if there is one, and what the
    caller brings by `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=False)


def words(fields: Mapping[str, object]) -> str:
    """`a=1 b='two words'`: what is a name or a value is never in doubt."""
    return " ".join(f"{name}={_word(value)}" for name, value in fields.items())


def _word(value: object) -> str:
    text = str(value)
    return repr(text) if not text or set(text) & set(" ='\"") else text


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
