"""The file that a benchmark leaves: one form for all kinds, written whole or not at all."""

import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from .figures import Figure
from .output import CliError

SCHEMA: Final = "slotwise-bench/1"


def result_head(kind: str, machine: Mapping[str, Any], setup: Mapping[str, Any]) -> dict[str, Any]:
    """What every result begins with."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "command": ["slotwise", *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "client": {"slotwise": metadata.version("slotwise"), "python": platform.python_version()},
        "machine": dict(machine),
        "setup": dict(setup),
        "complete": True,
        "incomplete_because": None,
    }


def figures_json(figures: Mapping[str, Figure]) -> dict[str, Any]:
    """The figures as `bench compare` reads them."""
    return {name: figure.as_json() for name, figure in figures.items()}


def write_whole(path: Path, data: bytes) -> None:
    """The file as it was, or all of `data`: written beside it and then renamed. OSError."""
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_result(path: Path) -> dict[str, Any]:
    """A result of this schema; CliError says what it is otherwise."""
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CliError(
            f"{path} is no JSON; give files that slotwise bench wrote with --json-file"
        ) from error
    schema = result.get("schema") if isinstance(result, dict) else None
    if schema != SCHEMA or not isinstance(result.get("figures"), dict):
        raise CliError(f"{path} is no result of the schema {SCHEMA}: it says {schema!r}")
    return dict(result)
