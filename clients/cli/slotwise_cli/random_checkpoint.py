"""Writing a model folder of random weights: blocks drawn and written by many threads."""

import itertools
import json
import os
import statistics
import string
import threading
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from .geometry import DTYPE_BYTES, parameter_shapes
from .output import Report

SCALE: Final = 0.02
SHARD_BYTES: Final = 4 << 30
_BLOCK: Final = 1 << 22
_SAFETENSORS_DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Tokenizer files and headers.
_SMALL_FILES_BYTES: Final = 16 << 20

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    path: Path
    # Of its first byte in the file.
    offset: int


def checkpoint_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """What the folder will take on disk."""
    elements = sum(map(prod, parameter_shapes(config).values()))
    return elements * DTYPE_BYTES[dtype] + _SMALL_FILES_BYTES


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    dtype: str,
    seed: int,
    report: Report,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Weights normal * 0.02 and norms 1, config and tokenizer, into the empty `folder`.

    A parameter's values are a function of `seed` and its name alone.
    """
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", ids)
    write_tokenizer(folder, config)
    tensors = _lay_out(folder, parameter_shapes(config), dtype, shard_bytes)
    _write_weights(tensors, dtype, seed, report)


def _lay_out(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, shard_bytes: int
) -> list[_Tensor]:
    """Writes the index and the head of every file; says where each tensor goes."""
    item = DTYPE_BYTES[dtype]
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = prod(shape) * item
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    tensors, weight_map = [], {}
    for number, names in enumerate(shards, start=1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors += _begin_file(path, {name: shapes[name] for name in names}, dtype)
        weight_map.update(dict.fromkeys(names, path.name))
    total = sum(map(prod, shapes.values())) * item
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
    return tensors


def _begin_file(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> list[_Tensor]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype],
            "shape": shape,
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + begin)
    base = 8 + len(text)
    return [
        _Tensor(name, shape, path, base + header[name]["data_offsets"][0])
        for name, shape in shapes.items()
    ]


def _write_weights(tensors: list[_Tensor], dtype: str, seed: int, report: Report) -> None:
    """Every core draws blocks and writes each to its place; memory is some blocks per core."""
    item = DTYPE_BYTES[dtype]
    normals, one = _as_bits(_normal_quantiles() * SCALE, dtype), _as_bits(np.ones(1), dtype)
    total = sum(prod(tensor.shape) for tensor in tensors) * item
    done = 0
    lock = threading.Lock()

    def fill(task: tuple[_Tensor, int, int]) -> None:
        nonlocal done
        tensor, block, count = task
        if tensor.name.endswith("norm.weight"):
            values = one.repeat(count)
        else:
            values = normals[_draw(seed, tensor.name, block, count)]
        with tensor.path.open("r+b", buffering=0) as file:
            file.seek(tensor.offset + block * _BLOCK * item)
            left = memoryview(values.view(np.uint8).data)
            while left:
                left = left[file.write(left) :]
        with lock:
            done += values.nbytes
            report("writing", done, total)

    # Blocks of all tensors in turn; a map holds every task at once, and these are small.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(fill, _blocks(tensors)):
            pass


def _blocks(tensors: list[_Tensor]) -> Iterator[tuple[_Tensor, int, int]]:
    for tensor in tensors:
        size = prod(tensor.shape)
        for block in range(-(-size // _BLOCK)):
            yield tensor, block, min(_BLOCK, size - block * _BLOCK)


def _draw(seed: int, name: str, block: int, count: int) -> np.ndarray:
    """`count` random 16-bit numbers."""
    words = (seed, zlib.crc32(name.encode()), block)
    generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence(words)))
    drawn = generator.integers(0, 1 << 64, -(-count // 4), dtype=np.uint64)
    return drawn.view(np.uint16)[:count]


def _normal_quantiles() -> np.ndarray:
    """The normal distribution in 2^16 steps: a random index gives a normal number."""
    steps = 1 << 16
    quantile = statistics.NormalDist().inv_cdf
    return np.array([quantile((i + 0.5) / steps) for i in range(steps)])


def _as_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers in `dtype`; NumPy knows bfloat16 only as its bits."""
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(dtype)


def write_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """A byte-level tokenizer whose every id below the vocabulary size has a text.

    Text is encoded byte by byte; the other ids are syllables, which only generated text contains.
    """
    specials = {config["bos_token_id"]: "<|endoftext|>", config["eos_token_id"]: "<|im_end|>"}
    free = (i for i in itertools.count() if i not in specials)
    specials[next(i for i in free if i > min(specials))] = "<|im_start|>"
    texts = itertools.chain(sorted(pre_tokenizers.ByteLevel.alphabet()), _syllables())
    vocab = {specials[i] if i in specials else next(texts): i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ordered = [AddedToken(specials[i], special=True, normalized=False) for i in sorted(specials)]
    tokenizer.add_special_tokens(ordered)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "model_max_length": config["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", described)


def _syllables() -> Iterator[str]:
    """A space and letters, all different: more than any vocabulary has."""
    for length in range(1, 5):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield "Ġ" + "".join(letters)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
