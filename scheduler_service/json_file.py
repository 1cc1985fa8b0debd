"""JSON files of a checkpoint, read with errors that name the file, the key and the value."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# The largest known tokenizer.json has 35 MB.
MAX_JSON_BYTES = 128 << 20
MAX_ERROR_CHARS = 1500


class ModelFilesError(Exception):
    """A checkpoint folder cannot be served. The message names the file, and the key and value.

    They may be anything: a long message is cut in the middle, and what UTF-8 cannot spell escaped.
    """

    def __init__(self, message: str) -> None:
        if len(message) > MAX_ERROR_CHARS:
            half = MAX_ERROR_CHARS // 2
            message = f"{message[:half]} ... {message[-half:]}"
        super().__init__(message.encode(errors="backslashreplace").decode())


class JsonFile:
    """The object in a JSON file. Getters return None for a key that is absent or null."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values

    @classmethod
    def read(cls, path: Path) -> JsonFile:
        """ModelFilesError when the file is missing, no JSON, or no object."""
        text = read_text(path, MAX_JSON_BYTES)
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelFilesError(f"{path}: not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelFilesError(f"{path}: holds a {type(values).__name__}, not an object")
        return cls(path, values)

    @classmethod
    def read_optional(cls, path: Path) -> JsonFile:
        """An empty object when the file is missing."""
        return cls.read(path) if path.exists() else cls(path, {})

    def raw(self, key: str) -> Any:
        return self._values.get(key)

    def wrong(self, key: str, wanted: str) -> ModelFilesError:
        """The error for a key whose value is not what is wanted."""
        value = json.dumps(self._values.get(key))
        return ModelFilesError(f"{self.path}: {key} is {value[:200]}, not {wanted}")

    def integer(self, key: str, at_least: int = 0) -> int | None:
        value = self.raw(key)
        if value is None:
            return None
        if not _is_integer(value) or value < at_least:
            raise self.wrong(key, f"an integer of at least {at_least}")
        return int(value)

    def number(self, key: str) -> float | None:
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a finite number")
        if not -sys.float_info.max <= value <= sys.float_info.max:
            raise self.wrong(key, "a finite number")
        return float(value)

    def string(self, key: str) -> str | None:
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.raw(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A value that is one id, a list of ids, or null."""
        value = self.raw(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(_is_integer(item) and item >= 0 for item in ids):
            raise self.wrong(key, "a token id or a list of token ids")
        return tuple(ids)

    def token_text(self, key: str) -> str | None:
        """A special token, written as its text or as an object with `content`."""
        value = self.raw(key)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not (isinstance(value, str) and is_unicode(value)):
            raise self.wrong(key, "a token's text")
        return value


def read_text(path: Path, max_bytes: int) -> str:
    """As read_bytes; ModelFilesError as well when it is not UTF-8."""
    try:
        return read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ModelFilesError(f"{path}: cannot be read: {error}") from error


def read_bytes(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """A file's content. ModelFilesError when it is missing, no file, or too long."""
    if path.exists() and not path.is_file():
        raise ModelFilesError(f"{path}: not a file")
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise ModelFilesError(f"{path}: no such file; a checkpoint needs it") from None
    except OSError as error:
        raise ModelFilesError(f"{path}: cannot be read: {error}") from error
    if len(content) > max_bytes:
        raise ModelFilesError(f"{path}: has more than {max_bytes:,} bytes")
    return content


def is_unicode(text: str) -> bool:
    """False for a text with half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
