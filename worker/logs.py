"""Log lines on standard error, one per event, as text or as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

# The rank and the epoch of a process; none before its first Configure.
Place = tuple[int, int] | None

FORMS: Final = ("text", "json")
# What ends a line for some reader of it, or moves a terminal's cursor.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def configure_logging(form: str, place: Callable[[], Place] = lambda: None) -> None:
    """form: one of FORMS; `place` is asked at each line. May be called again."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(place) if form == "json" else TextFormatter())
    handler.addFilter(_is_no_cancel)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO worker.rank: message`, as the scheduler's lines are; it reads
    the level off them. Control characters are made visible."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        lines = self.formatException(record.exc_info).split("\n") if record.exc_info else ()
        return "\n  ".join(_CONTROL.sub(_visible, line) for line in (text, *lines))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message; rank and epoch, once they are known;
    exception if there is one."""

    def __init__(self, place: Callable[[], Place]) -> None:
        super().__init__()
        self._place = place

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        place = self._place()
        if place is not None:
            values["rank"], values["epoch"] = place
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        text = json.dumps(values, ensure_ascii=False)
        return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _visible(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _is_no_cancel(record: logging.LogRecord) -> bool:
    """gRPC logs a call that its caller, or our stop, cancelled as an error; it is none."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
