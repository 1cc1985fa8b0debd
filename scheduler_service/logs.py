"""Log lines on standard error, one per event, as text or as JSON."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

# What ends a line for some reader of it, or moves a terminal's cursor.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def configure_logging(level: str, form: str) -> None:
    """level: "debug" to "error"; form: "text" or "json". Called once, by the process's start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO scheduler_service.engine: message`.

    Control characters are made visible; the lines of a traceback follow, and only they begin with
    a space.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        lines = self.formatException(record.exc_info).split("\n") if record.exc_info else ()
        return "\n  ".join(_CONTROL.sub(_visible, line) for line in (text, *lines))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, exception if there is one, and what the
    caller brings by `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        own = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        # Ours come first, and stay ours.
        values = {**own, **getattr(record, "fields", {}), **own}
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        text = json.dumps(values, ensure_ascii=False)
        return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def about(request_id: str) -> dict[str, dict[str, object]]:
    """The `extra` of a line that tells of a request."""
    return {"fields": {"request_id": request_id}}


def words(fields: Mapping[str, object]) -> str:
    """`a=1 b='two words'`: what is a name or a value is never in doubt."""
    return " ".join(f"{name}={_word(value)}" for name, value in fields.items())


def _word(value: object) -> str:
    text = str(value)
    return repr(text) if not text or set(text) & set(" ='\"") else text


def _visible(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
