"""A Hugging Face model folder: which tensors it holds, where, and whether that is all and right.

`model.safetensors.index.json` is the only truth where it exists, otherwise `model.safetensors`.
Nothing is read of the weights here except the headers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.errors import CheckpointError
from worker.model_config import ModelConfig, parse_model_config
from worker.safetensors_file import DTYPE_BYTES, SafetensorsHeader, StoredTensor, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HEAD_NAME = "lm_head.weight"
# An index of a supported model takes some 6 MB.
MAX_JSON_BYTES = 16 << 20
_MAX_NAMES_IN_ERROR = 6
_MAX_FILE_NAME = 255


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a parameter lies."""

    path: Path
    stored: StoredTensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose parameters are all there, once, in the right shape."""

    directory: Path
    config: ModelConfig
    tensors: dict[str, TensorLocation]
    fingerprint: str
    unlisted_files: tuple[str, ...]

    @property
    def weight_dtype(self) -> str:
        """The type of the embedding as stored: "bfloat16", "float16", else "float32"."""
        stored = self.tensors["model.embed_tokens.weight"].stored
        return {"BF16": "bfloat16", "F16": "float16"}.get(stored.dtype, "float32")


def open_checkpoint(directory: Path) -> Checkpoint:
    """Checks `directory` and its headers. Raises CheckpointError naming what is wrong."""
    if not directory.is_dir():
        raise CheckpointError(f"model folder {directory} does not exist or is not a folder")
    config_bytes, raw_config = _read_json(directory / "config.json")
    config = parse_model_config(raw_config)
    weight_map, files = _weight_files(directory)
    headers = {name: read_header(directory / name) for name in sorted(files)}
    if weight_map is None:
        weight_map = dict.fromkeys(headers[SINGLE_NAME].tensors, SINGLE_NAME)
    located = _locate(weight_map, headers)
    _check_tensors(directory, config, located)
    stray = {path.name for path in directory.glob("*.safetensors")} - files
    wanted = parameter_shapes(config)
    return Checkpoint(
        directory=directory,
        config=config,
        tensors={name: located[name] for name in wanted},
        fingerprint=_fingerprint(config_bytes, headers.values()),
        unlisted_files=tuple(sorted(stray)),
    )


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter the decoder needs, by name, with its shape."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD_NAME] = (vocab, hidden)
    for layer in range(config.num_layers):
        shapes.update(_layer_shapes(config, f"model.layers.{layer}."))
    return shapes


def _layer_shapes(config: ModelConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, inter = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.o_bias),
        "mlp.gate_proj": (inter, hidden, config.mlp_bias),
        "mlp.up_proj": (inter, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inter, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{prefix}{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes.update({f"{prefix}{name}.weight": (size,) for name, size in norms.items()})
    return shapes


def _weight_files(directory: Path) -> tuple[dict[str, str] | None, set[str]]:
    """The index (None without one) and the names of the files to read."""
    if (directory / INDEX_NAME).exists():
        weight_map = _read_index(directory / INDEX_NAME)
        files = set(weight_map.values())
        missing = sorted(name for name in files if not (directory / name).is_file())
        if missing:
            raise CheckpointError(
                f"{directory}: missing {_listed(missing)}, named in {INDEX_NAME}; "
                "download the checkpoint again"
            )
        return weight_map, files
    if (directory / SINGLE_NAME).is_file():
        return None, {SINGLE_NAME}
    found = sorted(path.name for path in directory.iterdir() if path.is_file())
    raise CheckpointError(
        f"{directory}: neither {SINGLE_NAME} nor {INDEX_NAME}; found {_listed(found) or 'nothing'}"
    )


def _read_index(path: Path) -> dict[str, str]:
    _, index = _read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path.name} has no weight_map")
    for tensor, file in weight_map.items():
        if not _is_file_name(file):
            raise CheckpointError(
                f"{path.name}: {tensor} is in {str(file)[:200]!r}, "
                "which is no file name of this folder"
            )
    return weight_map


def _is_file_name(value: Any) -> bool:
    if not isinstance(value, str) or Path(value).name != value or value in ("", ".", ".."):
        return False
    return len(value) <= _MAX_FILE_NAME


def _read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: not a file")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: has more than {MAX_JSON_BYTES:,} bytes")
        value = json.loads(content)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return content, value


def _locate(
    weight_map: dict[str, str], headers: dict[str, SafetensorsHeader]
) -> dict[str, TensorLocation]:
    absent = [name for name, file in weight_map.items() if name not in headers[file].tensors]
    if absent:
        raise CheckpointError(
            f"missing tensors: {_listed(absent)} not in {weight_map[min(absent)]}, "
            "where the index puts them"
        )
    for file, header in headers.items():
        extra = [name for name in header.tensors if weight_map.get(name) != file]
        doubled = [name for name in extra if name in weight_map]
        if doubled:
            raise CheckpointError(
                f"doubled tensors: {_listed(doubled)} in {file}, "
                f"but the index puts {min(doubled)} in {weight_map[min(doubled)]}"
            )
        if extra:
            raise CheckpointError(f"{file} holds {_listed(extra)}, which the index does not list")
    return {
        name: TensorLocation(headers[file].path, headers[file].tensors[name])
        for name, file in weight_map.items()
    }


def _check_tensors(
    directory: Path, config: ModelConfig, located: dict[str, TensorLocation]
) -> None:
    wanted = parameter_shapes(config)
    missing = wanted.keys() - located.keys()
    if missing:
        raise CheckpointError(f"{directory}: missing tensors: {_listed(missing)}")
    if config.tie_word_embeddings:
        # Some exporters store the tied head a second time; it must at least be the same matrix.
        wanted |= {HEAD_NAME: wanted["model.embed_tokens.weight"]}
    unknown = {n for n in located.keys() - wanted.keys() if not n.endswith("rotary_emb.inv_freq")}
    if unknown:
        raise CheckpointError(
            f"{directory}: unknown tensors: {_listed(unknown)}; a {config.model_type} model has "
            "none such"
        )
    for name in sorted(located.keys() & wanted.keys()):
        stored = located[name].stored
        if stored.shape != wanted[name]:
            raise CheckpointError(
                f"{name} has shape {list(stored.shape)}, config.json asks for {list(wanted[name])}"
            )
        if stored.dtype not in DTYPE_BYTES:
            raise CheckpointError(
                f"{name} in {located[name].path.name} is stored as {stored.dtype!r}; supported: "
                f"{', '.join(DTYPE_BYTES)}; "
                "take the model as it was published before it was quantised"
            )


def _fingerprint(config_bytes: bytes, headers: Iterable[SafetensorsHeader]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(hashlib.blake2b(config_bytes).digest())
    for header in sorted(headers, key=lambda h: h.path.name):
        digest.update(f"{header.path.name}\0{header.file_bytes}\0".encode())
        digest.update(hashlib.blake2b(header.header).digest())
    return digest.hexdigest()


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:_MAX_NAMES_IN_ERROR])
    more = len(ordered) - _MAX_NAMES_IN_ERROR
    return f"{shown} and {more} more" if more > 0 else shown
