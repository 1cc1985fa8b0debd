"""The header of a safetensors file, read and checked as untrusted input.

Layout: 8 bytes little-endian header size, the header (JSON), then the data. The header maps a
tensor name to its dtype, shape and byte range [a, b) of the data.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from worker.errors import CheckpointError

# The longest of a supported model takes some 6 MB; read, it takes up to thirty times as much.
MAX_HEADER_BYTES = 16 << 20
# A product of many sizes below 2^63 takes minutes; a parameter has two dimensions at most.
MAX_DIMENSIONS = 16
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its file's header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Everything known of a file without reading its data."""

    path: Path
    file_bytes: int
    header: bytes
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> SafetensorsHeader:
    """Reads and checks the header of `path`. Raises CheckpointError naming file and fault."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or size > min(file_bytes - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path.name}: truncated or damaged: the header should have {size:,} bytes, "
                    f"the file has {file_bytes:,} (limit {MAX_HEADER_BYTES:,})"
                )
            header = file.read(size)
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error.strerror}") from error
    tensors = _parse(path.name, header)
    _check_layout(path.name, tensors, file_bytes - 8 - size)
    return SafetensorsHeader(path, file_bytes, header, tensors)


def _parse(file: str, header: bytes) -> dict[str, StoredTensor]:
    try:
        entries = json.loads(header, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: damaged header: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: damaged header: not a JSON object")
    return {
        name: _parse_entry(file, name, entry)
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        doubled = min(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{doubled!r} stands there twice")
    return entries


def _parse_entry(file: str, name: str, entry: Any) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file}: damaged header entry of {name}: {entry!r}") from error
    are_sizes = all(type(n) is int and 0 <= n < 2**63 for n in numbers)
    if not isinstance(dtype, str) or not are_sizes or len(numbers) > MAX_DIMENSIONS + 2:
        raise CheckpointError(f"{file}: damaged header entry of {name}: {entry!r}")
    return StoredTensor(name, dtype, tuple(shape), begin, end)


def _check_layout(file: str, tensors: dict[str, StoredTensor], data_bytes: int) -> None:
    position = 0
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if tensor.begin != position or tensor.end < tensor.begin:
            raise CheckpointError(
                f"{file}: damaged header: {tensor.name} lies at bytes [{tensor.begin:,}, "
                f"{tensor.end:,}), expected to begin at {position:,}"
            )
        item_bytes = DTYPE_BYTES.get(tensor.dtype)
        if item_bytes and tensor.end - tensor.begin != prod(tensor.shape) * item_bytes:
            raise CheckpointError(
                f"{file}: damaged header: {tensor.name} {tensor.dtype} {list(tensor.shape)} "
                f"cannot have {tensor.end - tensor.begin:,} bytes"
            )
        position = tensor.end
    if position != data_bytes:
        raise CheckpointError(
            f"{file}: truncated or damaged: its tensors need {position:,} bytes of data, "
            f"the file has {data_bytes:,}"
        )
