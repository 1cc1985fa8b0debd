"""B32: index, shards and headers that disagree stop the start, by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from worker_driver import Driver

from checkpoints import make_checkpoint
from worker.checkpoint import INDEX_NAME, SINGLE_NAME, open_checkpoint
from worker.errors import CheckpointError

SHARD = "model-00002-of-00003.safetensors"
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "qwen3", num_shards=3)


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def edit_shard(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SHARD)
    change(tensors)
    save_file(tensors, folder / SHARD)


def name_in_shard(folder: Path) -> str:
    return min(load_file(folder / SHARD))


def refused(folder: Path, *named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for text in named:
        assert text in str(caught.value)


def test_complete_folder(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weight_dtype == "float32"
    assert len(checkpoint.tensors) == 24
    assert checkpoint.unlisted_files == ()


def test_missing_shard(folder: Path) -> None:
    (folder / SHARD).unlink()
    refused(folder, SHARD, "missing")


def test_truncated_shard(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 4)
    refused(folder, SHARD, "truncated")


def test_stray_consolidated_file_is_not_read(folder: Path) -> None:
    """weight_map is the only truth: what it does not list is named, and not opened."""
    before = open_checkpoint(folder)
    save_file({NORM: torch.zeros(48)}, folder / "consolidated.safetensors")
    (folder / "model-extra.safetensors").write_bytes(b"not a safetensors file")
    after = open_checkpoint(folder)
    assert after.tensors == before.tensors
    assert after.fingerprint == before.fingerprint
    assert after.unlisted_files == ("consolidated.safetensors", "model-extra.safetensors")


def test_second_copy_in_an_unlisted_file_changes_nothing(folder: Path) -> None:
    prompt = (5, 6, 7, 8)
    expected = Driver(folder, max_seq_len=32).generate(prompt, 6)
    names = load_file(folder / SHARD)
    save_file(
        {name: torch.zeros_like(value) for name, value in names.items()}, folder / "z.safetensors"
    )
    assert Driver(folder, max_seq_len=32).generate(prompt, 6) == expected


def test_second_copy_in_a_listed_file(folder: Path) -> None:
    edit_shard(
        folder, lambda tensors: tensors.update({"model.embed_tokens.weight": torch.zeros(2, 2)})
    )
    refused(folder, "doubled", "model.embed_tokens.weight", SHARD)


def test_unlisted_tensor_in_a_listed_file(folder: Path) -> None:
    edit_shard(folder, lambda tensors: tensors.update({"extra.weight": torch.zeros(2)}))
    refused(folder, "extra.weight", SHARD)


def test_tensor_missing_from_its_shard(folder: Path) -> None:
    name = name_in_shard(folder)
    edit_shard(folder, lambda tensors: tensors.pop(name))
    refused(folder, "missing", name, SHARD)


def test_tensor_missing_from_the_index(folder: Path) -> None:
    name = name_in_shard(folder)
    edit_shard(folder, lambda tensors: tensors.pop(name))
    edit_index(folder, lambda weight_map: weight_map.pop(name))
    refused(folder, "missing tensors", name)


def test_unknown_tensor(folder: Path) -> None:
    edit_shard(
        folder,
        lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}),
    )
    edit_index(
        folder, lambda weight_map: weight_map.update({"model.layers.9.mlp.up_proj.weight": SHARD})
    )
    refused(folder, "unknown", "model.layers.9.mlp.up_proj.weight", "qwen3")


def test_misshapen_tensor(folder: Path) -> None:
    name = name_in_shard(folder)
    edit_shard(folder, lambda tensors: tensors.update({name: torch.zeros(3, 5)}))
    refused(folder, name, "[3, 5]")


def test_integer_tensor(folder: Path) -> None:
    name = name_in_shard(folder)
    edit_shard(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    refused(folder, name, "I8", "quantised")


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "", "..", 7])
def test_index_leads_out_of_the_folder(folder: Path, file: object) -> None:
    edit_index(folder, lambda weight_map: weight_map.update({NORM: file}))  # type: ignore[dict-item]
    refused(folder, NORM, repr(file))


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": []}'])
def test_broken_index(folder: Path, content: str) -> None:
    (folder / INDEX_NAME).write_text(content)
    refused(folder, INDEX_NAME)


def test_tied_head_may_be_stored_again(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    tensors = load_file(folder / SINGLE_NAME)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, folder / SINGLE_NAME)
    assert "lm_head.weight" not in open_checkpoint(folder).tensors
    tensors["lm_head.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / SINGLE_NAME)
    refused(folder, "lm_head.weight", "[4, 4]")


def test_folders_that_are_none(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "absent", "does not exist")
    refused(tmp_path, "config.json", "cannot be read")
    folder = make_checkpoint(tmp_path / "model", "llama")
    (folder / SINGLE_NAME).rename(folder / "pytorch_model.bin")
    refused(folder, SINGLE_NAME, "pytorch_model.bin")


def test_fingerprint_covers_config_and_weights(tmp_path: Path) -> None:
    prints = {
        open_checkpoint(make_checkpoint(tmp_path / name, "llama", **changes)).fingerprint
        for name, changes in {
            "a": {},
            "theta": {"rope_theta": 5.0},
            "shards": {"num_shards": 2},
            "dtype": {"dtype": "bfloat16"},
        }.items()
    }
    assert len(prints) == 4
    same = make_checkpoint(tmp_path / "again", "llama")
    assert open_checkpoint(same).fingerprint in prints


def header(entries: object) -> bytes:
    body = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(body).to_bytes(8, "little") + body


def entry(
    begin: object, end: object, shape: object = (2,), dtype: object = "F32"
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x00",
        (1 << 62).to_bytes(8, "little"),
        (200_000_000).to_bytes(8, "little"),
        header(b"{"),
        header(b"\xff\xfe"),
        header(b"[" * 5000),
        header([]),
        header(b'{"a": 1, "a": 2}'),
        header({"a": 3}),
        header({"a": {"dtype": "F32", "shape": [2]}}),
        header({"a": entry(0, 8, shape=[-2])}) + bytes(8),
        header({"a": entry(0, 8, shape=[2.0])}) + bytes(8),
        header({"a": entry(0, 8, shape=[True, 2])}) + bytes(8),
        header({"a": entry(0, 8, shape=3)}) + bytes(8),
        header({"a": entry(0, 8, dtype=None)}) + bytes(8),
        header({"a": entry(8, 0)}) + bytes(8),
        header({"a": entry(0, 8, shape=[3])}) + bytes(8),
        header({"a": entry(0, 8), "b": entry(4, 12)}) + bytes(12),
        header({"a": entry(0, 8), "b": entry(16, 24)}) + bytes(24),
        header({"a": entry(0, 8)}) + bytes(4),
        header({"a": entry(0, 8)}) + bytes(12),
        header({"a": entry(0, 2**70)}),
        # A product that would take minutes.
        header({"a": entry(0, 8, shape=[2**62] * 400_000)}) + bytes(8),
        header({f"name {i}": {} for i in range(1_500_000)}),
    ],
)
def test_damaged_headers(tmp_path: Path, content: bytes) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / SINGLE_NAME).write_bytes(content)
    refused(folder, SINGLE_NAME)


def test_a_header_with_very_many_doubled_names_is_refused_at_once(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    header = b"{" + b",".join(b'"name%d":1' % (i // 2) for i in range(200_000)) + b"}"
    (folder / SINGLE_NAME).write_bytes(len(header).to_bytes(8, "little") + header)
    refused(folder, "'name0' stands there twice")


def test_a_file_name_that_no_file_can_have(folder: Path) -> None:
    edit_index(folder, lambda index: index.update({NORM: "x" * 5000}))
    refused(folder, NORM, "no file name of this folder")


def test_a_pipe_in_place_of_config_json_is_not_waited_for(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    refused(folder, "config.json: not a file")


def test_a_config_without_end_is_not_read(folder: Path) -> None:
    os.truncate(folder / "config.json", 1 << 40)
    refused(folder, "config.json: has more than 16,777,216 bytes")


def test_words_of_a_file_fit_an_error(folder: Path) -> None:
    """An error travels in a status: short, and as UTF-8."""
    text = (folder / INDEX_NAME).read_text()
    (folder / INDEX_NAME).write_text(text.replace(f'"{NORM}"', '"' + "\\ud800" * 100_000 + '"'))
    with pytest.raises(CheckpointError, match="not in") as caught:
        open_checkpoint(folder)
    assert len(str(caught.value).encode()) < 10_000
    assert "\\ud800" in str(caught.value)
