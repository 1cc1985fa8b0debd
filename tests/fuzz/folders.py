"""Model folders damaged, or made to do damage: each follows from a seed and its number."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.bodies import flipped

from checkpoints import make_checkpoint

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
TEMPLATE = "chat_template.jinja"
# Put where a value was; and in place of these marks, text that no encoder would write.
RAW = {
    "@deep": "[" * 200_000,
    "@deep object": '{"a":' * 100_000,
    "@long number": "9" * 5000,
    "@float": "1e999999",
    "@surrogate": '"\\ud800"',
    "@many": "[" + "0," * 300_000 + "0]",
}
STRANGE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 255, 4097, 2**31 - 1, 2**31, 2**53, 2**62, 2**63, 2**64),
    *(10**400, -(2**63), 0.5, 1e-45, 1e308, -0.0, float("nan"), float("inf"), -float("inf")),
    *("", "a", "\0", "../x", "/etc/passwd", "float16", "x" * 5000, "\ud7ff", "\U0010ffff"),
    *([], {}, [[]], [0], [None], [-1], [2**40] * 3, [1] * 70, ["a"], {"a": {"b": []}}, *RAW),
]
DTYPES = ["F32", "BF16", "F16", "F64", "I8", "U8", "BOOL", "F8_E4M3", "F4", "f32", "", "\0", 4]
SIZES = [
    *(0, 1, 7, 8, 100, 1 << 20, 1 << 24, (1 << 24) + 1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)
]
TEMPLATES = [
    *("{{", "{% for %}", "{% if x %}" * 3000, "{{ 9**9**9 }}", "{{ 'a' * 10**9 }}", "\0"),
    *("{% for i in range(10**12) %}a{% endfor %}", "{{ ''.__class__.__mro__ }}", "{{ x }}"),
    *("{{ '%9999999d' % 1 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
    "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    *("{% include '/etc/passwd' %}", "{{ messages[0].content }}", "{{ raise_exception('no') }}"),
]


@dataclass(frozen=True, slots=True)
class Damage:
    """A folder's files in place of the good ones; None: it has none such. `links`: name to what the
    file is instead ("directory", "pipe", a path that it is a link to, "sparse N")."""

    number: int
    kind: str
    files: dict[str, bytes | None]
    specials: dict[str, str]

    def __str__(self) -> str:
        changed = {name: (data or b"")[:150] for name, data in self.files.items()}
        return f"folder {self.number} ({self.kind}) {changed} {self.specials}"


class FolderMaker:
    """`scratch` gets the good folders that are damaged."""

    def __init__(self, seed: int, scratch: Path) -> None:
        self._seed = seed
        self._outside = scratch / "outside.safetensors"
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 272}
        whole = make_checkpoint(scratch / "whole", "qwen2", tokenizer=True, **shape)
        split = make_checkpoint(scratch / "split", "qwen3", num_shards=2, tokenizer=True, **shape)
        self._whole, self._split = read_files(whole), read_files(split)
        self._outside.write_bytes(self._split[SHARDS[0]])
        self._makers: list[Callable[[random.Random], tuple[dict[str, bytes | None], dict]]] = [
            *[self._header] * 6,
            *[self._header_bytes] * 2,
            self._size,
            self._index,
            self._index,
            *[self._json] * 4,
            self._template,
            self._special,
        ]

    def damage(self, number: int) -> Damage:
        rng = random.Random(f"{self._seed}/{number}")
        make = rng.choice(self._makers)
        files, specials = make(rng)
        return Damage(number, make.__name__.strip("_"), files, specials)

    def good_files(self, damage: Damage) -> dict[str, bytes]:
        """Of the folder that is damaged."""
        names = {*damage.files, *damage.specials}
        return self._split if names & {INDEX, *SHARDS} else self._whole

    def _header(self, rng: random.Random) -> tuple[dict[str, bytes | None], dict]:
        """The header as JSON: entries, types, shapes, ranges and names."""
        name = rng.choice([WEIGHTS, *SHARDS])
        entries, data = _parts({**self._whole, **self._split}[name])
        if rng.random() < 0.02:
            entries = dict(_many_entries(rng.choice([1000, 50_000, 300_000])))
        for _ in range(rng.choice([1, 1, 2])):
            _change_entry(rng, entries)
        return {name: with_header(to_json(rng, entries), data)}, {}

    def _header_bytes(self, rng: random.Random) -> tuple[dict[str, bytes | None], dict]:
        entries, data = _parts(self._whole[WEIGHTS])
        header = flipped(rng, json.dumps(entries).encode())
        return {WEIGHTS: with_header(header, data)}, {}

    def _size(self, rng: random.Random) -> tuple[dict[str, bytes | None], dict]:
        """What the file says of its header's size, and where the file ends."""
        whole = self._whole[WEIGHTS]
        size = int.from_bytes(whole[:8], "little")
        size = rng.choice([*SIZES, size - 1, size + 1, size + 8, len(whole) - 8, len(whole)])
        changed = size.to_bytes(8, "little") + whole[8:]
        cut = rng.choice([0, 7, 8, 9, 200, len(changed) - 1, len(changed), len(changed)])
        return {WEIGHTS: changed[:cut] + rng.choice([b"", b"", b"\0", bytes(5000)])}, {}

    def _index(self, rng: random.Random) -> tuple[dict[str, bytes | None], dict]:
        index = json.loads(self._split[INDEX])
        if rng.random() < 0.7:
            name = rng.choice(list(index["weight_map"]))
            outside = self._outside
            paths = [
                *(
                    f"../{outside.name}",
                    str(outside),
                    "..",
                    ".",
                    "",
                    "a/b",
                    "\0",
                    "a\0b",
                    "x" * 300,
                ),
                *("model", SHARDS[0], "./" + SHARDS[0], 7, None, [SHARDS[0]], "@surrogate"),
                *("config.json", "tokenizer.json", "absent.safetensors", "~", "C:\\x"),
            ]
            index["weight_map"][name] = rng.choice(paths)
        else:
            change_json(rng, index)
        return {INDEX: to_json(rng, index)}, {}

    def _json(self, rng: random.Random) -> tuple[dict[str, bytes | None], dict]:
        name = rng.choice(JSON_FILES)
        if rng.random() < 0.3:
            return {name: flipped(rng, self._whole[name])}, {}
        value = json.loads(self._whole[name])
        for _ in range(rng.choice([1, 1, 2])):
            change_json(rng, value)
        if name == "config.json" and rng.random() < 0.4:
            value["rope_scaling"] = _rope_scaling(rng)
        return {name: to_json(rng, value)}, {}

    def _template(self, rng: random.Random) -> tuple[dict[str, bytes | None], dict]:
        text = rng.choice(TEMPLATES).encode()
        return {TEMPLATE: text if rng.random() < 0.7 else flipped(rng, text)}, {}

    def _special(self, rng: random.Random) -> tuple[dict[str, bytes | None], dict]:
        """What is no file, has no content, or too much of it."""
        name = rng.choice([*JSON_FILES, TEMPLATE, INDEX, WEIGHTS, *SHARDS])
        kind = rng.choice(
            [
                *("directory", "pipe", "sparse", "missing", "empty", "/dev/zero", "/absent", name),
                *("..", str(self._outside), "/dev/null", "/proc/self/mem"),
            ]
        )
        if kind in ("missing", "empty"):
            return {name: None if kind == "missing" else b""}, {}
        return {}, {name: kind}


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_folder(folder: Path, good: dict[str, bytes], damage: Damage) -> None:
    """The folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in {**good, **damage.files}.items():
        if data is not None and name not in damage.specials:
            (folder / name).write_bytes(data)
    for name, kind in damage.specials.items():
        path = folder / name
        if kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "sparse":
            path.touch()
            os.truncate(path, 1 << 40)
        else:
            path.symlink_to(kind)


def with_header(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def to_json(rng: random.Random, value: Any) -> bytes:
    """With what no encoder would write in place of the marks, and a key twice now and then."""
    text = json.dumps(value)
    for mark, raw in RAW.items():
        text = text.replace(json.dumps(mark), raw)
    if rng.random() < 0.03 and text.startswith('{"'):
        text = '{"": 1, "": 2, ' + text[1:]
    return text.encode()


def change_json(rng: random.Random, value: Any) -> None:
    """One value, or one key, somewhere in it."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = rng.choice(keys)
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
            value = inner
            continue
        match rng.randrange(4):
            case 0:
                del value[key]
            case 1 if isinstance(value, dict):
                value[rng.choice(["", "\0", "x" * 3000, "id", "type"])] = value.pop(key)
            case _:
                value[key] = _strange(rng)
        return


def _parts(file: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:end]), file[end:]


def _many_entries(count: int) -> list[tuple[str, Any]]:
    return [(f"t{i}", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}) for i in range(count)]


def _change_entry(rng: random.Random, entries: dict[str, Any]) -> None:
    name = rng.choice([key for key in entries if key != "__metadata__"] or [""])
    entry = entries.get(name)
    if not isinstance(entry, dict):
        return
    match rng.randrange(7):
        case 0:
            entry["dtype"] = rng.choice(DTYPES)
        case 1:
            sizes = [0, 1, 2, 2**16, 2**31, 2**32, 2**62, 2**63, -1, -(2**63), True, 1.0, None]
            count = rng.choice([0, 1, 2, 3, 4, 9, 300, 100_000 if rng.random() < 0.1 else 5])
            entry["shape"] = [rng.choice(sizes) for _ in range(count)]
        case 2:
            match entry.get("data_offsets"):
                case [int(low), int(high)]:
                    pass
                case _:
                    # Another change came before.
                    low, high = 0, 8
            ranges = [(high, low), (-1, high), (low, high + 4), (low - 4, high), (0, 2**63), (0, 0)]
            ranges += [(low, 2**70), (low,), (low, high, high), (float(low), high), ("0", high)]
            entry["data_offsets"] = list(rng.choice(ranges))
        case 3:
            other = rng.choice(list(entries))
            entries[name], entries[other] = entries[other], entry
        case 4:
            new = rng.choice(["", "\0", "a\0b", "\ud7ff", "x" * 100_000, "__metadata__", "../x"])
            entries[new] = entries.pop(name)
        case 5:
            entries[name] = _strange(rng)
        case 6:
            change_json(rng, entries)


def _strange(rng: random.Random) -> Any:
    """One of its own: it may be changed again."""
    return copy.deepcopy(rng.choice(STRANGE))


def _rope_scaling(rng: random.Random) -> Any:
    kinds = ["default", "linear", "llama3", "yarn", "dynamic", 3, None]
    keys = ["factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate"]
    keys += ["original_max_position_embeddings", "rope_theta", "mscale", "attention_factor"]
    numbers = [1e-9, 1.0, 1.0000000000000002, 2, 4.0, 1e12, 8192, *STRANGE]
    return {"rope_type": rng.choice(kinds)} | {
        key: rng.choice(numbers) for key in rng.sample(keys, rng.randrange(len(keys)))
    }
